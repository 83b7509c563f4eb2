"""The differences between the versions of redis-py that aiodelay works with."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import Any

from redis import exceptions as e
from redis.asyncio import Connection

try:
    from redis.maint_notifications import MaintNotificationsConfig
except ImportError:  # redis-py before 7.0 does not know these notifications
    MaintNotificationsConfig = None  # type: ignore[assignment,misc]

__all__ = ["code_of", "has_ended_or_data", "of_its_class", "quiet_options"]

_LOOK = "can_read" if hasattr(Connection, "can_read") else "can_read_destructive"
_CLASSES: dict[str, type[e.RedisError]] = {
    "ASK": e.AskError,
    "CLUSTERDOWN": e.ClusterDownError,
    "CROSSSLOT": e.ClusterCrossSlotError,
    "LOADING": e.BusyLoadingError,
    "MASTERDOWN": e.MasterDownError,
    "MOVED": e.MovedError,
    "NOSCRIPT": e.NoScriptError,
    "READONLY": e.ReadOnlyError,
    "TRYAGAIN": e.TryAgainError,
}
_CODES: dict[type[BaseException], str] = {kind: code for code, kind in _CLASSES.items()}


def quiet_options(kind: type[Any]) -> dict[str, Any]:
    """Return the options with which a connection of redis-py sends no command that nobody asked for.

    Some servers refuse such commands. The names of the options depend on the version.

    Args:
        kind: The class of the connection.
    """
    options: dict[str, Any] = {"driver_info": None, "lib_name": None, "lib_version": None}
    if MaintNotificationsConfig is not None:
        options["maint_notifications_config"] = MaintNotificationsConfig(enabled=False)
    known = {name for each in kind.__mro__ if each is not object for name in inspect.signature(each).parameters}
    if "driver_info" in known:  # since 7.2 it replaces the other two, and a warning tells who gives them
        del options["lib_name"], options["lib_version"]
    return {name: value for name, value in options.items() if name in known}


def has_ended_or_data(connection: Any) -> Awaitable[bool]:  # noqa: ANN401 - redis-py's connection
    """Return whether an idle connection has data, or was closed by the server. Do not use it again then.

    redis-py before 8.0 may read the data to find out, and its method has another name.

    Raises:
        RedisError, OSError: The connection has failed.
    """
    looked: Awaitable[bool] = getattr(connection, _LOOK)()
    return looked


def of_its_class(error: BaseException) -> BaseException:
    """Return an error that a server answered, in the class for its code, such as `MovedError`.

    redis-py before 6.0 gives the codes of a cluster no class of their own, and leaves them in the text.
    """
    if type(error) is e.ResponseError:
        code, _, text = str(error).partition(" ")
        if code in _CLASSES:
            return _CLASSES[code](text)
    return error


def code_of(error: BaseException) -> str:
    """Return the code that redis-py took from the text of a server's error, such as `READONLY`; else an empty text.

    redis-py before 7.2 does not keep the code, so the class tells it.
    """
    code = getattr(error, "status_code", None)
    return code if isinstance(code, str) else _CODES.get(type(error), "")

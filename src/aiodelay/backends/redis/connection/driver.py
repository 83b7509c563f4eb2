"""The differences between the versions of redis-py that aiodelay works with."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import Any

from redis.asyncio import Connection

try:
    from redis.maint_notifications import MaintNotificationsConfig
except ImportError:  # redis-py before 7.0 does not know these notifications
    MaintNotificationsConfig = None  # type: ignore[assignment,misc]

__all__ = ["has_ended_or_data", "quiet_options"]

_LOOK = "can_read" if hasattr(Connection, "can_read") else "can_read_destructive"


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

"""`Fault`, and the classification of redis-py's errors. `Client` raises each error as a `Fault`.

The classes are: the server did not carry out the call, the server refused it for lack of memory, or the effect is
unknown.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from redis import exceptions as e

from aiodelay.backends.redis.records.shards import ShardLayout, stale_layout
from aiodelay.core.features import REDIS_LAYOUT, newer_layout, too_new
from aiodelay.errors import StoreMismatchError, StoreTooNewError, cut

from .driver import code_of, of_its_class

__all__ = ["Fault", "Kind", "fault_of", "reply_of"]

Kind: TypeAlias = Literal["unavailable", "full", "unknown"]

_NOT_CARRIED_OUT: tuple[type[Exception], ...] = (
    e.AuthenticationError,
    e.BusyLoadingError,
    e.ReadOnlyError,
    e.NoScriptError,
    e.MovedError,
    e.AskError,
    e.TryAgainError,
    e.ClusterDownError,
    e.ClusterCrossSlotError,
    e.MasterDownError,
)
_CODES = ("BUSY ", "NOREPLICAS ", "MISCONF ", "READONLY ", "MASTERDOWN ", "LOADING ")
_IN_SCRIPT = ("-READONLY ", "-NOREPLICAS ", "-MISCONF ", "-MASTERDOWN ")  # the forms of these codes in Redis 6.2
_ELSEWHERE = ("READONLY ", "MASTERDOWN ")
"""Codes of a server that has become a replica. The host name may now belong to another server, so connect again."""
_REPLACED = (*_ELSEWHERE, "NOREPLICAS ")
"""Codes of a server that another server may have replaced. A primary without its replicas may be cut off."""
_MOVING: tuple[type[Exception], ...] = (
    e.BusyLoadingError,
    e.ReadOnlyError,
    e.AskError,
    e.TryAgainError,
    e.ClusterDownError,
    e.MasterDownError,
)
"""Errors of a server that does not serve the key, or not now. Another server may serve it now or soon."""
_NEWER = "NEWER "
"""The start of the error with which a script refuses newer data.

The word `layout` or `features` follows, and then the value that the script found.
"""
_FULL = "OOM command not allowed"
_LIMIT = 200


class Fault(Exception):  # noqa: N818 - internal: this package turns it into an outcome or a StoreUnavailableError
    """A failed call to the server.

    Attributes:
        kind: `unavailable` and `full` mean that the server has not carried out the call. `unknown` means that the
            server may have carried it out.
        reason: The cause, as text for people. It contains no secret.
        is_connection: True if the connection failed, or if the server answered that it is still loading its data or is
            a replica. False for any other error that the server answered.
        is_damage: True if another program has written a key of aiodelay as another type. A repetition does not help.
        is_moving: True if the server has surely not carried out the call, and this server or another one may carry out
            the same call soon. An example is a slot of a cluster that is moving to another node.
        too_new: The error for a namespace whose layout or features this version does not know, or None. The store's
            name is not in it yet.
        layout: The layout of the namespace, if it is another one than the caller's; else None.
        mismatch: The error for a URL that does not fit the servers, or None.
        is_unconfirmed: True if the server has carried out the call, and too few replicas or no disk have it.
    """

    kind: Kind
    reason: str
    is_connection: bool
    is_damage: bool
    is_moving: bool
    too_new: StoreTooNewError | None
    layout: ShardLayout | None
    mismatch: StoreMismatchError | None
    is_unconfirmed: bool

    def __init__(
        self,
        kind: Kind,
        reason: str,
        *,
        is_connection: bool = False,
        is_damage: bool = False,
        is_moving: bool = False,
        too_new: StoreTooNewError | None = None,
        layout: ShardLayout | None = None,
        mismatch: StoreMismatchError | None = None,
        is_unconfirmed: bool = False,
    ) -> None:
        super().__init__(kind, reason)
        self.kind, self.reason, self.is_connection, self.is_damage = kind, reason, is_connection, is_damage
        self.is_moving, self.too_new, self.layout, self.mismatch = is_moving, too_new, layout, mismatch
        self.is_unconfirmed = is_unconfirmed

    @property
    def is_refused(self) -> bool:
        """True if the server does not let this user run the command, or does not know the command."""
        return not (self.is_connection or self.is_damage) and (
            self.kind == "unknown" or self.reason.startswith("NOPERM")
        )


def fault_of(raised: Exception, *, sent: bool, timeout_ms: int = 0) -> Fault:
    """Return the fault for an error. The fault says whether the server may have carried out the command.

    Args:
        raised: The error that redis-py or the operating system raised.
        sent: True if the command may have left this process.
        timeout_ms: The time in ms for which the caller waited for the answer.
    """
    error = of_its_class(raised)
    text = cut(" ".join(str(error).split()) or type(error).__name__, _LIMIT)
    if type(error) is TimeoutError:
        text = f"no answer within {timeout_ms} ms" if sent else f"no connection within {timeout_ms} ms"
    if isinstance(error, e.ResponseError) and str(error).startswith(_NEWER):
        return _refusal(str(error).removeprefix(_NEWER))
    if isinstance(error, e.OutOfMemoryError) or _FULL in text:
        return Fault("full", text)
    if isinstance(error, _NOT_CARRIED_OUT) or text.startswith(_CODES) or any(each in text for each in _IN_SCRIPT):
        text = f"{code_of(error)} {text}".lstrip()
        is_connection = isinstance(error, e.BusyLoadingError) or any(each in text for each in _ELSEWHERE)
        is_moving = isinstance(error, _MOVING) or any(each in text for each in _REPLACED)
        return Fault("unavailable", text, is_connection=is_connection, is_moving=is_moving)
    if isinstance(error, e.NoPermissionError):  # A script may have changed data before its refused command.
        return Fault("unknown" if "script" in text else "unavailable", f"NOPERM {text}")
    if isinstance(error, e.ResponseError):
        return Fault("unknown", text, is_damage="WRONGTYPE" in text)
    return Fault("unknown" if sent else "unavailable", text, is_connection=True, is_moving=not sent)


def _refusal(text: str) -> Fault:
    """Return the fault for a script that refuses another layout or unknown features."""
    what, _, found = text.partition(" ")
    layout = ShardLayout.of(found) if what == "layout" else None
    if layout is not None:
        error = stale_layout("the namespace", layout)
    elif what == "layout":
        error = newer_layout("the namespace", found, REDIS_LAYOUT)
    else:
        error = too_new("the namespace", dict(each.split("=", 1) for each in found.split()))
    return Fault("unavailable", str(error), too_new=error, layout=layout)


async def reply_of(connection: Any) -> Any:  # noqa: ANN401 - redis-py's connection, its reply
    """Return the next reply, or the error with which the server refused the command."""
    try:
        return await connection.read_response()
    except e.ResponseError as error:
        return error

"""What an error of redis-py says about a command: surely not carried out, refused for lack of memory, or unknown."""

from __future__ import annotations

from typing import Literal, TypeAlias

from redis import exceptions as e

from aiodelay.core.features import REDIS_LAYOUT, newer_layout, too_new
from aiodelay.errors import StoreTooNewError, cut

__all__ = ["Fault", "Kind", "fault_of"]

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
_IN_SCRIPT = ("-READONLY ", "-NOREPLICAS ", "-MISCONF ", "-MASTERDOWN ")  # as Redis 6.2 words them
_ELSEWHERE = ("READONLY ", "MASTERDOWN ")
"""This server is a replica now: its name may have become another's."""
_NEWER = "NEWER "
"""How the error begins by which a script refuses data that it does not know; then `layout` or `features`, and which."""
_FULL = "OOM command not allowed"
_LIMIT = 200


class Fault(Exception):  # noqa: N818 - it never leaves this package: it becomes an outcome or a StoreUnavailableError
    """A call to the server did not succeed.

    Attributes:
        kind: `unavailable`, `full`: surely not carried out. `unknown`: it may have been.
        reason: For people; it names no secret.
        is_connection: The connection is to blame, rather than an answer of the server; it may lead to the wrong one.
        is_damage: A key holds another type than ours; trying again does not help.
        too_new: The namespace uses what this version does not know; another one names the store.
    """

    kind: Kind
    reason: str
    is_connection: bool
    is_damage: bool
    too_new: StoreTooNewError | None

    def __init__(
        self,
        kind: Kind,
        reason: str,
        *,
        is_connection: bool = False,
        is_damage: bool = False,
        too_new: StoreTooNewError | None = None,
    ) -> None:
        super().__init__(kind, reason)
        self.kind, self.reason, self.is_connection, self.is_damage = kind, reason, is_connection, is_damage
        self.too_new = too_new


def fault_of(error: Exception, *, sent: bool, timeout_ms: int = 0) -> Fault:
    """Judge an error.

    Args:
        error: What redis-py or the system raised.
        sent: The command may have left this process.
        timeout_ms: How long an answer was waited for.
    """
    text = cut(" ".join(str(error).split()) or type(error).__name__, _LIMIT)
    if type(error) is TimeoutError:
        text = f"no answer within {timeout_ms} ms" if sent else f"no connection within {timeout_ms} ms"
    if isinstance(error, e.ResponseError) and str(error).startswith(_NEWER):
        refusal = _refusal(str(error).removeprefix(_NEWER))
        return Fault("unavailable", str(refusal), too_new=refusal)
    if isinstance(error, e.OutOfMemoryError) or _FULL in text:
        return Fault("full", text)
    if isinstance(error, _NOT_CARRIED_OUT) or text.startswith(_CODES) or any(each in text for each in _IN_SCRIPT):
        text = f"{_code(error)}{text}"
        is_connection = isinstance(error, e.BusyLoadingError) or any(each in text for each in _ELSEWHERE)
        return Fault("unavailable", text, is_connection=is_connection)
    if isinstance(error, e.NoPermissionError):  # inside a script, some of it may have been carried out
        return Fault("unknown" if "script" in text else "unavailable", f"NOPERM {text}")
    if isinstance(error, e.ResponseError):
        return Fault("unknown", text, is_damage="WRONGTYPE" in text)
    return Fault("unknown" if sent else "unavailable", text, is_connection=True)


def _refusal(text: str) -> StoreTooNewError:
    """Return the error for what a script has refused."""
    what, _, found = text.partition(" ")
    if what == "layout":
        return newer_layout("the namespace", found, REDIS_LAYOUT)
    return too_new("the namespace", dict(each.split("=", 1) for each in found.split()))


def _code(error: Exception) -> str:
    code = getattr(error, "status_code", None)
    return f"{code} " if isinstance(code, str) else ""

"""Every error aiodelay raises: one root, split by what the caller can do about it.

`InputError` and `ConfigurationError`: mend the call; nothing was sent anywhere. `StoreUnavailableError`,
`StoreBusyError`: nothing was stored; try again. `OutcomeUnknownError`: it may be stored; `retry()` is safe.
Messages name the field, the value (shortened) and what is allowed. Payloads, header values and passwords are
never part of a message.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

__all__ = [
    "AiodelayError",
    "ClosedError",
    "CodecError",
    "ConfigurationError",
    "DuplicateHandlerError",
    "DuplicateIdError",
    "HandlerResultError",
    "HandlerSignatureError",
    "HandlerTimeoutError",
    "HeaderError",
    "InputError",
    "MessageIdError",
    "MissingExtraError",
    "OutcomeUnknownError",
    "PayloadTooLargeError",
    "PayloadTypeError",
    "RecordFormatError",
    "ScheduleTimeError",
    "SinkUnavailableError",
    "StoreBusyError",
    "StoreError",
    "StoreFullError",
    "StoreMismatchError",
    "StoreUnavailableError",
    "TargetError",
    "TargetNotAllowedError",
    "UnknownSinkError",
    "UnsupportedByStoreError",
    "WrongLoopError",
    "masked_url",
    "shortened",
]


def shortened(value: object, limit: int = 60) -> str:
    """Render a value for an error message: its `repr`, cut in the middle beyond `limit` characters."""
    text = repr(value)
    if len(text) <= limit:
        return text
    half = (limit - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def masked_url(url: str) -> str:
    """Return the URL with its password, and any query value that looks like a secret, replaced by `***`."""
    try:
        parts = urlsplit(url)
        password = parts.password
    except ValueError:
        return "<unreadable url>"
    netloc = parts.netloc
    if password is not None:
        user, _, host = netloc.rpartition("@")
        netloc = f"{user.split(':', 1)[0]}:***@{host}"
    pairs = parts.query.split("&") if parts.query else []
    secret = ("password", "secret", "token", "key")
    query = "&".join(
        f"{name}=***" if any(word in name.lower() for word in secret) else pair
        for pair in pairs
        for name in [pair.split("=", 1)[0]]
    )
    masked = url.replace(parts.netloc, netloc, 1) if parts.netloc else url
    return masked.replace(parts.query, query, 1) if parts.query else masked


class AiodelayError(Exception):
    """Root of every error raised by aiodelay."""


# --- fix the call ---------------------------------------------------------------------------------


class InputError(AiodelayError, ValueError):
    """An argument was refused before anything was stored or sent."""

    def __init__(self, field: str, value: str, allowed: str, message_id: str | None = None) -> None:
        super().__init__(field, value, allowed, message_id)
        self.field, self.value, self.allowed, self.message_id = field, value, allowed, message_id

    def __str__(self) -> str:
        of = f" of message {self.message_id!r}" if self.message_id is not None else ""
        return f"{self.field}{of} is {self.value}; allowed: {self.allowed}"


class ScheduleTimeError(InputError):
    """`at`, `delay` or `every` is missing, doubled, naive, negative, not finite or too far ahead."""


class PayloadTypeError(InputError, TypeError):
    """The event is neither bytes with `to=` nor of a type that a codec can write."""


class PayloadTooLargeError(InputError):
    """The encoded event exceeds the scheduler's `max_payload`."""


class CodecError(InputError):
    """The event could not be encoded, or a stored payload could not be decoded, by the named codec."""


class MessageIdError(InputError):
    """The message id is empty, too long, of a reserved form or holds control characters."""


class HeaderError(InputError):
    """A header's name or value is illegal, reserved or too large, or there are too many headers."""


class TargetError(InputError):
    """`to=` is not of the form `<sink>:<address>`."""


class TargetNotAllowedError(TargetError):
    """`to=` names an address outside the scheduler's `allowed_targets`."""


class RecordFormatError(AiodelayError, ValueError):
    """A stored record cannot be read: it is cut short, damaged, or of a newer format."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return f"stored record cannot be read: {self.problem}"


class ConfigurationError(AiodelayError, ValueError):
    """A setting is wrong; raised where it is given, never at the first message."""

    def __init__(self, setting: str, value: str, allowed: str) -> None:
        super().__init__(setting, value, allowed)
        self.setting, self.value, self.allowed = setting, value, allowed

    def __str__(self) -> str:
        return f"{self.setting} is {self.value}; allowed: {self.allowed}"


class UnknownSinkError(ConfigurationError):
    """`to=` names a sink that this scheduler does not have."""


class UnsupportedByStoreError(ConfigurationError):
    """The store lacks an ability that the call needs; nothing was sent."""


class MissingExtraError(ConfigurationError, ImportError):
    """A backend's client library is not installed."""


class HandlerSignatureError(ConfigurationError, TypeError):
    """A function cannot be a handler as it stands."""


class DuplicateHandlerError(ConfigurationError):
    """Two handlers or two event types claim the same type name."""


class StoreMismatchError(ConfigurationError):
    """The store's data was written by something this version cannot work with."""


# --- accept ---------------------------------------------------------------------------------------


class DuplicateIdError(AiodelayError):
    """`Conflict.error()`: a message with this id is pending or in flight; nothing was written."""

    def __init__(self, message_id: str) -> None:
        super().__init__(message_id)
        self.message_id = message_id

    def __str__(self) -> str:
        return f"message {self.message_id!r} is already scheduled; use Conflict.replace() or .keep() to allow it"


class ClosedError(AiodelayError):
    """The object is not open: use it inside its `async with` block."""

    def __init__(self, what: str, state: str) -> None:
        super().__init__(what, state)
        self.what, self.state = what, state

    def __str__(self) -> str:
        return f"{self.what} is {self.state}; use it inside its 'async with' block"


class WrongLoopError(AiodelayError):
    """Used from another event loop, thread or process than the one that opened it."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(what, where)
        self.what, self.where = what, where

    def __str__(self) -> str:
        return f"{self.what} was opened in another {self.where}; open one of its own there"


class HandlerTimeoutError(AiodelayError, TimeoutError):
    """A handler ran longer than its `timeout`; counts as a failed attempt."""

    def __init__(self, handler: str, timeout_ms: int) -> None:
        super().__init__(handler, timeout_ms)
        self.handler, self.timeout_ms = handler, timeout_ms

    def __str__(self) -> str:
        return f"handler {self.handler} did not finish within {self.timeout_ms} ms"


class HandlerResultError(AiodelayError, TypeError):
    """A handler returned something other than None, `Later` or `Reject`; counts as a failed attempt."""

    def __init__(self, handler: str, result_type: str) -> None:
        super().__init__(handler, result_type)
        self.handler, self.result_type = handler, result_type

    def __str__(self) -> str:
        return f"handler {self.handler} returned {self.result_type}; allowed: None, Later(delay), Reject(reason)"


# --- try again ------------------------------------------------------------------------------------


class StoreError(AiodelayError):
    """The store did not do what was asked."""


class StoreUnavailableError(StoreError):
    """The store could not be reached; nothing was stored, so trying again is safe."""

    def __init__(self, store: str, reason: str, message_id: str | None = None) -> None:
        super().__init__(store, reason, message_id)
        self.store, self.reason, self.message_id = store, reason, message_id

    def __str__(self) -> str:
        of = f" (message {self.message_id!r} was not stored)" if self.message_id is not None else ""
        return f"{self.store} is unavailable: {self.reason}{of}"


class StoreFullError(StoreError):
    """The store refused to grow: disk or memory is full; nothing was stored."""

    def __init__(self, store: str, reason: str, message_id: str | None = None) -> None:
        super().__init__(store, reason, message_id)
        self.store, self.reason, self.message_id = store, reason, message_id

    def __str__(self) -> str:
        of = f" (message {self.message_id!r} was not stored)" if self.message_id is not None else ""
        return f"{self.store} is full: {self.reason}{of}"


class StoreBusyError(StoreError):
    """The command waited longer than `store_timeout` before it could be sent; nothing was stored."""

    def __init__(self, message_id: str, waited_ms: int, waiting_bytes: int) -> None:
        super().__init__(message_id, waited_ms, waiting_bytes)
        self.message_id, self.waited_ms, self.waiting_bytes = message_id, waited_ms, waiting_bytes

    def __str__(self) -> str:
        return (
            f"message {self.message_id!r} was not sent: the store did not take it within {self.waited_ms} ms "
            f"({self.waiting_bytes} bytes of commands are waiting); raise store_timeout or schedule less at once"
        )


class OutcomeUnknownError(StoreError):
    """The store may or may not have carried out the command.

    Args:
        message_id: Whose command it was.
        reason: What went wrong on the way.
        again: Sends the same command, with the same id and op, once more; None when copied or unpickled.
    """

    def __init__(self, message_id: str, reason: str, again: Callable[[], Awaitable[object]] | None = None) -> None:
        super().__init__(message_id, reason)
        self.message_id, self.reason, self._again = message_id, reason, again

    def __str__(self) -> str:
        return (
            f"whether message {self.message_id!r} was stored is unknown: {self.reason}; "
            "await error.retry() within 30 s to find out, safely"
        )

    async def retry(self) -> object:
        """Send the same command again; it takes effect once, whatever became of the first.

        Returns:
            What the first call would have returned.

        Raises:
            OutcomeUnknownError: Unknown again, or too late: the store remembers an op for 30 s.
        """
        if self._again is None:
            raise OutcomeUnknownError(self.message_id, "this error was copied and cannot send anything")
        return await self._again()


class SinkUnavailableError(AiodelayError):
    """A sink cannot take anything now; raised by sinks, costs no attempt."""

    def __init__(self, sink: str, reason: str) -> None:
        super().__init__(sink, reason)
        self.sink, self.reason = sink, reason

    def __str__(self) -> str:
        return f"sink {self.sink} is unavailable: {self.reason}"

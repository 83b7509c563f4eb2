"""Every error aiodelay raises: one root, split by what the caller can do about it.

`InputError` and `ConfigurationError`: mend the call; nothing was sent anywhere. `StoreUnavailableError`,
`StoreBusyError`: nothing was stored; try again. `StoreDamagedError`: repair the store's data. `StoreTooNewError`:
upgrade this process. `OutcomeUnknownError`: the message may be stored; `retry()` is safe.
Messages name the field, the value (shortened) and what is allowed. Payloads, header values and passwords are
never part of a message.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from datetime import date, time, timedelta, tzinfo
from urllib.parse import unquote

__all__ = [
    "AiodelayError",
    "BlockingCallError",
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
    "StoreDamagedError",
    "StoreError",
    "StoreFullError",
    "StoreMismatchError",
    "StoreTooNewError",
    "StoreUnavailableError",
    "TargetError",
    "TargetNotAllowedError",
    "UnknownSinkError",
    "UnsupportedByStoreError",
    "WrongLoopError",
    "cut",
    "kind_of",
    "masked_url",
    "missing_extra",
    "shortened",
]


_SHOWN = (str, int, float, complex, type, date, time, timedelta, tzinfo)
_MOST_ITEMS = 100
_MAX_URL = 200
_NO_PORT = re.compile(r"(\[[^\]]*\])|:(?!\d*(?:[,?#]|$))[^,?#]*")  # or, as group 1, an IPv6 address
_SECRET = re.compile(r"(?i)pass|pwd|secret|token|key|auth|cred")


def cut(text: str, limit: int = 60) -> str:
    """Return the text on one line: what does not print is escaped, the middle left out beyond `limit` characters."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if len(text) <= limit:
        return text
    half = (limit - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def kind_of(value: object) -> str:
    """Name a value's type, with its article: what is said of values that must not be shown."""
    if value is None:
        return "None"
    name = type(value).__qualname__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


def shortened(value: object, limit: int = 60) -> str:
    """Render a value for an error message, on one line.

    Text, numbers, times, types, and short lists of them, by their `repr`, cut in the middle beyond `limit` characters;
    bytes by their number, all else by its type: it may hold payloads or secrets, or have no `repr` that works.
    """
    if isinstance(value, bytes | bytearray):
        return f"{len(value)} bytes"
    try:
        return cut(repr(value), limit) if _may_be_shown(value) else kind_of(value)
    except Exception:  # noqa: BLE001 - a `repr` of the caller's; also int's, beyond 4300 digits
        return kind_of(value)


def _may_be_shown(value: object) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return len(value) <= _MOST_ITEMS and all(item is None or isinstance(item, _SHOWN) for item in value)
    return value is None or isinstance(value, _SHOWN)


def masked_url(url: str) -> str:
    """Return the URL with its password, and the value of any option that may be a secret, replaced by `***`.

    Masks too much rather than too little where the URL is not well formed: a password with unescaped `/`, `?`, `#` or
    `@` ends at the last `@`, and one without any `@` after it is taken for a port that is no number.
    """
    head = re.match(r"(?:[^:/?#@]*:)?(/*)", url)
    assert head is not None  # it matches the empty text
    before, at, after = url[head.end() :].rpartition("@")
    if at and not head[1]:
        before = "***"
    elif at and ":" in before:
        before = before.partition(":")[0] + ":***"
    elif head[1] == "//":
        netloc, slash, path = after.partition("/")
        after = _NO_PORT.sub(lambda found: found[1] or ":***", netloc) + slash + path
    text = re.sub(r"(?<=[?&;])([^=&;?]*)=([^&;]*)", _masked_option, f"{head[0]}{before}{at}{after}")
    return cut(text, _MAX_URL)


def _masked_option(option: re.Match[str]) -> str:
    return f"{option[1]}=***" if _SECRET.search(unquote(option[1])) else option[0]


class AiodelayError(Exception):
    """Root of every error raised by aiodelay."""


# --- fix the call ---------------------------------------------------------------------------------


class InputError(AiodelayError, ValueError):
    """An argument was refused before anything was stored or sent."""

    field: str
    value: str
    allowed: str
    message_id: str | None

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

    problem: str

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return f"stored record cannot be read: {self.problem}"


class ConfigurationError(AiodelayError, ValueError):
    """A setting is wrong; raised where it is given. Of a message: the scheduler or its store cannot do what it asks."""

    setting: str
    value: str
    allowed: str
    message_id: str | None

    def __init__(self, setting: str, value: str, allowed: str, message_id: str | None = None) -> None:
        super().__init__(setting, value, allowed, message_id)
        self.setting, self.value, self.allowed, self.message_id = setting, value, allowed, message_id

    def __str__(self) -> str:
        of = f" of message {self.message_id!r}" if self.message_id is not None else ""
        return f"{self.setting}{of} is {self.value}; allowed: {self.allowed}"


class UnknownSinkError(ConfigurationError):
    """`to=` names a sink that this scheduler does not have."""


class UnsupportedByStoreError(ConfigurationError):
    """The store lacks an ability that the call needs; nothing was sent."""


class MissingExtraError(ConfigurationError, ImportError):
    """A backend's client library is not installed."""


def missing_extra(error: ImportError, setting: str, extra: str) -> ImportError:
    """Return the error of a failed import with the extra to install.

    Args:
        error: The error of the import; it is returned unchanged if a module of aiodelay itself is missing.
        setting: The package or setting that needs the extra.
        extra: The extra's name in `pip install 'aiodelay[...]'`.
    """
    if isinstance(error, MissingExtraError):
        return MissingExtraError(setting, error.value, error.allowed)
    if (error.name or "aiodelay").startswith("aiodelay"):
        return error
    return MissingExtraError(setting, f"missing {error.name}", f"pip install 'aiodelay[{extra}]'")


class HandlerSignatureError(ConfigurationError, TypeError):
    """A function cannot be a handler as it stands."""


class DuplicateHandlerError(ConfigurationError):
    """Two handlers or two event types claim the same type name."""


class StoreMismatchError(ConfigurationError):
    """The store's data was written by something this version cannot work with."""


# --- accept ---------------------------------------------------------------------------------------


class DuplicateIdError(AiodelayError):
    """`Conflict.error()`: a message with this id is pending or in flight; nothing was written."""

    message_id: str

    def __init__(self, message_id: str) -> None:
        super().__init__(message_id)
        self.message_id = message_id

    def __str__(self) -> str:
        return f"message {self.message_id!r} is already scheduled; the conflict modes replace and keep allow that"


class ClosedError(AiodelayError):
    """The object is not open, and must be; or it is open already, and must not be."""

    what: str
    state: str
    advice: str

    def __init__(self, what: str, state: str, advice: str = "use it inside its 'async with' block") -> None:
        super().__init__(what, state, advice)
        self.what, self.state, self.advice = what, state, advice

    def __str__(self) -> str:
        return f"{self.what} is {self.state}; {self.advice}"


class WrongLoopError(AiodelayError):
    """Used from another event loop, thread or process than the one that opened it."""

    what: str
    where: str

    def __init__(self, what: str, where: str) -> None:
        super().__init__(what, where)
        self.what, self.where = what, where

    def __str__(self) -> str:
        return f"{self.what} was opened in another {self.where}; open one of its own there"


class BlockingCallError(AiodelayError):
    """A call that blocks was made where an event loop is running, which it would stop; nothing was sent."""

    what: str

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return (
            f"{self.what} would stop the event loop that is running in this thread; use a Scheduler there, "
            "or asyncio.to_thread()"
        )


class HandlerTimeoutError(AiodelayError, TimeoutError):
    """A handler ran longer than its `timeout`; counts as a failed attempt."""

    handler: str
    timeout_ms: int

    def __init__(self, handler: str, timeout_ms: int) -> None:
        super().__init__(handler, timeout_ms)
        self.handler, self.timeout_ms = handler, timeout_ms

    def __str__(self) -> str:
        return f"handler {self.handler} did not finish within {self.timeout_ms} ms"


class HandlerResultError(AiodelayError, TypeError):
    """A handler returned something other than None, `Later` or `Reject`; counts as a failed attempt."""

    handler: str
    result_type: str

    def __init__(self, handler: str, result_type: str) -> None:
        super().__init__(handler, result_type)
        self.handler, self.result_type = handler, result_type

    def __str__(self) -> str:
        return f"handler {self.handler} returned {self.result_type}; allowed: None, Later(delay), Reject(reason)"


# --- try again ------------------------------------------------------------------------------------


class StoreError(AiodelayError):
    """The store did not do what was asked."""


class StoreTooNewError(StoreMismatchError, StoreError):
    """The store's data use a feature or a layout that this version does not know; this process claims nothing.

    `setting` names the data, `value` names the feature or layout and both versions, `allowed` is the remedy.
    """

    def __str__(self) -> str:
        return f"{self.setting} {self.value}; {self.allowed}"


class StoreUnavailableError(StoreError):
    """The store could not be reached; nothing was stored, so trying again is safe."""

    store: str
    reason: str
    message_id: str | None
    action: str

    def __init__(self, store: str, reason: str, message_id: str | None = None, action: str = "stored") -> None:
        super().__init__(store, reason, message_id)
        self.store, self.reason, self.message_id, self.action = store, reason, message_id, action

    def __str__(self) -> str:
        of = f" (message {self.message_id!r} was not {self.action})" if self.message_id is not None else ""
        return f"{self.store} is unavailable: {self.reason}{of}"


class StoreDamagedError(StoreUnavailableError):
    """The store answers, but another program has overwritten its data; `reason` says where."""

    def __str__(self) -> str:
        of = f" (message {self.message_id!r} was not {self.action})" if self.message_id is not None else ""
        return f"{self.store} cannot be used: {self.reason}{of}"


class StoreFullError(StoreError):
    """The store refused to grow: disk or memory is full; nothing was stored."""

    store: str
    reason: str
    message_id: str | None
    action: str

    def __init__(self, store: str, reason: str, message_id: str | None = None, action: str = "stored") -> None:
        super().__init__(store, reason, message_id)
        self.store, self.reason, self.message_id, self.action = store, reason, message_id, action

    def __str__(self) -> str:
        of = f" (message {self.message_id!r} was not {self.action})" if self.message_id is not None else ""
        return f"{self.store} is full: {self.reason}{of}"


class StoreBusyError(StoreError):
    """The command waited longer than `store_timeout` before it could be sent; nothing was stored."""

    message_id: str
    waited_ms: int
    waiting_bytes: int

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
        action: What the command may have done to the message: `stored`, `cancelled`, `rescheduled`, `fired`.
    """

    message_id: str
    reason: str
    action: str

    def __init__(
        self,
        message_id: str,
        reason: str,
        again: Callable[[], Awaitable[object]] | None = None,
        action: str = "stored",
    ) -> None:
        super().__init__(message_id, reason)
        self.message_id, self.reason, self._again, self.action = message_id, reason, again, action

    def __str__(self) -> str:
        return (
            f"whether message {self.message_id!r} was {self.action} is unknown: {self.reason}; "
            "await error.retry() within 30 s to find out, safely"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self.args, {**vars(self), "_again": None}

    async def retry(self) -> object:
        """Send the same command again; it takes effect once, whatever became of the first.

        Returns:
            What the first call would have returned.

        Raises:
            OutcomeUnknownError: Unknown again, or too late: the store remembers an op for 30 s.
        """
        if self._again is None:
            raise OutcomeUnknownError(
                self.message_id, "this error was copied and cannot send anything", action=self.action
            )
        return await self._again()


class SinkUnavailableError(AiodelayError):
    """A sink cannot take anything now; raised by sinks, costs no attempt."""

    sink: str
    reason: str

    def __init__(self, sink: str, reason: str) -> None:
        super().__init__(sink, reason)
        self.sink, self.reason = sink, reason

    def __str__(self) -> str:
        return f"sink {self.sink} is unavailable: {self.reason}"

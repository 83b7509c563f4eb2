"""Every error that aiodelay raises: one root class, and below it classes by what the caller can do.

| error | what to do |
| --- | --- |
| `InputError`, `ConfigurationError` | Correct the call. Nothing was sent. |
| `StoreUnavailableError`, `StoreBusyError` | Try again. Nothing was stored. |
| `StoreDamagedError` | Repair the store's data. |
| `StoreTooNewError` | Upgrade this process. |
| `OutcomeUnknownError` | The message may be stored. `retry()` is safe. |

An error text names the field, the value (shortened) and the allowed values. It never contains payloads, header values
or passwords.
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
_NO_PORT = re.compile(r"(\[[^\[\]]*\])|:(?!\d*(?:[,?#]|$))[^,?#]*")  # a port that is no number; 1: an IPv6 address
_SECRET = re.compile(r"(?i)pass|pwd|secret|token|key|auth|cred")


def cut(text: str, limit: int = 60) -> str:
    """Return a text on one line. Escape unprintable characters, and cut the middle beyond `limit` characters."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if len(text) <= limit:
        return text
    half = (limit - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def kind_of(value: object) -> str:
    """Return a value's type with its article, such as "a dict", for a value whose content must not be shown."""
    if value is None:
        return "None"
    name = type(value).__qualname__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


def shortened(value: object, limit: int = 60) -> str:
    """Return a value as text for an error message, on one line.

    Text, numbers, times, types, and short lists of these appear as their `repr`. Beyond `limit` characters, the middle
    is cut out. For bytes, only their number appears. For any other value, only its type appears, because the value may
    hold payloads or secrets, or its `repr` may fail. A URL in the wrong place appears without its password.
    """
    if isinstance(value, bytes | bytearray):
        return f"{len(value)} bytes"
    if isinstance(value, str) and "://" in value and "@" in value:
        value = masked_url(value)
    try:
        return cut(repr(value), limit) if _may_be_shown(value) else kind_of(value)
    except Exception:  # noqa: BLE001 - a caller's `repr` may raise anything; int's raises beyond 4300 digits
        return kind_of(value)


def _may_be_shown(value: object) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return len(value) <= _MOST_ITEMS and all(item is None or isinstance(item, _SHOWN) for item in value)
    return value is None or isinstance(value, _SHOWN)


def masked_url(url: str) -> str:
    """Return a URL in which `***` replaces the password, and the value of each option whose name suggests a secret.

    If the URL is not well formed, the mask covers too much rather than too little:

    - The mask of a password reaches to the last `@`: the password may hold an unescaped `/`, `?`, `#` or `@`.
    - Without an `@`, a port that is not a number is masked, because it may be a password.
    """
    head = re.match(r"(?:[^:/?#@]*:)?(/*)", url)
    assert head is not None  # the pattern also matches an empty text
    before, at, after = url[head.end() :].rpartition("@")
    if at and not head[1]:
        before = "***"
    elif at and ":" in before:
        before = before.partition(":")[0] + ":***"
    elif head[1] == "//":
        netloc = re.split(r"/|\?\w+=", after, maxsplit=1)[0]
        after = _NO_PORT.sub(lambda found: found[1] or ":***", netloc) + after[len(netloc) :]
    text = re.sub(r"(?<=[?&;])([^=&;?]*)=([^&;]*)", _masked_option, f"{head[0]}{before}{at}{after}")
    return cut(text, _MAX_URL)


def _masked_option(option: re.Match[str]) -> str:
    return f"{option[1]}=***" if _SECRET.search(unquote(option[1])) else option[0]


class AiodelayError(Exception):
    """Root of all errors that aiodelay raises."""


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
    """A due time is wrong: `at`, `delay` or `every` is missing, naive, negative, not finite or too far ahead.

    The error is also raised if more than one of these arguments is given.
    """


class PayloadTypeError(InputError, TypeError):
    """The event is neither bytes with `to=` nor of a type that a codec can write."""


class PayloadTooLargeError(InputError):
    """The encoded event, alone or joined by `Conflict.append()`, exceeds the scheduler's `max_payload`."""


class CodecError(InputError):
    """A codec could not encode an event, or could not decode a stored payload. The error names the codec."""


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
    """A setting is wrong, or the scheduler or its store cannot do what a message asks for."""

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
    """`to=` or a call names a sink that this scheduler does not have."""


class UnsupportedByStoreError(ConfigurationError):
    """The store lacks an ability that the call needs. Nothing was sent."""


class MissingExtraError(ConfigurationError, ImportError):
    """A backend's client library is not installed."""


def missing_extra(error: ImportError, setting: str, extra: str) -> ImportError:
    """Return the error to raise for a failed import. It names the extra to install.

    Args:
        error: The error of the import. If a module of aiodelay itself is missing, this error is returned unchanged.
        setting: The package or setting that needs the extra.
        extra: The extra's name in `pip install 'aiodelay[...]'`.
    """
    if isinstance(error, MissingExtraError):
        return MissingExtraError(setting, error.value, error.allowed)
    if (error.name or "aiodelay").startswith("aiodelay"):
        return error
    return MissingExtraError(setting, f"missing {error.name}", f"pip install 'aiodelay[{extra}]'")


class HandlerSignatureError(ConfigurationError, TypeError):
    """A function cannot be a handler, because of its parameters or annotations."""


class DuplicateHandlerError(ConfigurationError):
    """Two handlers or two event types have the same type name, or two handlers have the same source."""


class StoreMismatchError(ConfigurationError):
    """The store's data come from a program or a version of aiodelay with which this version cannot work."""


# --- accept ---------------------------------------------------------------------------------------


class DuplicateIdError(AiodelayError):
    """A message with this id is pending or in flight, and nothing was written.

    `Conflict.error()` was given; or `Conflict.append()` was given, and the stored message is of another kind.
    """

    message_id: str
    stored: str

    def __init__(self, message_id: str, stored: str = "") -> None:
        super().__init__(message_id, stored)
        self.message_id, self.stored = message_id, stored

    def __str__(self) -> str:
        if self.stored:
            return (
                f"message {self.message_id!r} cannot join the stored message, {self.stored}; items that gather under"
                " one id need the same destination, event type and encoding, and no recurrence"
            )
        return (
            f"message {self.message_id!r} is already scheduled; "
            "to avoid this error, use the conflict rule replace (the new message stays) or keep (the stored one stays)"
        )


class ClosedError(AiodelayError):
    """The object is in the wrong state for the call: it is not open, or it is already open."""

    what: str
    state: str
    advice: str

    def __init__(self, what: str, state: str, advice: str = "use it inside its 'async with' block") -> None:
        super().__init__(what, state, advice)
        self.what, self.state, self.advice = what, state, advice

    def __str__(self) -> str:
        return f"{self.what} is {self.state}; {self.advice}"


class WrongLoopError(AiodelayError):
    """A scheduler or store was used on another event loop, thread or process than the one that opened it."""

    what: str
    where: str

    def __init__(self, what: str, where: str) -> None:
        super().__init__(what, where)
        self.what, self.where = what, where

    def __str__(self) -> str:
        return f"{self.what} was opened in another {self.where}; open a separate {self.what} here"


class BlockingCallError(AiodelayError):
    """A blocking call was made in a thread with a running event loop, which the call would stop. Nothing was sent."""

    what: str

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return (
            f"{self.what} would stop the event loop that is running in this thread; use a Scheduler instead, "
            "or call it with asyncio.to_thread()"
        )


class HandlerTimeoutError(AiodelayError, TimeoutError):
    """A handler ran longer than its `timeout`. This counts as a failed attempt."""

    handler: str
    timeout_ms: int

    def __init__(self, handler: str, timeout_ms: int) -> None:
        super().__init__(handler, timeout_ms)
        self.handler, self.timeout_ms = handler, timeout_ms

    def __str__(self) -> str:
        return f"handler {self.handler} did not finish within {self.timeout_ms} ms"


class HandlerResultError(AiodelayError, TypeError):
    """A handler returned something other than None, `Later` or `Reject`. This counts as a failed attempt.

    A handler of batches returns None, or a list with one of these values for each message.
    """

    handler: str
    result_type: str
    allowed: str

    def __init__(self, handler: str, result_type: str, allowed: str = "None, Later(delay), Reject(reason)") -> None:
        super().__init__(handler, result_type, allowed)
        self.handler, self.result_type, self.allowed = handler, result_type, allowed

    def __str__(self) -> str:
        return f"handler {self.handler} returned {self.result_type}; allowed: {self.allowed}"


# --- try again ------------------------------------------------------------------------------------


class StoreError(AiodelayError):
    """Root of the errors of a call that the store did not carry out, or may not have carried out."""


class StoreTooNewError(StoreMismatchError, StoreError):
    """The store's data use a feature or a layout that this version does not know. This process claims nothing.

    `setting` names the data. `value` names the feature or layout and both versions. `allowed` names the remedy.
    """

    def __str__(self) -> str:
        return f"{self.setting} {self.value}; {self.allowed}"


class StoreUnavailableError(StoreError):
    """The store did not answer. Nothing was stored, so trying again is safe."""

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
    """The store answers, but another program has overwritten the store's data. `reason` says where."""

    def __str__(self) -> str:
        of = f" (message {self.message_id!r} was not {self.action})" if self.message_id is not None else ""
        return f"{self.store} cannot be used: {self.reason}{of}"


class StoreFullError(StoreError):
    """The store refused to grow, because its disk or memory is full. Nothing was stored."""

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
    """The command waited longer than `store_timeout` before it could be sent. Nothing was stored."""

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
        message_id: The message of the command.
        reason: The fault that hid the outcome.
        again: Sends the same command once more, with the same id and op; None in a copied or unpickled error.
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
        can_repeat = self._again is not None
        advice = (
            "to find out safely, await error.retry() within 25 s of the call"
            if can_repeat
            else "to find out, read the message"
        )
        return f"whether message {self.message_id!r} was {self.action} is unknown: {self.reason}; {advice}"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self.args, {**vars(self), "_again": None}

    async def retry(self) -> object:
        """Send the same command again. The store carries it out only once, even if the first command has arrived.

        Returns:
            The result that the first call would have returned.

        Raises:
            OutcomeUnknownError: The outcome is unknown again, the call began more than 25 s ago, or this error is a
                copy.
        """
        if self._again is None:
            raise OutcomeUnknownError(
                self.message_id, "this error is a copy, and a copy cannot repeat the call", action=self.action
            )
        return await self._again()


class SinkUnavailableError(AiodelayError):
    """A sink cannot take messages now. Sinks raise this error. The failed send does not count as an attempt."""

    sink: str
    reason: str

    def __init__(self, sink: str, reason: str) -> None:
        super().__init__(sink, reason)
        self.sink, self.reason = sink, reason

    def __str__(self) -> str:
        return f"sink {self.sink} is unavailable: {self.reason}"

"""Pure functions that make settlements and their error texts."""

from __future__ import annotations

import re
import traceback as tracebacks
from types import TracebackType
from typing import Literal

from msgspec import MsgspecError

from aiodelay.core import recurrence
from aiodelay.core.transitions import is_killer, is_late, token_deadline_ms
from aiodelay.core.values import TRACEBACK_BYTES, Again, Dead, DeadReason, Done, LateAction, Record, Settlement
from aiodelay.errors import RecordFormatError

__all__ = [
    "again",
    "by_policy",
    "dead",
    "decode_error_text",
    "done",
    "error_text",
    "kept",
    "release",
    "then_due_ms",
    "traceback_text",
    "users_traceback",
    "without_running",
]

UNKNOWN_ZONE_MS = 10_000
"""Delay until a series may be claimed again, if a worker did not know its time zone. Another worker may know it."""
ERROR_LIMIT = 500
"""Most characters of an error's text that a store keeps with a message."""
_OWN_CALLS = (
    "aiodelay.engine.",
    "aiodelay.handlers.registration",
    "aiodelay.handlers.middleware",
    "concurrent.futures.",
)
"""Modules whose calls appear in a traceback between the event loop and a handler or sink."""
_PLACE = re.compile(r" - at `\$[^`]*`$")
_INVALID_VALUE = re.compile(r"^(Invalid (?:enum )?value) .*?(?=$| - at `\$[^`]*`$)", re.DOTALL)
"""The two error texts of msgspec that contain the value itself."""


def error_text(error: BaseException) -> str:
    """Return the text that a message keeps of a handler's or sink's exception: type and message, shortened."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - a user's exception may raise anything when it is rendered
        message = "its text cannot be read"
    return kept(f"{type(error).__name__}: {message}" if message else type(error).__name__)


def kept(text: str) -> str:
    """Return an error's text, cut to the length that a message keeps."""
    return text if len(text) <= ERROR_LIMIT else text[: ERROR_LIMIT - 1] + "…"


def users_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback of a handler's or sink's exception without the scheduler's own calls at its start."""
    first = found = error.__traceback__
    while found is not None and found.tb_frame.f_globals.get("__name__", "").startswith(_OWN_CALLS):
        found = found.tb_next
    return found or first


def traceback_text(error: BaseException) -> str | None:
    """Return the traceback that a dead letter keeps; None for an exception that was never raised.

    The text names files, lines and errors, including the errors that caused this one. It holds no local variables. A
    long text loses its middle, because its first lines show the call and its last lines the error.
    """
    if error.__traceback__ is None and error.__cause__ is None:
        return None
    try:
        lines = tracebacks.format_exception(type(error), error, users_traceback(error))
    except Exception:  # noqa: BLE001 - a user's exception may raise anything when it is rendered
        return None
    return _without_middle("".join(lines).encode("utf-8", "backslashreplace"))


def _without_middle(text: bytes) -> str:
    if len(text) <= TRACEBACK_BYTES:
        return text.decode()
    gap = f"\n\n… {len(text):,} bytes in all; the middle is left out …\n\n".encode()
    head = TRACEBACK_BYTES // 4
    tail = TRACEBACK_BYTES - head - len(gap)
    return b"".join((text[:head], gap, text[-tail:])).decode("utf-8", "ignore")


def then_due_ms(record: Record, began_ms: int) -> int | None:
    """Return when a series' next occurrence is due; None if the message does not recur, or does not recur again.

    If occurrences come due during a run, the result is in the past. The next claim then decides which of them run.

    Args:
        record: The message.
        began_ms: The store's time at which the attempt began, or at which it was decided that none begins.
    """
    rule = record.envelope.rule
    if rule is None:
        return None
    try:
        return recurrence.next_due(recurrence.decode_rule(rule), record.due_ms, began_ms)
    except RecordFormatError:
        return None


def done(
    record: Record, token: int, began_ms: int, outcome: Literal["delivered", "dropped", "skipped"] = "delivered"
) -> Done:
    """Return the settlement that ends a message."""
    return Done(record.envelope.id, record.revision, token, then_due_ms(record, began_ms), outcome)


def again(record: Record, token: int, began_ms: int, *, due_ms: int, attempt: int, error: str | None = None) -> Again:
    """Return the settlement that delivers a message again at `due_ms`."""
    return Again(record.envelope.id, record.revision, token, due_ms, attempt, error, then_due_ms(record, began_ms))


def release(record: Record, token: int) -> Again:
    """Return the settlement that gives back a message without a run. Due time, attempts and series do not change."""
    return Again(record.envelope.id, record.revision, token, record.due_ms, record.attempt)


def dead(
    record: Record,
    token: int,
    began_ms: int,
    *,
    reason: DeadReason,
    attempt: int,
    error: str | None = None,
    traceback: str | None = None,
) -> Dead:
    """Return the settlement that makes a dead letter."""
    then_ms = then_due_ms(record, began_ms)
    return Dead(record.envelope.id, record.revision, token, reason, attempt, error, then_ms, traceback=traceback)


def without_running(record: Record, token: int, now_ms: int) -> Settlement | None:
    """Return the settlement of a claim that must not run; None if it may run.

    A recurring message does not run if its policies forbid the run. No message runs if its lease is over before the run
    begins. That happens if the answer to the claim was late, or if the event loop was blocked. Another worker may have
    claimed the message meanwhile.
    """
    if token_deadline_ms(token) <= now_ms:
        return release(record, token)
    return None if record.envelope.rule is None else by_policy(record, token, now_ms)


def by_policy(record: Record, token: int, now_ms: int) -> Settlement | None:
    """Return the settlement of an occurrence that its policies do not let run; None if it may run.

    If this machine does not know the time zone of the series, the series waits, and keeps its occurrence. The
    settlement is then an `Again` with an error.
    """
    assert record.envelope.rule is not None
    try:
        rule = recurrence.decode_rule(record.envelope.rule)
    except RecordFormatError as unreadable:
        error = error_text(unreadable)
        if recurrence.is_of_unknown_zone(record.envelope.rule):
            due_ms = now_ms + UNKNOWN_ZONE_MS
            return Again(record.envelope.id, record.revision, token, due_ms, record.attempt, error)
        return dead(record, token, now_ms, reason="undecodable", attempt=record.attempt, error=error)
    is_skipped = recurrence.is_missed(rule, record.due_ms, now_ms) or recurrence.is_overlapped(rule, record.live)
    reason: DeadReason | None = "killed_worker" if is_killer(record) else None
    is_dropped = reason is None and is_late(record, now_ms)
    if is_dropped and record.late is LateAction.DEAD_LETTER:
        reason = "late"
    if reason is not None:
        return dead(record, token, now_ms, reason=reason, attempt=record.attempt)
    if is_dropped or is_skipped:
        return done(record, token, now_ms, "dropped" if is_dropped else "skipped")
    return None


def decode_error_text(error: Exception) -> str:
    """Return why a payload could not be read. The text contains neither the payload nor a value from it."""
    if not isinstance(error, MsgspecError | RecordFormatError):
        return type(error).__name__
    if error.__cause__ is not None:  # the event's own type raised it, and its text may contain values
        place = _PLACE.search(str(error))
        return f"{type(error.__cause__).__name__}{place[0] if place else ''}"
    text = _INVALID_VALUE.sub(r"\1", str(error))
    return f"{type(error).__name__}: {text}"[:ERROR_LIMIT]

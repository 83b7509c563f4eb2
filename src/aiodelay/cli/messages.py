"""The commands `get`, `list`, `cancel`, `reschedule` and `fire`."""

from __future__ import annotations

import base64
import sys
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

from aiodelay import (
    AiodelayError,
    CancelOutcome,
    ConfigurationError,
    FireOutcome,
    RescheduleOutcome,
    Snapshot,
)
from aiodelay.core.durations import from_epoch_ms, to_epoch_ms
from aiodelay.core.validation import HANDLER_TARGET, check_type_name, split_target, to_of
from aiodelay.core.values import State
from aiodelay.errors import cut, shortened
from aiodelay.operations.json_shapes import error_shape, message_shape, read_time
from aiodelay.operations.queries import Filter, page

from .errors import NOT_FOUND, TOO_LATE, CommandError, exit_code_of
from .output import ago, confirm, json_line, moment, print_json, print_table
from .place import Place

__all__ = ["cancel", "fire", "get", "list_", "reschedule"]

MOST_EXAMINED = 10_000
EXIT_CODES: dict[StrEnum, int] = {
    CancelOutcome.NOT_FOUND: NOT_FOUND,
    CancelOutcome.IN_FLIGHT: TOO_LATE,
    RescheduleOutcome.NOT_FOUND: NOT_FOUND,
    RescheduleOutcome.TOO_LATE: TOO_LATE,
    FireOutcome.NOT_FOUND: NOT_FOUND,
    FireOutcome.IN_FLIGHT: TOO_LATE,
}


async def get(id_: str, /, *, place: Place = Place()) -> int:
    """Show a pending message, with its payload.

    Args:
        id_: The id of the message; or ID~DUE for the retry of an occurrence of a series, as `list` shows it.
    """
    async with place.opened() as scheduler:
        snapshot = await scheduler.get(id_)
        now_ms = scheduler.store.now_ms()
    if snapshot is None:
        text = f"no message {cut(id_)} is pending or in flight; aiodelay why {cut(id_)} explains more"
        raise CommandError(text, exit_code=NOT_FOUND)
    if place.json:
        print_json(message_shape(snapshot))
    else:
        _print_message(snapshot, now_ms)
    return 0


def _print_message(snapshot: Snapshot, now_ms: int) -> None:
    shape = message_shape(snapshot)
    shape["due"] += f" ({ago(snapshot.record.due_ms, now_ms)})"
    for name, value in shape.items():
        if value not in (None, "", [], {}, 0, False):
            text = value if isinstance(value, str) else json_line(value)
            print(f"{name:<16}{cut(text, 10_000)}")


async def list_(
    *,
    of: str | None = None,
    state: Literal["scheduled", "overdue", "in_flight", "held"] | None = None,
    to: str | None = None,
    since: str | None = None,
    before: str | None = None,
    limit: Annotated[int, Parameter(validator=Number(gte=1, lte=1_000_000))] = 100,
    after: str | None = None,
    place: Place = Place(),
) -> int:
    """List pending messages, by the time of their next attempt.

    An index answers --of, --since and --before. For --state, and for the address in --to, the command compares messages
    one by one, at most 10,000 per call. If more messages may match, the command writes a cursor for --after to stderr.

    Args:
        of: Only this event type or sink.
        state: Only messages in this state.
        to: Only messages to this destination.
        since: Only messages whose next attempt is at this time or later.
        before: Only messages whose next attempt is before this time.
        limit: The most messages to list.
        after: Go on after this cursor, which the previous call wrote to stderr.
    """
    lanes, address = _destination(of, to)
    from_ms, to_ms = _epoch_ms(since, "since"), _epoch_ms(before, "before")
    wanted = Filter(lanes, from_ms, to_ms, None if state is None else State(state), address)
    start = _cursor(after)
    async with place.opened() as scheduler:
        found = await page(scheduler, wanted, after=start, limit=limit, most=MOST_EXAMINED)
        now_ms = scheduler.store.now_ms()
    if place.json:
        print_json(*map(message_shape, found.messages))
    else:
        heads = ("due", "", "state", "to", "id", "attempt", "bytes")
        print_table(heads, [_row(each, now_ms) for each in found.messages])
    if found.after is not None:
        cursor = base64.urlsafe_b64encode(msgspec.json.encode(found.after)).decode()
        progress = {"examined": found.examined, "of": found.of, "next": cursor}
        of = "" if found.of is None else f" of {found.of}"
        text = f"examined {found.examined}{of}; more: --after {cursor}"
        print(json_line(progress) if place.json else text, file=sys.stderr)
    return 0


def _destination(of: str | None, to: str | None) -> tuple[tuple[str, ...], str | None]:
    """Return the lanes and the address of the filter that --of and --to give."""
    if to is None:
        return (() if of is None else (check_type_name(of, "of"),)), None
    lane, address = split_target(to)
    return ((address,), "") if lane == HANDLER_TARGET else ((lane,), address)


def _cursor(text: str | None) -> tuple[int, str] | None:
    if text is None:
        return None
    try:
        due_ms, message_id = msgspec.json.decode(base64.urlsafe_b64decode(text), type=tuple[int, str])
        return to_epoch_ms(from_epoch_ms(due_ms), field="after"), message_id
    except (ValueError, OverflowError):
        raise ConfigurationError("after", shortened(text), "a cursor that `aiodelay list` wrote") from None


def _epoch_ms(text: str | None, field: str) -> int | None:
    at = read_time(text, field)
    return None if at is None else to_epoch_ms(at, field=field)


def _row(snapshot: Snapshot, now_ms: int) -> tuple[object, ...]:
    record = snapshot.record
    due_ms = snapshot.next_attempt_ms
    to = to_of(record.envelope)
    return (
        moment(due_ms),
        ago(due_ms, now_ms),
        snapshot.state.value,
        to,
        record.id,
        record.attempt,
        len(record.envelope.payload),
    )


# --- changes ----------------------------------------------------------------------------------------------


async def cancel(
    *ids: str,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="")] = False,
    place: Place = Place(),
) -> int:
    """Cancel messages, and series with all their retries.

    The outcome cancelled means that the message will not be delivered. The outcome in_flight means that the present
    attempt goes on, but no retry and no further occurrence follows. On Kafka, the outcome recorded means that the
    message will not be delivered, except if its delivery has already begun.

    Args:
        ids: The ids of the messages.
        yes: Do not ask for confirmation.
    """
    await confirm(f"cancel {_named(ids)}", yes=yes)
    async with place.opened() as scheduler:
        return await _each(ids, scheduler.cancel, place)


async def reschedule(
    id_: str,
    /,
    *,
    delay: str | None = None,
    at: str | None = None,
    place: Place = Place(),
) -> int:
    """Move a pending message to another due time. Nothing else about it changes.

    The outcome too_late means that the message is being delivered at its old due time, and is not moved.

    Args:
        id_: The id of the message.
        delay: The duration from now until the new due time: 90s, 1h30m, 2d.
        at: The new due time: 2026-12-01T09:00:00+01:00.
    """
    instant = read_time(at, "at")
    async with place.opened() as scheduler:
        return await _each([id_], lambda each: scheduler.reschedule(each, at=instant, delay=delay), place)


async def fire(*ids: str, place: Place = Place()) -> int:
    """Make pending messages due now.

    Args:
        ids: The ids of the messages.
    """
    async with place.opened() as scheduler:
        return await _each(_some(ids), scheduler.fire, place)


def _some(ids: Sequence[str]) -> Sequence[str]:
    if not ids:
        raise CommandError("no id is given; give the ids of messages", exit_code=2)
    return ids


def _named(ids: Sequence[str]) -> str:
    return cut(_some(ids)[0]) if len(ids) == 1 else f"{len(_some(ids))} messages"


async def _each(ids: Sequence[str], change: Callable[[str], Awaitable[StrEnum]], place: Place) -> int:
    """Change each message and print its outcome; return the highest exit code."""
    code = 0
    for message_id in ids:
        try:
            outcome = await change(message_id)
        except AiodelayError as error:
            if len(ids) == 1:
                raise
            shape = {"id": message_id} | error_shape(error)
            print(json_line(shape) if place.json else f"{cut(message_id)}: {error}", file=sys.stderr)
            code = max(code, exit_code_of(error))
            continue
        if place.json:
            print_json({"id": message_id, "outcome": outcome.value})
        else:
            print(f"{outcome.value} {cut(message_id)}")
        code = max(code, EXIT_CODES.get(outcome, 0))
    return code

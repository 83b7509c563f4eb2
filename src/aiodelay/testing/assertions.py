"""`assert_scheduled` and `assert_delivered`: assertions for tests of programs that schedule messages.

When an assertion fails, its error shows the expected message and the actual message that is nearest to it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from aiodelay.core.durations import Duration, format_duration, from_epoch_ms, parse_duration, to_epoch_ms
from aiodelay.core.event_codecs import codec_named
from aiodelay.core.transitions import base_id
from aiodelay.core.validation import to_of
from aiodelay.core.values import Delivery, Envelope, Snapshot, State
from aiodelay.errors import InputError, shortened
from aiodelay.handlers.registration import is_event_class, type_names
from aiodelay.scheduler import Scheduler

from .kit import Kit, kit_of

__all__ = ["assert_delivered", "assert_scheduled"]

T = TypeVar("T", Snapshot, Delivery)
OTHERS_SHOWN = 3
VALUE_SHOWN = 200
WRONG_TYPE, WRONG_PLACE, WRONG_FIELD = 100, 10, 1


def assert_scheduled(
    scheduler: Scheduler,
    event: object,
    *,
    within: Duration | None = None,
    at: datetime | None = None,
    to: str | None = None,
    id: str | None = None,  # noqa: A002 - as in `schedule`
    times: int | None = None,
) -> list[Snapshot]:
    """Assert that a message waits in the store for its due time. A message in flight does not count.

    Args:
        scheduler: The scheduler, on virtual time. It may be open or closed.
        event: The expected event. An event class matches every event of that class; bytes match a raw payload.
        within: The next attempt is due at most this far ahead.
        at: The message is due at exactly this time.
        to: The destination, such as `"stdout:audit"`. The name of a sink matches all addresses of that sink.
        id: The id of the message.
        times: The number of messages that must match; None = at least one, 0 = none.

    Returns:
        The messages that match, by the time of their next attempt.

    Raises:
        AssertionError: The number of matches is wrong. If no message matches, the text shows the nearest message and
            the differences.
    """
    __tracebackhide__ = True
    kit, now_ms = kit_of(scheduler), scheduler.store.now_ms()
    wanted = _Wanted(
        event,
        to,
        id,
        None if within is None else now_ms + parse_duration(within, field="within", error=InputError),
        None if at is None else to_epoch_ms(at, field="at"),
    )
    waiting = [each for each in kit.messages() if each.state is not State.IN_FLIGHT]
    found, problem = _compare(
        "scheduled",
        wanted,
        waiting,
        times=times,
        differences=lambda each: wanted.differences(each.record.envelope, each),
        kit=kit,
    )
    if problem:
        raise AssertionError(problem)
    return found


def assert_delivered(
    scheduler: Scheduler,
    event: object,
    *,
    to: str | None = None,
    id: str | None = None,  # noqa: A002 - as in `schedule`
    times: int | None = None,
) -> list[Delivery]:
    """Assert that a handler or a sink received a message during this test.

    Failed attempts count too.

    Args:
        scheduler: The scheduler, on virtual time. It may be open or closed.
        event: The expected event. An event class matches every event of that class; bytes match a raw payload.
        to: The destination, such as `"stdout:audit"`. The name of a sink matches all addresses of that sink.
        id: The id of the message. For a recurring message, the id of the series.
        times: The number of attempts that must match; None = at least one, 0 = none.

    Returns:
        The attempts that match, by time.

    Raises:
        AssertionError: The number of matches is wrong. If no attempt matches, the text shows the nearest attempt and
            the differences.
    """
    __tracebackhide__ = True
    kit = kit_of(scheduler)
    wanted = _Wanted(event, to, id, None, None)
    found, problem = _compare(
        "delivered",
        wanted,
        kit.deliveries(),
        times=times,
        differences=lambda each: wanted.differences(each.envelope, None),
        kit=kit,
    )
    if problem:
        raise AssertionError(problem)
    return found


@dataclass(frozen=True, slots=True)
class _Difference:
    text: str
    weight: int


@dataclass(frozen=True, slots=True)
class _Wanted:
    event: object
    to: str | None
    id: str | None
    before_ms: int | None
    at_ms: int | None

    def __str__(self) -> str:
        parts = [self.event.__name__ if isinstance(self.event, type) else _cut(repr(self.event))]
        if self.to is not None:
            parts.append(f"to={self.to!r}")
        if self.id is not None:
            parts.append(f"id={self.id!r}")
        if self.before_ms is not None:
            parts.append(f"due by {_instant(self.before_ms)}")
        if self.at_ms is not None:
            parts.append(f"due at {_instant(self.at_ms)}")
        return ", ".join(parts)

    def differences(self, envelope: Envelope, waiting: Snapshot | None) -> list[_Difference]:
        """Return the differences between a message and the wanted message."""
        found = self._event_differences(envelope)
        if self.to is not None and self.to not in (to_of(envelope), envelope.lane):
            found.append(_Difference(f"to: {to_of(envelope)!r}, expected {self.to!r}", WRONG_PLACE))
        if self.id is not None and base_id(envelope.id) != self.id:
            found.append(_Difference(f"id: {envelope.id!r}, expected {self.id!r}", WRONG_PLACE))
        if waiting is None:
            return found
        if self.before_ms is not None and waiting.next_attempt_ms > self.before_ms:
            late = format_duration(waiting.next_attempt_ms - self.before_ms)
            found.append(_Difference(f"due: {_instant(waiting.next_attempt_ms)}, {late} too late", WRONG_FIELD))
        if self.at_ms is not None and waiting.record.due_ms != self.at_ms:
            found.append(
                _Difference(f"due: {_instant(waiting.record.due_ms)}, expected {_instant(self.at_ms)}", WRONG_FIELD)
            )
        return found

    def _event_differences(self, envelope: Envelope) -> list[_Difference]:
        event, class_ = self.event, self.event if isinstance(self.event, type) else type(self.event)
        if class_ is bytes:
            if envelope.encoding:
                return [_Difference(f"event: a {_type(envelope)}, expected bytes", WRONG_TYPE)]
            if event is bytes or event == envelope.payload:
                return []
            return [_Difference(f"payload: {_cut(repr(envelope.payload))}, expected {event!r}", WRONG_FIELD)]
        if not is_event_class(class_):
            raise InputError("event", shortened(event), "an event, an event class, or bytes")
        if not envelope.encoding or _type(envelope) not in type_names(class_):
            got = _type(envelope) if envelope.encoding else "bytes"
            return [_Difference(f"event: a {got}, expected a {type_names(class_)[0]}", WRONG_TYPE)]
        return [] if isinstance(event, type) else _field_differences(envelope, event)


def _field_differences(envelope: Envelope, event: object) -> list[_Difference]:
    got = _decoded(envelope)
    codec = codec_named(envelope.encoding)
    expected = codec.decoder(Any)(codec.encode(event))
    if got == expected:
        return []
    if not isinstance(got, dict) or not isinstance(expected, dict):
        return [_Difference(f"event: {got!r}, expected {expected!r}", WRONG_FIELD)]
    return [
        _Difference(f"{name}: {_value(got, name)}, expected {_value(expected, name)}", WRONG_FIELD)
        for name in {**expected, **got}
        if _value(got, name) != _value(expected, name)
    ]


def _value(fields: dict[str, Any], name: str) -> str:
    return _cut(repr(fields[name])) if name in fields else "absent"


def _decoded(envelope: Envelope) -> Any:  # noqa: ANN401 - an event may be of any type
    return codec_named(envelope.encoding).decoder(Any)(envelope.payload)


def _compare(
    word: str,
    wanted: _Wanted,
    there: Sequence[T],
    *,
    times: int | None,
    differences: Callable[[T], list[_Difference]],
    kit: Kit,
) -> tuple[list[T], str]:
    """Return the items that match, and the text of the error. The text is "" if the number of items is as expected."""
    compared: list[tuple[T, list[_Difference]]] = [(each, differences(each)) for each in there]
    found = [each for each, differing in compared if not differing]
    if len(found) == times or (times is None and found):
        return found, ""
    if found:
        lines = [f"{wanted} was {word} {_times(len(found))}{_failed(found, kit)}, expected {_times(times or 0)}:"]
        lines += [f"  {_shown(each)}{_failure(each, kit)}" for each in found]
        return found, "\n".join(lines + (_given_up(wanted, kit) if word == "delivered" else []))
    expected = "" if times is None else f" (expected {_times(times)})"
    lines = [f"{wanted} was not {word}{expected}."]
    missed = sorted((pair for pair in compared if pair[1]), key=lambda pair: sum(each.weight for each in pair[1]))
    lines += _nearest(word, missed) if missed else [f"No message was {word}."]
    return found, "\n".join(lines + _elsewhere(word, wanted, kit))


def _nearest(word: str, missed: Sequence[tuple[T, list[_Difference]]]) -> list[str]:
    lines = [f"Nearest: {_shown(missed[0][0])}", *(f"  {each.text}" for each in missed[0][1])]
    if len(missed) > 1:
        lines.append(f"Also {word}:")
        lines += [f"  {_shown(each)}" for each, _ in missed[1 : OTHERS_SHOWN + 1]]
    if len(missed) > OTHERS_SHOWN + 1:
        lines.append(f"  and {len(missed) - OTHERS_SHOWN - 1} more")
    return lines


def _elsewhere(word: str, wanted: _Wanted, kit: Kit) -> list[str]:
    """Return lines about wanted messages in another state: not delivered yet, in flight, delivered or given up."""
    lines = [
        f"It is {message.state.value.replace('_', ' ')}: {_shown(message)}"
        for message in kit.messages()
        if (word == "delivered" or message.state is State.IN_FLIGHT)
        and not wanted.differences(message.record.envelope, None)
    ]
    if word == "scheduled":
        lines += [
            f"It was delivered: {_shown(each)}"
            for each in kit.deliveries()
            if not wanted.differences(each.envelope, None)
        ]
    return lines[:OTHERS_SHOWN] + _given_up(wanted, kit)


def _given_up(wanted: _Wanted, kit: Kit) -> list[str]:
    """Return lines about wanted messages that became dead letters, with the traceback of the last attempt."""
    lines: list[str] = []
    letters = [each for each in kit.dead_letters() if not wanted.differences(each.record.envelope, None)]
    for letter in letters[:OTHERS_SHOWN]:
        error = f": {letter.record.last_error}" if letter.record.last_error else ""
        lines.append(f"It is a dead letter, {letter.reason}{error}")
        lines += [f"  {line}" for line in (letter.traceback or "").splitlines()]
    return lines


def _failed(found: Sequence[Snapshot | Delivery], kit: Kit) -> str:
    """Return the number of failed attempts and the last error, as text; "" if no attempt failed."""
    failures = [failure for each in found if isinstance(each, Delivery) and (failure := kit.failure(each)) is not None]
    return f", {len(failures)} failed: {_cut(failures[-1])}" if failures else ""


def _failure(each: Snapshot | Delivery, kit: Kit) -> str:
    failure = kit.failure(each) if isinstance(each, Delivery) else None
    return "" if failure is None else f", failed: {_cut(failure)}"


def _shown(what: Snapshot | Delivery) -> str:
    if isinstance(what, Delivery):
        at_ms = what.due_ms + what.lateness_ms
        return f"{_event(what.envelope)}, attempt {what.attempt} at {_instant(at_ms)}"
    retry = "" if what.next_attempt_ms == what.record.due_ms else f", again at {_instant(what.next_attempt_ms)}"
    return f"{_event(what.record.envelope)}, due {_instant(what.record.due_ms)}{retry}"


def _event(envelope: Envelope) -> str:
    target = "" if not envelope.address else f" to {to_of(envelope)!r}"
    if not envelope.encoding:
        return f"{_cut(repr(envelope.payload))}{target} (id {envelope.id!r})"
    try:
        text = msgspec.json.encode(_decoded(envelope)).decode()
    except (msgspec.MsgspecError, TypeError):
        text = base64.b64encode(envelope.payload).decode()
    return f"{_type(envelope)} {_cut(text)}{target} (id {envelope.id!r})"


def _cut(text: str) -> str:
    return text if len(text) <= VALUE_SHOWN else text[: VALUE_SHOWN - 1] + "…"


def _type(envelope: Envelope) -> str:
    return envelope.type or envelope.lane


def _times(n: int) -> str:
    return f"{n} time" if n == 1 else f"{n} times"


def _instant(ms: int) -> str:
    return from_epoch_ms(ms).isoformat(timespec="milliseconds").replace("+00:00", "Z").replace(".000Z", "Z")

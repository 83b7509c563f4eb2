"""`Composer`: makes the command that stores a message from the caller's arguments. Nothing here waits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal

from msgspec.structs import replace

from aiodelay.core import recurrence
from aiodelay.core.appending import SEPARATOR
from aiodelay.core.conflicts import FOR_ONE_RUN
from aiodelay.core.durations import Duration, parse_duration
from aiodelay.core.event_codecs import Codec
from aiodelay.core.ids import new_id, new_op
from aiodelay.core.recurrence import Cron, Every, Rule
from aiodelay.core.spread import spread_ms_of
from aiodelay.core.validation import (
    HANDLER_TARGET,
    Targets,
    check_headers,
    check_id,
    check_key,
    check_payload_size,
    check_type_name,
    due_of,
    split_target,
)
from aiodelay.core.values import (
    NO_HEADERS,
    OPERANDS,
    OPTIONAL,
    After,
    At,
    Conflict,
    Envelope,
    Late,
    LateAction,
    Message,
    Put,
)
from aiodelay.engine.delivery.settling import decode_error_text
from aiodelay.errors import (
    ConfigurationError,
    InputError,
    PayloadTypeError,
    ScheduleTimeError,
    TargetError,
    UnknownSinkError,
    UnsupportedByStoreError,
    kind_of,
    shortened,
)
from aiodelay.handlers.registration import EventTypes, is_event_class
from aiodelay.ports import Sink, StoreTraits

__all__ = ["TIMES", "Composer", "check_rule", "names_of"]

TIMES = "at, delay, every"
"""The arguments that give a due time. Exactly one of them must be given."""
_NUMBERS = ("version", "revision", "quiet_ms", "max_wait_ms", "window_ms", "max_items", "max_bytes")
_CONFLICTS = (
    "Conflict.replace(), .keep(), .newer(n), .error(), .if_revision(n), .earlier(), .later(), .debounce(...),"
    " .throttle(...) or .append(...)"
)


class Composer:
    """Checks and encodes messages for one scheduler.

    Args:
        codec: Encodes typed events.
        sinks: The scheduler's sinks, by name.
        targets: The allowed destinations.
        max_payload: Most bytes of a payload.
        traits: A function that returns the store's traits.
        types: The event classes used so far.
        checks_events: Whether each encoded event is decoded again, to find events that a handler could not read.
    """

    def __init__(
        self,
        *,
        codec: Codec,
        sinks: Mapping[str, Sink],
        targets: Targets,
        max_payload: int,
        traits: Callable[[], StoreTraits],
        types: EventTypes,
        checks_events: bool,
    ) -> None:
        self._codec, self._sinks, self._targets = codec, sinks, targets
        self._max_payload, self._traits, self._types = max_payload, traits, types
        self._checks_events = checks_events
        self._readers: dict[type, Callable[[bytes], object]] = {}

    def moved_to(self, sinks: Mapping[str, Sink], types: EventTypes) -> Composer:
        """Return a composer with other sinks and event classes. The other settings are the same."""
        return Composer(
            codec=self._codec,
            sinks=sinks,
            targets=self._targets,
            max_payload=self._max_payload,
            traits=self._traits,
            types=types,
            checks_events=self._checks_events,
        )

    def put(self, message: Message, now_ms: int) -> Put:
        """Return the command that stores a message.

        Raises:
            InputError: An argument is wrong. The error names the field, the value and the allowed values.
            ConfigurationError: The store or the scheduler cannot do what the message asks for.
        """
        message_id = new_id() if message.id is None else check_id(message.id)
        try:
            return self._put(message, message_id, now_ms)
        except (InputError, ConfigurationError) as error:
            if message.id is not None:
                error.message_id, error.args = message_id, (*error.args[:3], message_id)
            raise

    def check_mode(self, mode: str) -> None:
        """Refuse a mode of `Conflict` that the store does not know.

        Raises:
            UnsupportedByStoreError: The store does not know the mode.
        """
        known = self._traits().conflicts
        if mode not in known:
            raise UnsupportedByStoreError("conflict", mode, ", ".join(sorted(known)))

    def _put(self, message: Message, message_id: str, now_ms: int) -> Put:
        conflict = _checked_conflict(message.conflict, recurs=message.every is not None)
        late = _checked_late(message.late)
        self.check_mode(conflict.mode)
        due, rule = self._due(message, message_id, now_ms)
        lane, address, type_ = self._destination(message.event, message.to)
        payload, encoding = self._payload(message)
        check_payload_size(payload, self._max_payload)
        if conflict.mode == "append":
            _check_item(payload, encoding)
            conflict = replace(conflict, max_bytes=self._max_payload)
        envelope = Envelope(
            message_id,
            lane,
            address,
            type_,
            encoding,
            payload,
            self._types.key_of(message.event, lane) if message.key is None else check_key(message.key),
            NO_HEADERS if message.headers is NO_HEADERS else check_headers(message.headers),
            version=conflict.version,
            rule=rule,
        )
        return Put(new_op(), envelope, due, conflict, late)

    def _due(self, message: Message, message_id: str, now_ms: int) -> tuple[At | After, dict[str, str | int] | None]:
        every, quiet_ms, spread = message.every, message.conflict.quiet_ms, message.spread
        if quiet_ms is not None:
            if message.at is not None or message.delay is not None or spread is not None:
                raise ScheduleTimeError(TIMES, "given with Conflict.debounce", "none of them: quiet is the delay")
            return After(quiet_ms), None
        if every is None:
            due = due_of(message.at, message.delay, now_ms, fields=TIMES)
            return (due if spread is None else _spread(due, spread, message_id)), None
        if message.at is not None or message.delay is not None:
            raise ScheduleTimeError(TIMES, "given as more than one argument", "exactly one of them")
        if spread is not None:
            raise ScheduleTimeError(
                "spread", "given together with every", "a rule with a spread: Cron(..., spread='5m')"
            )
        rule = recurrence.placed(check_rule(every), message_id)
        return At(recurrence.first_due(rule, now_ms)), recurrence.encode_rule(rule)

    def _destination(self, event: object, to: str | None) -> tuple[str, str, str]:
        """Return the lane, the address and the stored type name of a message."""
        if to is None:
            if event is None or type(event) is bytes:
                got = "None names" if event is None else "bytes name"
                raise TargetError("to", "missing", f"'<sink>:<address>', because {got} no handler")
            return self._event_name(event), "", ""
        sink_name, address = split_target(to)
        self._targets.check(f"{sink_name}:{address}")
        if sink_name == HANDLER_TARGET:
            if event is None:
                raise PayloadTypeError("event", "None", "bytes or a typed event: a handler cannot take None")
            return _checked_handler_name(address), "", ""
        sink = self._sinks.get(sink_name)
        if sink is None:
            known = ", ".join(f"{name}:" for name in sorted({*self._sinks, HANDLER_TARGET}))
            raise UnknownSinkError("the sink in to=", repr(sink_name), f"{known} (add others with the setting sinks)")
        sink.check(address)
        return sink_name, address, "" if event is None or type(event) is bytes else self._event_name(event)

    def _event_name(self, event: object) -> str:
        self._reader_of(event)
        return self._types.name_of(type(event))

    def _payload(self, message: Message) -> tuple[bytes, Literal["", "json", "msgpack", "null"]]:
        event = message.event
        if type(event) is bytes:
            return event, ""
        if event is None:
            if message.key is None:
                raise PayloadTypeError(
                    "event",
                    "None, and the message has no key",
                    "an event, or None together with a key (a record without a value)",
                )
            return b"", "null"
        read = self._reader_of(event)
        payload = self._codec.encode(event)
        if not self._checks_events:
            return payload, self._codec.encoding
        try:
            read(payload)  # a handler will read it the same way: an error there would be a dead letter, much later
        except Exception as error:  # noqa: BLE001 - a user's type may raise anything
            problem = decode_error_text(error)
        else:
            return payload, self._codec.encoding
        raise PayloadTypeError(  # raised outside the `except`, so that no chained exception holds a value
            "event",
            f"{kind_of(event)} that could not be read again ({problem})",
            f"values of the types that {type(event).__qualname__} declares; or check_events=False",
        )

    def _reader_of(self, event: object) -> Callable[[bytes], object]:
        """Return the decoder for events of this event's class.

        Raises:
            PayloadTypeError: The event's class cannot be an event class.
        """
        class_ = type(event)
        read = self._readers.get(class_)
        if read is None:
            _check_event(event)
            read = self._readers[class_] = _reader_of(self._codec, class_)
        return read


def _reader_of(codec: Codec, class_: type) -> Callable[[bytes], object]:
    """Return the decoder of an event class. If no codec knows the class, return a function that accepts any payload."""
    try:
        return codec.decoder(class_)
    except Exception:  # noqa: BLE001 - annotations of the event's fields are evaluated here
        return len


def _check_event(event: object) -> None:
    if not is_event_class(type(event)):
        got = f"the class {event.__qualname__}" if isinstance(event, type) else kind_of(event)
        allowed = "bytes with to=, or an instance of a dataclass, msgspec.Struct, attrs class or pydantic model"
        raise PayloadTypeError("event", got, allowed)


def check_rule(every: object) -> Rule:
    """Return a recurrence rule after a check of its type.

    Raises:
            ScheduleTimeError: The value is not a rule.
    """
    if not isinstance(every, Every | Cron):
        raise ScheduleTimeError("every", shortened(every), "Every('10m') or Cron('0 9 * * mon', tz='Europe/Paris')")
    return every


def _spread(due: At | After, spread: Duration, message_id: str) -> At | After:
    span_ms = parse_duration(spread, field="spread", least_ms=1)
    moved_ms = due.ms + spread_ms_of(message_id, span_ms)
    return At(moved_ms) if isinstance(due, At) else After(moved_ms)


def _checked_conflict(conflict: Conflict, *, recurs: bool) -> Conflict:
    if not isinstance(conflict, Conflict) or not _is_whole(conflict):
        raise ConfigurationError("conflict", shortened(conflict), _CONFLICTS)
    if recurs and conflict.mode in FOR_ONE_RUN:
        allowed = "for a message that recurs: replace, keep, newer, error or if_revision"
        raise ConfigurationError("conflict", conflict.mode, allowed)
    return conflict


def _check_item(payload: bytes, encoding: str) -> None:
    """Refuse a payload that cannot be one line among others."""
    if encoding not in ("", "json"):
        raise PayloadTypeError("payload", f"of the encoding {encoding}", "JSON or bytes, for Conflict.append()")
    if not payload or SEPARATOR in payload:
        got = f"{payload.count(SEPARATOR) + 1} lines" if payload else "empty"
        raise PayloadTypeError("payload", got, "one line that is not empty, for Conflict.append()")


def _is_whole(conflict: Conflict) -> bool:
    """Return whether the rule has the numbers that its mode needs, and no others."""
    given = {name for name in _NUMBERS if getattr(conflict, name) is not None}
    known = OPERANDS.get(conflict.mode, frozenset())
    return known - OPTIONAL <= given <= known and all(type(getattr(conflict, name)) is int for name in given)


def _checked_late(late: Late) -> Late:
    if not isinstance(late, Late) or not isinstance(late.action, LateAction) or type(late.after_ms) is not int:
        allowed = "Late.deliver(), .drop(after=...), .dead_letter(after=...)"
        raise ConfigurationError("late", shortened(late), allowed)
    return late


def _checked_handler_name(name: str) -> str:
    try:
        return check_type_name(name, "to")
    except ConfigurationError as error:
        value, allowed = error.value, error.allowed
    raise TargetError("the handler name in to=", value, allowed)


def names_of(sinks: Collection[Sink]) -> dict[str, Sink]:
    """Return sinks by name.

    Raises:
        ConfigurationError: Two sinks have the same name, or a sink has a reserved name.
    """
    named: dict[str, Sink] = {}
    for sink in sinks:
        if sink.name in named or sink.name == HANDLER_TARGET:
            raise ConfigurationError(
                "sinks", f"two sinks named {sink.name!r}", f"one sink per name, and no sink {HANDLER_TARGET!r}"
            )
        named[sink.name] = sink
    return named

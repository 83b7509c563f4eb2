"""The JSON forms ("shapes") of messages, rules, errors and counts, which the CLI and the HTTP API write and read.

Times are ISO 8601 text in UTC with milliseconds. A shape always has all its keys; a missing value is None. There are
two exceptions: a shape has only one of `payload` and `payload_base64`, and only one of `key` and `key_base64`. If the
bytes are UTF-8, the shape has the text. A header's value is text if it is UTF-8, and otherwise `{"base64": "..."}`.
docs/cli.md lists the keys.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from aiodelay.core.conflict_text import CONFLICT_TEXTS, read_conflict
from aiodelay.core.durations import LAST_MS, format_duration, from_epoch_ms, parse_instant, to_epoch_ms
from aiodelay.core.recurrence import Cron, Every, Rule, decode_rule, encode_rule, placed
from aiodelay.core.transitions import NO_OP, base_id, delivery_id, put_due_of
from aiodelay.core.validation import HANDLER_TARGET, check_id, split_target, to_of
from aiodelay.core.values import (
    NO_HEADERS,
    NO_TRACE,
    Blocked,
    Conflict,
    DeadLetter,
    Envelope,
    JournalEntry,
    Lane,
    LaneCounts,
    Late,
    LateAction,
    LoadBucket,
    Message,
    Record,
    Scheduled,
    Snapshot,
)
from aiodelay.errors import (
    AiodelayError,
    ConfigurationError,
    HeaderError,
    InputError,
    MessageIdError,
    PayloadTypeError,
    RecordFormatError,
    ScheduleTimeError,
    TargetError,
    cut,
    shortened,
)

from .diagnosis import Story

__all__ = [
    "blocked_shape",
    "counts_shape",
    "dead_letter_shape",
    "error_shape",
    "journal_shape",
    "json_problem",
    "load_shape",
    "message_shape",
    "read_message",
    "read_record",
    "read_rule",
    "read_time",
    "record_shape",
    "rule_shape",
    "scheduled_shape",
    "stored_rule",
    "story_shape",
    "text_pair",
    "time_shape",
]

C = TypeVar("C", list[Any], dict[str, Any])
_KINDS = {type(None): "null", bool: "true or false", str: "a string", list: "an array", dict: "an object"}
_JSON_WORDS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_CRON_KEYS = {"cron", "tz", "missed", "overlap", "spread"}
_EVERY_KEYS = {"interval", "start", "missed", "overlap"}
_RULES = '"10m", {"interval": "10m"}, "0 9 * * mon" or {"cron": "0 9 * * mon", "tz": "Europe/Paris"}'
_LATES = '"deliver", {"drop": "15m"} or {"dead_letter": "15m"}'
_TARGETS = '"<sink>:<address>", such as "redis-list:orders", or "handler:<type name>"'
_DURATIONS = 'a string with units, such as "250ms", "5s", "1h30m", "2d", "1w" or "PT5M"'
_INSTANTS = 'a string in ISO 8601 with an offset, such as "2027-01-01T09:00:00Z"'


# --- write ------------------------------------------------------------------------------------------------


def time_shape(ms: int) -> str:
    """Return a time, epoch ms, as ISO 8601 text in UTC. A time after the year 9999 becomes the end of that year."""
    seconds, rest = divmod(min(ms, LAST_MS), 1000)
    return f"{_second_shape(seconds)}.{rest:03d}Z"


@lru_cache(maxsize=1024)  # the messages of one answer are mostly due within a few seconds
def _second_shape(seconds: int) -> str:
    return from_epoch_ms(1000 * seconds).isoformat().removesuffix("+00:00")


def message_shape(snapshot: Snapshot) -> dict[str, Any]:
    """Return the JSON form of a pending message: its record, its state, and the time of its next attempt."""
    shape = record_shape(snapshot.record)
    return shape | {"state": snapshot.state.value, "next_attempt": time_shape(snapshot.next_attempt_ms)}


def dead_letter_shape(letter: DeadLetter) -> dict[str, Any]:
    """Return the JSON form of a dead letter: its record, traceback, reason, and the time when it was given up."""
    shape = record_shape(letter.record) | {"traceback": letter.traceback}
    return shape | {"reason": letter.reason, "given_up": time_shape(letter.at_ms)}


def record_shape(record: Record) -> dict[str, Any]:
    """Return the JSON form of a whole record. `aiodelay import` reads it back."""
    envelope = record.envelope
    shape: dict[str, Any] = {
        "id": record.id,
        "to": to_of(envelope),
        "type": envelope.type or (None if envelope.address or not envelope.encoding else envelope.lane),
        "encoding": envelope.encoding,
        "due": time_shape(record.due_ms),
        "revision": record.revision,
        "delivery_id": delivery_id(record),
        "attempt": record.attempt,
        "lapses": record.lapses,
        "kills": record.kills,
        "is_cancelled": record.no_retry,
        "is_last_attempt": record.no_retry,  # deprecated: in Python, `context.is_last_attempt` means the retry plan
        "version": envelope.version,
        "every": stored_rule(envelope.rule),
        "retrying": [time_shape(due_ms) for due_ms in record.live],
        "debounced_since": None if record.debounced_ms is None else time_shape(record.debounced_ms),
        "late": _late_shape(record),
        "headers": {name: _text_or_base64(value) for name, value in envelope.headers.items()},
        "trace": dict(envelope.trace),
        "bytes": len(envelope.payload),
        "first_error": record.first_error,
        "earlier_errors": list(record.earlier_errors),
        "last_error": record.last_error,
    }
    shape |= text_pair("key", envelope.key)
    if record.appended is not None:
        due_ms = record.due_ms if record.appended_due_ms is None else record.appended_due_ms
        shape |= text_pair("appended", record.appended) | {"appended_due": time_shape(due_ms)}
    return shape | text_pair("payload", None if envelope.encoding == "null" else envelope.payload)


def rule_shape(rule: Rule) -> dict[str, Any]:
    """Return the JSON form of a recurrence rule. `read_rule` reads it back."""
    policies = {"missed": rule.missed, "overlap": rule.overlap}
    if isinstance(rule, Cron):
        spread = {} if rule.spread is None else {"spread": rule.spread}
        return {"cron": rule.expression, "tz": rule.tz} | policies | spread
    start = None if rule.start is None else time_shape(to_epoch_ms(rule.start, field="start"))
    return {"interval": rule.interval, "start": start} | policies


def scheduled_shape(scheduled: Scheduled) -> dict[str, Any]:
    """Return the JSON form of the outcome of `schedule()`. `due` is None if no message is pending under the id.

    `older_in_flight` is present only if the message replaced a version that is still being delivered.
    """
    due = time_shape(scheduled.due_ms) if scheduled.revision else None
    shape = {"id": scheduled.id, "outcome": scheduled.outcome.value, "due": due, "revision": scheduled.revision}
    return shape | ({"older_in_flight": True} if scheduled.is_older_in_flight else {})


def counts_shape(counts: Mapping[Lane, LaneCounts]) -> list[dict[str, Any]]:
    """Return the counts of each lane, sorted by lane."""
    return [{"lane": lane} | msgspec.structs.asdict(counts[lane]) for lane in sorted(counts)]


def load_shape(buckets: Sequence[LoadBucket]) -> list[dict[str, Any]]:
    """Return the numbers of messages that come due, by bucket and lane. Empty buckets are left out."""
    return [{"from": time_shape(each.from_ms), "lane": each.lane, "messages": each.messages} for each in buckets]


def blocked_shape(blocked: Blocked) -> dict[str, Any]:
    """Return the JSON form of a blocked destination."""
    return {"to": f"{blocked.lane}:{blocked.address}", "reason": blocked.reason, "messages": blocked.messages}


def journal_shape(entry: JournalEntry) -> dict[str, Any]:
    """Return the JSON form of a journal entry."""
    return {
        "number": entry.number,
        "at": time_shape(entry.at_ms),
        "event": entry.event,
        "id": entry.id,
        "revision": entry.revision,
        "lane": entry.lane,
        "due": time_shape(entry.due_ms) if entry.due_ms else None,
        "attempt": entry.attempt,
        "detail": entry.detail,
    }


def story_shape(story: Story) -> dict[str, Any]:
    """Return the JSON form of the explanation of a message. `journal` is None if the store keeps no journal."""
    return {
        "id": story.id,
        "cause": story.cause,
        "text": story.text,
        "advice": story.advice,
        "message": None if story.message is None else message_shape(story.message),
        "dead_letters": [dead_letter_shape(each) for each in story.dead_letters],
        "journal": None if story.journal is None else [journal_shape(each) for each in story.journal],
    }


def error_shape(error: AiodelayError) -> dict[str, Any]:
    """Return the name and the text of an error, with `field`, `value` and `allowed` if the error has them."""
    shape: dict[str, Any] = {"error": type(error).__name__, "detail": str(error)}
    if isinstance(error, InputError):
        shape["field"] = error.field
    elif isinstance(error, ConfigurationError):
        shape["field"] = error.setting
    if isinstance(error, InputError | ConfigurationError):
        shape |= {"value": error.value, "allowed": error.allowed}
    return shape


def stored_rule(rule: Mapping[str, str | int] | None) -> dict[str, Any] | None:
    """Return a record's recurrence rule in the form of `rule_shape`; as stored, if this machine cannot read it."""
    if rule is None:
        return None
    try:
        return rule_shape(decode_rule(rule))
    except RecordFormatError:  # for example, this machine does not know the time zone
        return dict(rule)


def _late_shape(record: Record) -> object:
    if record.late is LateAction.DELIVER:
        return "deliver"
    return {record.late.name.lower(): format_duration(max(record.expires_ms - record.due_ms, 0))}


def _text_or_base64(value: bytes) -> object:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def text_pair(name: str, value: bytes | None) -> dict[str, str | None]:
    """Return bytes as a text under this name, or in base64 under `<name>_base64` if they are no UTF-8."""
    written = None if value is None else _text_or_base64(value)
    if isinstance(written, dict):
        return {f"{name}_base64": written["base64"]}
    return {name: written}  # type: ignore[dict-item]


# --- read -------------------------------------------------------------------------------------------------


class _Given(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a message in JSON, before they are checked."""

    to: Any = None
    payload: msgspec.Raw | UnsetType = UNSET
    payload_base64: Any = UNSET
    at: Any = None
    delay: Any = None
    every: Any = None
    id: Any = None
    key: Any = None
    key_base64: Any = None
    headers: Any = None
    conflict: Any = None
    late: Any = None
    spread: Any = None


_decode = msgspec.json.Decoder(_Given).decode


def _decoded(text: bytes) -> _Given:
    try:
        text.decode()
        return _decode(text)
    except UnicodeDecodeError as error:
        raise InputError("message", f"not UTF-8 from byte {error.start} on", "a JSON object") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        problem = cut(json_problem(error), 120)
    try:
        given = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError):
        raise InputError("message", f"not a JSON object: {problem}", "a JSON object") from None
    unknown = next((name for name in given if name not in _Given.__struct_fields__), None)
    if unknown is not None:
        raise InputError("field of message", shortened(unknown), ", ".join(_Given.__struct_fields__))
    raise InputError("message", problem, "JSON")


def json_problem(error: Exception) -> str:
    """Return the reason why msgspec refused JSON text, with the JSON names of types instead of the Python names."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return re.sub(r"(?:Expected|got) `[^`]*`", _with_json_words, str(error))


def _with_json_words(found: re.Match[str]) -> str:
    return re.sub(r"\w+", lambda word: _JSON_WORDS.get(word[0], word[0]), found[0])


def read_message(text: bytes) -> Message:
    """Return the message that a JSON object describes.

    The object has `to`, a payload, a due time, and optional fields:

    - The payload is `payload` or `payload_base64`. `payload` is text; or an object or an array, which is taken as
      written; or null. Null needs a key, and is delivered as a record without a value.
    - The due time is `at` (ISO 8601 with an offset), `delay` ("5m") or `every` ("10m", "0 9 * * mon", or an object).
    - The optional fields are `id`, `key` or `key_base64`, `headers`, `conflict`, `late` and `spread`.

    Raises:
        InputError: A field is wrong. The error names the field and the allowed values. `schedule()` checks more.
        ConfigurationError: The field `conflict` or `late` is wrong.
    """
    given = _decoded(text)
    try:
        payload = _payload(given.payload, given.payload_base64)
        to, key = _target(given.to), _bytes(given.key, given.key_base64, "key", HeaderError)
        return Message(
            _checked_payload(payload, key, to),
            at=read_time(given.at, "at"),
            delay=_optional_string(given.delay, "delay", ScheduleTimeError, _DURATIONS),
            every=None if given.every is None else read_rule(given.every),
            id=_optional_string(given.id, "id", MessageIdError),
            to=to,
            key=key,
            headers=_headers(given.headers),
            conflict=_conflict(given.conflict),
            late=_late(given.late),
            spread=_optional_string(given.spread, "spread", ScheduleTimeError, _DURATIONS),
        )
    except (InputError, ConfigurationError) as error:
        if isinstance(given.id, str):
            error.message_id, error.args = given.id, (*error.args[:3], given.id)
        raise


def read_record(given: Mapping[str, Any]) -> Record:
    """Return the record that a shape describes; skip unknown fields.

    The shape comes from `record_shape`, `message_shape` or `dead_letter_shape`.

    Raises:
        InputError: A field is missing or has the wrong form. The error names the field.
        ConfigurationError: The field `late` has the wrong form.
    """
    sink, address = split_target(_target(given.get("to")))
    lane, address = (address, "") if sink == HANDLER_TARGET else (sink, address)
    encoding = given.get("encoding")
    if encoding not in ("", "json", "msgpack", "null"):
        raise InputError("encoding", _shown(encoding), "'', 'json', 'msgpack' or 'null'")
    payload = msgspec.Raw(msgspec.json.encode(given["payload"])) if "payload" in given else UNSET
    type_, every, due_ms = given.get("type"), given.get("every"), _ms(given, "due")
    message_id = check_id(_string(given.get("id"), "id", MessageIdError), may_be_occurrence=True)
    envelope = Envelope(
        message_id,
        lane,
        address,
        type_ if isinstance(type_, str) and (address or type_ != lane) else "",
        encoding,
        b"" if encoding == "null" else _payload(payload, given.get("payload_base64", UNSET)) or b"",
        _bytes(given.get("key"), given.get("key_base64"), "key", HeaderError),
        _headers(given.get("headers")),
        {str(name): str(value) for name, value in _part(given, "trace", {}).items()} or NO_TRACE,
        None if given.get("version") is None else _count(given, "version"),
        None if every is None else encode_rule(placed(read_rule(every), base_id(message_id))),
    )
    late = _late(given.get("late"))
    return Record(
        envelope,
        _count(given, "revision", 48),
        due_ms,
        NO_OP,
        due_ms + late.after_ms if late.action is not LateAction.DELIVER else 0,
        late.action,
        attempt=_count(given, "attempt"),
        lapses=_count(given, "lapses", 8),
        kills=_count(given, "kills", 8),
        live=tuple(_ms({"retrying": each}, "retrying") for each in _part(given, "retrying", [])),
        first_error=_error_text(given, "first_error"),
        last_error=_error_text(given, "last_error"),
        earlier_errors=tuple(map(str, _part(given, "earlier_errors", []))),
        traceback=_error_text(given, "traceback"),
        put_due_ms=put_due_of(str(given.get("delivery_id") or ""), due_ms),
        debounced_ms=None if given.get("debounced_since") is None else _ms(given, "debounced_since"),
        appended=_bytes(given.get("appended"), given.get("appended_base64"), "appended", PayloadTypeError),
        appended_due_ms=None if given.get("appended_due") is None else _ms(given, "appended_due"),
    )


def _ms(given: Mapping[str, Any], field: str) -> int:
    at = read_time(given.get(field), field)
    if at is None:
        raise ScheduleTimeError(field, "missing", _INSTANTS)
    ms = to_epoch_ms(at, field=field)
    if ms < 0:
        raise ScheduleTimeError(field, _shown(given[field]), "an instant from 1970 on")
    return ms


def _count(given: Mapping[str, Any], field: str, bits: int = 63) -> int:
    value = given.get(field, 0)
    if type(value) is not int or not 0 <= value < 1 << bits:
        raise InputError(field, _shown(value), f"an integer from 0 to 2**{bits}-1")
    return value


def _part(given: Mapping[str, Any], field: str, empty: C) -> C:
    """Return an object or an array of a shape, or `empty` if it is missing."""
    value = given.get(field)
    if value is None:
        return empty
    if not isinstance(value, type(empty)):
        raise InputError(field, _kind(value), _KINDS[type(empty)])
    return value


def _error_text(given: Mapping[str, Any], field: str) -> str | None:
    text = given.get(field)
    return text if isinstance(text, str) else None


def read_time(given: object, field: str) -> datetime | None:
    """Return the time in an ISO 8601 text as an aware `datetime`; None if there is no text.

    Raises:
        ScheduleTimeError: The value is not ISO 8601 text, or the text has no offset.
    """
    text = _optional_string(given, field, ScheduleTimeError, _INSTANTS)
    return None if text is None else parse_instant(text, field=field)


def read_rule(given: object) -> Rule:
    """Return the rule that a JSON value describes: `"10m"`, `"0 9 * * mon"`, or an object in the form of `rule_shape`.

    Raises:
        ScheduleTimeError: The value is not a rule.
    """
    if isinstance(given, str):
        return Cron(given) if " " in given.strip() else Every(given)
    if isinstance(given, Mapping):
        options = {str(name): value for name, value in given.items() if value is not None}
        if "cron" in options and options.keys() <= _CRON_KEYS:
            expression = _string(options.pop("cron"), "every.expression", ScheduleTimeError)
            return Cron(expression, **_strings(options))
        if "interval" in options and options.keys() <= _EVERY_KEYS:
            interval = _string(options.pop("interval"), "every.interval", ScheduleTimeError, _DURATIONS)
            start = read_time(options.pop("start", None), "every.start")
            return Every(interval, start=start, **_strings(options))
    raise ScheduleTimeError("every", _shown(given), _RULES)


def _strings(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _string(value, f"every.{name}", ScheduleTimeError) for name, value in options.items()}


def _target(to: object) -> str:
    if to is None:
        raise TargetError("to", "missing", _TARGETS)
    return _string(to, "to", TargetError, _TARGETS)


def _optional_string(
    value: object, field: str, error: type[InputError | ConfigurationError], allowed: str = "a string"
) -> str | None:
    return None if value is None else _string(value, field, error, allowed)


def _string(value: object, field: str, error: type[InputError | ConfigurationError], allowed: str = "a string") -> str:
    if not isinstance(value, str):
        raise error(field, _shown(value), allowed)
    return value


def _bytes(text: object, encoded: object, name: str, error: type[InputError]) -> bytes | None:
    """Return the bytes given as text or as base64; None if neither is given."""
    if text is not None and encoded is not None:
        raise error(name, f"given as {name} and as {name}_base64", "one of the two")
    if encoded is not None:
        return _from_base64(encoded, f"{name}_base64", error)
    return None if text is None else _utf8(text, name, error)


def _headers(given: object) -> Mapping[str, bytes]:
    """Return headers as bytes. In JSON, a value is text or `{"base64": "..."}`."""
    if given is None:
        return NO_HEADERS
    if not isinstance(given, Mapping):
        raise HeaderError("headers", _kind(given), 'an object, such as {"source": "shop"}')
    return {name: _header(name, value) for name, value in given.items()}


def _header(name: str, value: object) -> bytes:
    field = f"value of header {shortened(name)}"
    if isinstance(value, Mapping) and value.keys() == {"base64"}:
        return _from_base64(value["base64"], field, HeaderError)
    return _utf8(value, field, HeaderError)


def _payload(written: msgspec.Raw | UnsetType, encoded: object) -> bytes | None:
    if written is UNSET and encoded is UNSET:
        raise PayloadTypeError("payload", "missing", "payload or payload_base64")
    text = b"null" if written is UNSET else bytes(written).strip()
    if encoded is not UNSET:
        return _bytes(_plain(text), encoded, "payload", PayloadTypeError)
    if text[:1] in (b"{", b"["):
        return text
    return None if text == b"null" else _utf8(_plain(text), "payload", PayloadTypeError)


def _checked_payload(payload: bytes | None, key: bytes | None, to: str) -> bytes | None:
    """Return the payload. Refuse null if the destination is a handler, or if there is no key."""
    if payload is None and to.startswith(f"{HANDLER_TARGET}:"):
        raise PayloadTypeError("payload", "null", "a string, an object or an array: a handler cannot take null")
    if payload is None and key is None:
        raise PayloadTypeError("payload", "null", "a string, an object or an array; null only with a key")
    return payload


def _plain(text: bytes) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError("payload", cut(json_problem(error), 120), "JSON") from None


def _utf8(value: object, name: str, error: type[InputError]) -> bytes:
    if not isinstance(value, str):
        allowed = "a string, an object or an array" if name == "payload" else "a string"
        raise error(name, _kind(value), f"{allowed}; bytes as base64")
    return value.encode()


def _from_base64(value: object, name: str, error: type[InputError]) -> bytes:
    if isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            pass
    got = "a string that is not base64" if isinstance(value, str) else _kind(value)
    raise error(name, got, "base64, padded")


def _kind(value: object) -> str:
    """Return the kind of a JSON value, for messages that must not show the value itself."""
    return _KINDS.get(type(value), "a number")


def _shown(value: object) -> str:
    """Return a string, a number, true or false as text for an error message; for other values, return their kind."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return shortened(value) if isinstance(value, str | int | float) else _kind(value)


def _conflict(given: object) -> Conflict:
    if given is None:
        return Conflict.replace()
    if isinstance(given, str):
        return read_conflict(given)
    if isinstance(given, Mapping) and given.keys() == {"newer"}:
        return Conflict.newer(_whole(given["newer"], "conflict.version", "an integer from 0 to 2**63-1"))
    if isinstance(given, Mapping) and given.keys() == {"if_revision"}:
        return Conflict.if_revision(_whole(given["if_revision"], "conflict.revision", "an integer from 0 to 2**48-1"))
    raise ConfigurationError("conflict", _shown(given), f'{CONFLICT_TEXTS}; {{"newer": 7}} or {{"if_revision": 7}}')


def _whole(value: object, field: str, allowed: str) -> int:
    if type(value) is not int:
        raise ConfigurationError(field, _shown(value), allowed)
    return value


def _late(given: object) -> Late:
    if given is None or given == "deliver":
        return Late.deliver()
    if isinstance(given, Mapping) and len(given) == 1:
        ((action, after),) = given.items()
        if action in ("drop", "dead_letter"):
            after = _string(after, "late.after", ConfigurationError, _DURATIONS)
            return Late.drop(after) if action == "drop" else Late.dead_letter(after)
    raise ConfigurationError("late", _shown(given), _LATES)

"""`read_request`: reads a request in the delay box's topic, JSON `{"topic", "message", "countdown"}`.

The published form of such requests has only these three fields and the header `CALLER_SERVICE`. aiodelay adds `at`,
`id`, `key` and `headers`, and the header `aiodelay-conflict`. An unclear request is refused, never guessed. This module
is pure. docs/delay-box.md has a table of the fields.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

import msgspec

from aiodelay.backends.kafka.records import SINK, Headers, check_names, is_topic, user_headers
from aiodelay.core.conflict_text import read_conflict
from aiodelay.core.durations import MAX_HORIZON_MS, check_horizon, parse_instant, to_epoch_ms
from aiodelay.core.transitions import NO_OP
from aiodelay.core.validation import check_headers, check_id, check_key, check_payload_size
from aiodelay.core.values import CONFLICT_MODES, After, At, Conflict, ConflictMode, Envelope, Put
from aiodelay.errors import ConfigurationError, InputError, RecordFormatError, cut, shortened

__all__ = ["CONFLICT", "FIELDS", "NEVER_REFUSED", "BadRequestError", "Rules", "read_request"]

CONFLICT = "aiodelay-conflict"
"""The header of a request that names a conflict rule, such as `debounce:5s:1m`."""
NEVER_REFUSED: Collection[ConflictMode] = CONFLICT_MODES - {"error", "newer", "if_revision", "append"}
"""The conflict modes that refuse no message. Nobody would learn of a refusal."""
FIELDS = ("topic", "message", "countdown", "at", "id", "key", "headers")
_KNOWN = frozenset(FIELDS)
_MOST_S = MAX_HORIZON_MS // 1000


class BadRequestError(Exception):
    """A request is refused. The text says why."""


class Rules(NamedTuple):
    """The rules for requests.

    Attributes:
        allowed: The topics to which messages may go.
        from_arrival: Whether a countdown begins when the record is read. If not, it begins when the record was written.
        max_payload: Most bytes of a message.
        conflicts: The conflict modes that a request may name.
    """

    allowed: Collection[str]
    from_arrival: bool
    max_payload: int
    conflicts: Collection[ConflictMode] = NEVER_REFUSED


class _Object(list[tuple[str, Any]]):
    """A JSON object as a list of pairs, so that a repeated name is noticed."""


class _Message(msgspec.Struct):
    message: msgspec.Raw


def read_request(
    value: bytes | None,
    headers: Headers,
    rules: Rules,
    *,
    own_id: str,
    written_ms: int,
    now_ms: int,
) -> Put:
    """Return the put that a request asks for.

    Args:
        value: The record's value.
        headers: The record's headers. The message gets all of them except the headers that a delivery adds.
        rules: The rules for requests.
        own_id: The message's id if the request has none.
        written_ms: The record's timestamp, epoch ms; negative if it has none.
        now_ms: The store's time.

    Raises:
        BadRequestError: The request is refused. Its text never contains the message.
    """
    given = _fields(value)
    topic = _topic(given, rules.allowed)
    try:
        conflict = _conflict(headers, given, rules.conflicts)
        if conflict.quiet_ms is None:
            due = _due(given, from_arrival=rules.from_arrival, written_ms=written_ms, now_ms=now_ms)
        else:
            due = _after(conflict.quiet_ms, given)
        payload = _payload(given, value or b"")
        check_payload_size(payload, rules.max_payload)
        message_id = own_id if given.get("id") is None else _id(given["id"])
        check_names(headers)
        travelling = check_headers(dict(user_headers(headers)) | _headers(given))
        envelope = Envelope(message_id, SINK, topic, payload=payload, key=_key(given), headers=travelling)
    except (InputError, ConfigurationError, RecordFormatError) as error:
        raise BadRequestError(str(error)) from error
    except UnicodeEncodeError:
        raise BadRequestError("a text in it cannot be written as UTF-8 (a lone surrogate)") from None
    return Put(NO_OP, envelope, due, conflict)


def _conflict(headers: Headers, given: Mapping[str, Any], known: Collection[ConflictMode]) -> Conflict:
    named = [value or b"" for name, value in headers if name == CONFLICT]
    if not named:
        return Conflict.replace()
    conflict = read_conflict(named[-1].decode(errors="backslashreplace"))
    if conflict.mode not in known:
        allowed = ", ".join(sorted(known))
        raise BadRequestError(f"its conflict rule is {conflict.mode}; here a request may have: {allowed}")
    if given.get("id") is None:
        raise BadRequestError("it has a conflict rule and no id")
    return conflict


def _after(quiet_ms: int, given: Mapping[str, Any]) -> After:
    if given.get("countdown") is not None or given.get("at") is not None:
        raise BadRequestError("it has countdown or at, and the conflict rule debounce gives the due time")
    return After(quiet_ms)


def _fields(value: bytes | None) -> Mapping[str, Any]:
    if value is None:
        raise BadRequestError("it has no value")
    names = _flat_fields(value)
    if names is None:
        try:
            found = _decoder.decode(value.decode())
        except (ValueError, RecursionError) as error:  # errors of JSON and of UTF-8
            raise BadRequestError(f"its value is no JSON text: {_in_words(error)}") from None
        if not isinstance(found, _Object):
            raise BadRequestError(f"its value is {_kind(found)}, not a JSON object")
        names = _once(found, "it")
    for name in names.keys() - _KNOWN:
        raise BadRequestError(f"it has a field {shortened(name)}; the known fields are {', '.join(FIELDS)}")
    return names


def _flat_fields(value: bytes) -> Mapping[str, Any] | None:
    """Return the fields if each value is a text, a whole number or null. Return None for any other JSON.

    Most requests have this form, and msgspec reads it several times as fast. msgspec does not notice a repeated name.
    But then the value has more quotation marks than the names and texts that msgspec returns.
    """
    try:
        found = _flat_decoder.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    texts = len(found) + [*map(type, found.values())].count(str)
    return found if value.count(b'"') == 2 * texts else None


def _refuse_constant(name: str) -> None:
    raise BadRequestError(f"its value is no JSON text: it contains {name}")


def _exact(number: str) -> Decimal:
    try:
        return Decimal(number)
    except InvalidOperation:  # The exponent has more digits than Decimal takes. The number is too large, or nearly 0.
        return Decimal(float(number))


_flat_decoder = msgspec.json.Decoder(dict[str, str | int | None])
_decoder = json.JSONDecoder(object_pairs_hook=_Object, parse_float=_exact, parse_constant=_refuse_constant)


def _in_words(error: ValueError | RecursionError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]


def _once(pairs: _Object, what: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRequestError(f"{what} has the field {shortened(twice)} more than once")
    return found


def _kind(value: object) -> str:
    """Name the type of a JSON value."""
    if isinstance(value, _Object):
        return "an object"
    names = {type(None): "null", bool: "a boolean", str: "a text", list: "an array"}
    return names.get(type(value), "a number")


def _topic(given: Mapping[str, Any], allowed: Collection[str]) -> str:
    topic = given.get("topic")
    if not isinstance(topic, str):
        raise BadRequestError("it has no topic" if topic is None else f"its topic is {_kind(topic)}, not a text")
    if topic in allowed:
        return topic
    if not is_topic(topic):
        raise BadRequestError(f"its topic {shortened(topic)} cannot be the name of a topic")
    raise BadRequestError(f"its topic {topic} is not allowed")


def _due(given: Mapping[str, Any], *, from_arrival: bool, written_ms: int, now_ms: int) -> At | After:
    countdown, at = given.get("countdown"), given.get("at")
    if (countdown is None) == (at is None):
        got = "neither countdown nor at" if at is None else "both countdown and at"
        raise BadRequestError(f"it has {got}; allowed: exactly one of them")
    if countdown is None:
        due_ms = _instant_ms(at)
        check_horizon(due_ms, now_ms, "at")
        return At(max(due_ms, 0))
    delay_ms = _countdown_ms(countdown)
    if from_arrival or written_ms < 0:
        return After(delay_ms)
    check_horizon(written_ms + delay_ms, now_ms, "the record's time plus its countdown")
    return At(written_ms + delay_ms)


def _countdown_ms(countdown: object) -> int:
    """Return seconds as ms, rounded up, from the exact decimal number in the request."""
    if isinstance(countdown, bool) or not isinstance(countdown, int | Decimal):
        raise BadRequestError(f"its countdown is {_kind(countdown)}, not a number of seconds")
    if not 0 <= countdown <= _MOST_S:
        raise BadRequestError(f"its countdown is {cut(f'{countdown}')}, not 0 to {_MOST_S} seconds")
    return countdown * 1000 if isinstance(countdown, int) else _ceiling(countdown)


def _ceiling(seconds: Decimal) -> int:
    ms = int(seconds.scaleb(3))
    return ms + (ms < seconds.scaleb(3))


def _instant_ms(at: object) -> int:
    if not isinstance(at, str):
        raise BadRequestError(f"its at is {_kind(at)}, not a text such as 2027-01-01T12:00:00Z")
    return to_epoch_ms(parse_instant(at, field="at"), field="at")


def _id(given: object) -> str:
    if not isinstance(given, str):
        raise BadRequestError(f"its id is {_kind(given)}, not a text")
    return check_id(given)


def _payload(given: Mapping[str, Any], value: bytes) -> bytes:
    """Return the message: a text as UTF-8, or the JSON text of an object or an array exactly as in the record."""
    message = given.get("message")
    if isinstance(message, str):
        return message.encode()
    if not isinstance(message, list):
        got = "no message" if "message" not in given else f"{_kind(message)} as message"
        raise BadRequestError(f"it has {got}; allowed: a text, an object or an array")
    try:
        return bytes(msgspec.json.decode(value, type=_Message).message)
    except (msgspec.DecodeError, RecursionError):
        raise BadRequestError("its message is no JSON text, or it is nested too deeply") from None


def _key(given: Mapping[str, Any]) -> bytes | None:
    key = given.get("key")
    if key is not None and not isinstance(key, str):
        raise BadRequestError(f"its key is {_kind(key)}, not a text")
    return None if key is None else check_key(key.encode())


def _headers(given: Mapping[str, Any]) -> dict[str, bytes]:
    headers = given.get("headers")
    if headers is None:
        return {}
    if not isinstance(headers, _Object):
        raise BadRequestError(f"its headers are {_kind(headers)}, not an object of texts")
    found = _once(headers, "headers")
    for name, value in found.items():
        if not isinstance(value, str):
            raise BadRequestError(f"its header {shortened(name)} is {_kind(value)}, not a text")
    return {name: value.encode() for name, value in found.items()}

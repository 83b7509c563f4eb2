"""Tables of bad inputs for the doors that share them: the input, where it enters, and what is said of it.

docs/promises-and-tests.md lists these tables beside those that belong to one door alone.
"""

from __future__ import annotations

import json
from typing import Any

from aiodelay.backends.kafka import records as kafka
from aiodelay.backends.redis.records.elements import encode_element
from aiodelay.core.record_codec import encode_record
from aiodelay.core.record_format import PREFIX
from aiodelay.core.validation import RESERVED_HEADERS
from aiodelay.core.values import Delivery, Envelope, Record
from tests.support.clear_errors import SECRETS

__all__ = [
    "BAD_MESSAGES",
    "GOOD_MESSAGE",
    "KAFKA_OWN_RECORDS",
    "KAFKA_RECORDS",
    "LIST_ELEMENTS",
    "MISSING",
    "NO_MESSAGES",
    "REDIS_RECORDS",
    "changed",
]

PAYLOAD, HEADER, KEY, _ = SECRETS
DEEP = 50_000
"""More nested values than a decoder follows."""

# --- JSON: the HTTP API and the lines of the command `schedule` ---------------------------------------------

MISSING = object()
LATER = "2027-01-01T00:00:00Z"
GOOD_MESSAGE: dict[str, Any] = {
    "to": "handler:work",
    "payload": PAYLOAD,
    "delay": "1s",
    "id": "order-7",
    "key": KEY,
    "headers": {"authorization": HEADER},
}
BAD_MESSAGES: list[tuple[dict[str, Any], str, str, str]] = [
    # the change of a good message: the error, the field that it names, and a part of its text about allowed values
    ({"delay": MISSING, "at": "2027-01-01T00:00:00"}, "ScheduleTimeError", "at", "with an offset"),
    ({"delay": MISSING}, "ScheduleTimeError", "at, delay, every", "exactly one"),
    ({"at": LATER}, "ScheduleTimeError", "at, delay, every", "exactly one"),
    ({"every": "10m"}, "ScheduleTimeError", "at, delay, every", "exactly one"),
    ({"delay": MISSING, "at": "tomorrow"}, "ScheduleTimeError", "at", "ISO 8601"),
    ({"delay": MISSING, "at": 1_900_000_000}, "ScheduleTimeError", "at", "ISO 8601"),
    ({"delay": MISSING, "at": "9999-01-01T00:00:00Z"}, "ScheduleTimeError", "at", "3650d"),
    ({"delay": MISSING, "every": "1ms"}, "ScheduleTimeError", "every.interval", "100ms"),
    ({"delay": MISSING, "every": "* * * *"}, "ScheduleTimeError", "every.expression", "five"),
    ({"delay": MISSING, "every": {"cron": "0 9 * * mon", "tz": "Mars"}}, "ScheduleTimeError", "every.tz", "zone"),
    ({"delay": MISSING, "every": {"cron": "0 0 30 2 *"}}, "ScheduleTimeError", "every.expression", "five"),
    ({"delay": MISSING, "every": []}, "ScheduleTimeError", "every", "10m"),
    ({"delay": MISSING, "every": {"interval": 5}}, "ScheduleTimeError", "every.interval", "a string"),
    (
        {"delay": MISSING, "every": {"interval": "1h", "start": "2027-01-01T00:00:00"}},
        "ScheduleTimeError",
        "every.start",
        "with an offset",
    ),
    *[({"delay": each}, "ScheduleTimeError", "delay", "") for each in ("-1s", "soon", "NaN", "inf", "1e9s", "")],
    *[({"delay": each}, "ScheduleTimeError", "delay", "a string") for each in (5, 1.5, True, [1], {"s": 1})],
    ({"delay": "3651d"}, "ScheduleTimeError", "delay", "3650d"),
    ({"payload": MISSING}, "PayloadTypeError", "payload", "payload_base64"),
    *[({"payload": each}, "PayloadTypeError", "payload", "a string") for each in (1, 1.5, True)],
    ({"payload": None}, "PayloadTypeError", "payload", "a handler cannot take null"),
    ({"payload": None, "key": MISSING, "to": "elsewhere:x"}, "PayloadTypeError", "payload", "with a key"),
    ({"payload_base64": "AA=="}, "PayloadTypeError", "payload", "one of the two"),
    ({"payload": MISSING, "payload_base64": "%"}, "PayloadTypeError", "payload_base64", "base64"),
    ({"payload": "x" * 262_145}, "PayloadTooLargeError", "payload", "262144"),
    *[({"id": each}, "MessageIdError", "id", "") for each in ("", "\n", "\x00", "x" * 256, "a~1234567890123")],
    *[({"id": each}, "MessageIdError", "id", "a string") for each in (7, [1], {"a": 1})],
    ({"headers": {"a b": "1"}}, "HeaderError", "header name", "A-Z"),
    ({"headers": {"a\r\nb": "1"}}, "HeaderError", "header name", "A-Z"),
    ({"headers": {"aiodelay-x": "1"}}, "HeaderError", "header 'aiodelay-x'", "names that do not begin with"),
    *[
        ({"headers": {each: "1"}}, "HeaderError", f"header '{each}'", "names except scheduler-epoch, ")
        for each in RESERVED_HEADERS
    ],
    ({"headers": {"a": 1}}, "HeaderError", "value of header 'a'", "a string"),
    ({"headers": {str(n): "" for n in range(65)}}, "HeaderError", "headers", "64"),
    ({"headers": {"a": "x" * 16_385}}, "HeaderError", "headers", "16384"),
    ({"headers": []}, "HeaderError", "headers", "an object"),
    ({"key": 7}, "HeaderError", "key", "a string"),
    ({"key": "x" * 16_385}, "HeaderError", "key", "16384"),
    ({"key_base64": "AA=="}, "HeaderError", "key", "one of the two"),
    ({"to": MISSING}, "TargetError", "to", "<sink>:<address>"),
    *[({"to": each}, "TargetError", "to", "<sink>:<address>") for each in (7, ["a"], {"a": 1})],
    ({"to": "handler:other"}, "TargetNotAllowedError", "to", "handler:work"),
    ({"to": "elsewhere:x"}, "UnknownSinkError", "the sink in to=", "handler:"),
    ({"conflict": "latest"}, "ConfigurationError", "conflict", "replace"),
    ({"conflict": {"newer": -1}}, "ConfigurationError", "conflict.version", "2**63-1"),
    ({"conflict": {"newer": True}}, "ConfigurationError", "conflict.version", "2**63-1"),
    ({"late": "never"}, "ConfigurationError", "late", "deliver"),
    ({"late": {"drop": "-1s"}}, "ConfigurationError", "late.after", ""),
    ({"late": {"drop": 5}}, "ConfigurationError", "late.after", "a string"),
    ({"late": {"x": "1s"}}, "ConfigurationError", "late", "deliver"),
    ({"conflict": {}}, "ConfigurationError", "conflict", "replace"),
    ({"dealy": "1s"}, "InputError", "field of message", "delay"),
]
NO_MESSAGES = [
    b"",
    b"\xff",
    b"[]",
    b'"x"',
    b"null",
    b"{",
    b'{"to": NaN}',
    b"[" * 100_000,
    b'{"payload": ' + b"[" * 100_000,
    json.dumps(GOOD_MESSAGE).encode() + b"x",
    json.dumps(GOOD_MESSAGE).encode("utf-16"),
    b"\xef\xbb\xbf" + json.dumps(GOOD_MESSAGE).encode(),
    b'{"id": "\\ud800"}',
    b'{"to": "handler:work", "delay": "1s", "payload": "\\ud800"}',
    b'{"to": "handler:work", "delay": "1s", "payload": "x", "conflict": {"newer": ' + b"1" * 5_000 + b"}}",
]


def changed(change: dict[str, Any]) -> bytes:
    """Return a good message as JSON, with some of its fields changed or left out."""
    fields = GOOD_MESSAGE | change
    return json.dumps({name: value for name, value in fields.items() if value is not MISSING}).encode()


# --- records of a schedules topic ----------------------------------------------------------------------------

KAFKA_RECORDS: dict[str, tuple[dict[str, bytes | None], str]] = {
    "text for epoch": ({"scheduler-epoch": b"tomorrow"}, "header scheduler-epoch is 'tomorrow', not a whole number"),
    "a fraction": ({"scheduler-epoch": b"1.5"}, "header scheduler-epoch is '1.5', not a whole number"),
    "negative": ({"scheduler-epoch": b"-1"}, "header scheduler-epoch is '-1', not a whole number"),
    "null epoch": ({"scheduler-epoch": None}, "header scheduler-epoch is null, not a whole number"),
    "no epoch": ({"scheduler-epoch": b""}, "header scheduler-epoch is '', not a whole number"),
    "ms": ({"scheduler-epoch": b"1893499200001"}, "header scheduler-epoch is too large: it counts seconds"),
    "huge": ({"scheduler-epoch": b"9" * 5000}, "not a whole number"),
    "null topic": (
        {"scheduler-target-topic": None},
        "header scheduler-target-topic is '', which is not a topic's name",
    ),
    "no topic's name": ({"scheduler-target-topic": b"a/b"}, "header scheduler-target-topic is 'a/b', which is not"),
    "Kafka's own": ({"scheduler-target-topic": b"__consumer_offsets"}, "which is not a topic's name"),
    "later": ({"aiodelay-format": b"2"}, "its format is 2, and this version reads formats up to 1"),
    "pickle": ({"aiodelay-encoding": b"pickle"}, "its encoding 'pickle' is unknown"),
    "due": ({"aiodelay-due-ms": b"0x1"}, "header aiodelay-due-ms is '0x1', not a whole number"),
    "rule": ({"aiodelay-rule": b"not JSON"}, "header aiodelay-rule is not JSON"),
    "no rule of ours": ({"aiodelay-rule": b'{"kind": "moon"}'}, "its recurrence rule a dict is not valid"),
    "deep rule": ({"aiodelay-rule": b"[" * DEEP}, "header aiodelay-rule is not JSON"),
    "deep trace": ({"aiodelay-trace": b'{"a":' * DEEP}, "header aiodelay-trace is not JSON"),
    "op": ({"aiodelay-op": b"\xff"}, "header aiodelay-op is not 16 hexadecimal digits"),
    "version": ({"aiodelay-version": b"-1"}, "header aiodelay-version is '-1', not a whole number"),
    "expiry": ({"aiodelay-expires-ms": b"never"}, "header aiodelay-expires-ms is 'never', not a whole number"),
    "forged attempt": (
        {"aiodelay-from": b"0", "aiodelay-attempt": b"many"},
        "header aiodelay-attempt is 'many', not a whole number",
    ),
    "forged retries": ({"aiodelay-from": b"0", "aiodelay-live": b'["a"]'}, "is not a list of due times"),
}
"""Headers that a program of another writes, and a part of the dead letter's error."""

KAFKA_OWN_RECORDS: list[tuple[bytes, bytes | None, dict[str, bytes | None]]] = [
    (kafka.INTAKE + b"box", b"9" * 5000, {}),
    (kafka.INTAKE + b"box", b"\xff", {}),
    (kafka.INTAKE, b"-1", {}),
    (kafka.MARK, b"[" * DEEP, {}),
    (kafka.MARK, b"\xff", {}),
    (kafka.PARTITIONS, b"9" * 5000, {}),
    (kafka.PARTITIONS, b"many", {}),
    (kafka.BARRIER, b"\xff", {}),
    (kafka.HOLD + b"[" * DEEP, b"1", {}),
    (kafka.HOLD + b'["a"]', b"1", {}),
    (kafka.FEATURE + b"\xff", b"1", {}),
    (kafka.DEAD + b"1/m", b"", {}),
    (kafka.DEAD + b"x/m", b"", {}),
    (kafka.AGAIN + b"9" * 99 + b"/m", b"", {}),
    (kafka.AGAIN + b"1/" + kafka.AGAIN + b"1/m", b"", {}),
    (kafka.KEEP + b"m", b"", {kafka.CANCEL: b"1"}),
    (kafka.KEEP + b"m", b"", {kafka.CANCEL: b"9" * 99 + b"/1"}),
    (kafka.KEEP + b"m", None, {kafka.READ_TO: b"9" * 5000}),
    (kafka.KEEP, b"", {}),
    (b"m", None, {kafka.READ_TO: b"-1"}),
    (b"m", None, {kafka.MEMORY: b"[" * DEEP}),
    (b"m", None, {kafka.MEMORY: b'{"answers": [["zz", "s", 1, 2, 3]]}'}),
    (b"x" * 256, b"", {}),
    (b"", b"", {}),
]
"""Records that look like those of aiodelay itself. Key, value and headers; each is passed over."""

# --- Redis ---------------------------------------------------------------------------------------------------


def element(message_id: str) -> bytes:
    envelope = Envelope(message_id, "redis-list", "x", payload=b"payload")
    return encode_element(Delivery(envelope, "", 1000, 5, 1, 0)) + (2000).to_bytes(8, "big")


GOOD = element("good")
LIST_ELEMENTS = {
    "garbage": b"garbage",
    "empty": b"",
    "an id alone": b"\xc4\x02\x02m",
    "cut short": GOOD[:-12],
    "something behind": GOOD + b"\x00",
    "a newer format": GOOD.replace(b'\xc4"\x01', b'\xc4"\x63'),
    "text for the prefix": GOOD.replace(b'\xc4"', b'\xd9"'),
    "json": b'{"id": 1}',
    "a huge length": b"\xc5\xff\xff",
    "a series": encode_element(Delivery(Envelope("s", "l", rule=None, payload=b"p"), "", 1, 1, 1, 0)).replace(
        b'\xc4"\x01\x00', b'\xc4"\x01\x01'
    )
    + bytes(8),
    "nested deeply": GOOD[: -11 - len(b"\xa1p\xc4\x07payload")] + b"\xa1z" + b"\x91" * DEEP,
    "an id nested deeply": b"\xc5\xc3\x50" + b"\x03" * DEEP + GOOD[7:],
    "nothing but arrays": b"\x91" * DEEP,
}
"""Elements that another program has pushed to a list."""

_WRITTEN = encode_record(Record(Envelope("m", "work", payload=b"p"), 1, 1000, bytes(8)), 1)
REDIS_RECORDS: dict[str, bytes] = {
    "none": b"",
    "garbage": b"garbage",
    "a newer format": b"\x63" + _WRITTEN[1:],
    "cut short": _WRITTEN[:-1],
    "more behind": _WRITTEN + b"\x00",
    "no MessagePack": _WRITTEN[: PREFIX.size] + b"\xc1" * 9,
    "no map": _WRITTEN[: PREFIX.size] + b"\xc0",
    "a payload that is text": _WRITTEN[: PREFIX.size] + b"\x81\xa1p\xa1p",
    "a payload of 4 GiB": _WRITTEN[: PREFIX.size] + b"\x81\xa1p\xc6\xff\xff\xff\xff",
    "a field nested deeply": _WRITTEN[: PREFIX.size] + b"\x81\xa1z" + b"\x91" * DEEP,
    "a trace of 3 bytes": _WRITTEN[: PREFIX.size] + b"\x81\xa1c\xc4\x03abc",
}
"""Records that another program has written into the key `msg`, behind the sequence number of the message."""

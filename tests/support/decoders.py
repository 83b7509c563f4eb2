"""Every decoder of bytes or text that another program may have written, in one form for the tests that fuzz them.

A decoder returns a value or raises one of its documented errors, whatever the bytes are. If it has an encoder, the
decoder reads back an equal value from the encoder's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec

from aiodelay import Cron, Every, Limit
from aiodelay.backends.kafka import records as kafka
from aiodelay.backends.kafka.records import Kind
from aiodelay.backends.kafka.topics.requests import BadRequestError, Rules, read_request
from aiodelay.backends.redis.log.entries import read_entry, read_start
from aiodelay.backends.redis.records.elements import decode_element, encode_record_element
from aiodelay.backends.redis.records.reading import Lanes, read_anyhow, read_letter, read_record
from aiodelay.backends.registry import open_sink, open_source, open_store
from aiodelay.core.conflict_text import read_conflict
from aiodelay.core.durations import format_duration, parse_duration, parse_instant, to_epoch_ms
from aiodelay.core.rates import parse_rate
from aiodelay.core.record_codec import decode_columns, decode_record, decode_trace, encode_record, encode_trace
from aiodelay.core.record_format import FIELDS, body_keys
from aiodelay.core.recurrence import decode_rule, describe, encode_rule, next_due
from aiodelay.core.values import DeadLetter, Envelope, JournalEntry, LateAction, Put, Record
from aiodelay.errors import ConfigurationError, InputError, MissingExtraError, RecordFormatError, masked_url
from aiodelay.importers import black_box, etf1, fred84
from aiodelay.importers.put_all import SkippedError
from aiodelay.operations.json_shapes import read_message, read_rule, record_shape, rule_shape
from aiodelay.operations.json_shapes import read_record as read_shape
from aiodelay.service.api.cursors import read_cursor, write_cursor
from aiodelay.service.reading import read_configuration
from aiodelay.testing import history as h
from tests.support.bad_requests import ARTICLE, BAD
from tests.support.clear_errors import PASSWORD

__all__ = ["CORPUS", "DECODERS", "Decoder", "texts_of"]

CORPUS = Path(__file__).parents[1] / "fixtures" / "decoders"
"""Inputs that once broke a decoder, or that reach code which random bytes rarely reach: a folder for each decoder."""

Error = tuple[type[Exception], ...]
REFUSED: Error = (ConfigurationError, InputError)
NOW_MS, OP = 1_893_456_000_000, bytes(range(8))


class Decoder(NamedTuple):
    """A decoder.

    Attributes:
        decode: Reads bytes.
        errors: The errors that it may raise.
        samples: Inputs that it accepts.
        encode: Returns bytes that are read back as an equal value, or None if there is no encoder for the value.
    """

    decode: Callable[[bytes], object]
    errors: Error
    samples: Sequence[bytes]
    encode: Callable[[Any], bytes | None] = lambda value: None


def text(data: bytes) -> str:
    """Return bytes as a text that may hold lone surrogates."""
    return data.decode("utf-8", "surrogateescape")


def texts_of(*samples: str) -> list[bytes]:
    return [each.encode("utf-8", "surrogatepass") for each in samples]


# --- records ----------------------------------------------------------------------------------------------


def lane(number: int) -> str:
    return f"lane{number}"


RULE: dict[str, str | int] = {"c": "0 9 * * MON", "z": "Europe/Paris"}
RECORDS = [
    Record(Envelope("m", lane(7), payload=b"p"), 3, NOW_MS, OP),
    Record(
        Envelope("m", lane(0), "a", "Pay", "json", b"{}", b"k", {"h": b"v"}, {"baggage": "x"}, 1 << 63, RULE),
        (1 << 48) - 1,
        (1 << 48) - 1,
        OP,
        NOW_MS,
        LateAction.DEAD_LETTER,
        attempt=65_535,
        lapses=255,
        kills=255,
        alone=True,
        no_retry=True,
        live=(NOW_MS,),
        first_error="e",
        last_error="f",
        earlier_errors=("g",),
        traceback="t",
        put_due_ms=5,
        debounced_ms=6,
    ),
    Record(Envelope("m", lane(1)), 3, NOW_MS, OP, appended=b"more", appended_due_ms=9),
]
WRITTEN = [encode_record(each, int(each.envelope.lane[4:])) for each in RECORDS]
COLUMNS = [*body_keys(FIELDS), "lane", "late", "version", "revision", "due_ms"]
TRACES = [{"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}, {"tracestate": "a=b"}]
LANES = Lanes({"work": 7})


def columns(data: bytes) -> object:
    """Read the columns of a record alone, and beside a good one."""
    decode_columns([WRITTEN[0], data], 0, COLUMNS)
    return decode_columns([data], 0, COLUMNS)


def pushed(record: Record) -> bytes:
    """Return an element as a script pushes it: with a time."""
    return encode_record_element(record) + bytes(8)


def element(data: bytes) -> Record:
    return decode_element(data, lane="work").record


def of_redis(data: bytes) -> tuple[object, ...]:
    """Read an encoded id and a value of the key `msg` in each way in which the store reads them."""
    size = data[0] if data else 0
    member, value = data[1 : 1 + size], data[1 + size :]
    found = read_anyhow(member, value, LANES)
    read_letter(member + bytes(6), value, 0, LANES)
    return found[0], read_record(member, value, LANES)


def log_entry(data: bytes) -> object:
    return read_entry("topic", [b"0-7", [b"m", data]])


def plain_entry(data: bytes) -> object:
    """Read an entry that another program has appended field by field. A zero byte is between two parts."""
    parts = data.split(b"\x00")
    return read_entry("topic", [b"0-7", parts[: len(parts) // 2 * 2]])


# --- Kafka ------------------------------------------------------------------------------------------------


class OfKafka(NamedTuple):
    """A record of a topic. Names of headers are bytes, because a client may write any bytes."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[bytes, bytes | None]]

    @property
    def given(self) -> list[tuple[str, bytes | None]]:
        return [(text(name), value) for name, value in self.headers]


def packed(key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]) -> bytes:
    named = [(name.encode("utf-8", "surrogateescape"), each) for name, each in headers]
    return msgspec.msgpack.encode(OfKafka(key, value, named))


def unpacked(data: bytes) -> OfKafka:
    """Return the record of a topic in bytes of `packed`; for other bytes, a record whose parts are all these bytes."""
    try:
        return msgspec.msgpack.decode(data, type=OfKafka)
    except (ValueError, RecursionError):
        return OfKafka(data, data, [(name, data) for name in (b"scheduler-epoch", b"scheduler-target-topic")])


def record_of_topic(data: bytes) -> Record | DeadLetter | None:
    """Read a record of a schedules topic as its readers do: first the facts, then the parts that these lead to."""
    key, value, _ = record = unpacked(data)
    headers = record.given
    seen = kafka.glance(key, value, headers)
    kafka.memory_of(headers)
    kafka.answer_of(key, value, headers)
    kafka.asked_op(key, value, headers)
    kafka.mark_of(value)
    kafka.partitions_in(value)
    if key is None:
        return None
    kafka.partition_of(key, 6)
    kafka.position_in(key, value)
    kafka.feature_in(key, value)
    kafka.held_in(key)
    if seen.kind is Kind.DEAD and value is not None:
        kafka.dead_key_of(key)
        return kafka.decode_dead(key, value, headers)
    if seen.kind is not Kind.PUT or value is None:
        return None
    if not key.startswith(kafka.KEEP):
        return kafka.decode(key, value, headers, written_ms=1)
    plain = key.removeprefix(kafka.KEEP)
    if kafka.asked_cancel(plain, headers) is not None:
        return None
    kafka.asked_back(plain, value, headers, place_ms=1)
    kafka.kept_put(plain, value, headers, written_ms=1)
    return None


def written_to_topic(found: Record | DeadLetter | None) -> bytes | None:
    if found is None:
        return None
    if isinstance(found, DeadLetter):
        return packed(*kafka.encode_dead(found))
    return packed(*kafka.encode_record(found, read_to=7))


def history(data: bytes) -> JournalEntry | None:
    return kafka.decode_history(data, 7)


def received(data: bytes) -> Envelope:
    record = unpacked(data)
    return kafka.received("id", "work", record.key, record.value, record.given)


ENTRY = JournalEntry(7, NOW_MS, "stored", "m", 3, "work", NOW_MS, 1, "")
TO = [("scheduler-epoch", b"1893456000"), ("scheduler-target-topic", b"orders")]
OF_TOPIC = [
    *(packed(*kafka.encode_record(replaced, read_to=7)) for replaced in RECORDS),
    packed(*kafka.encode_dead(DeadLetter(RECORDS[1], "attempts_exhausted", NOW_MS))),
    packed(*kafka.encode_keep(RECORDS[0])),
    packed(b"m", b"p", [*TO, ("x", b"1"), ("aiodelay-version", b"7")]),
    packed(b"m", None, []),
    packed(*kafka.encode_hold("work", "a", is_held=True)),
    packed(*kafka.encode_feature("shards", "0.1.0")),
    packed(*kafka.encode_position("box", 7)),
    packed(kafka.MARK, b"{}", []),
    packed(kafka.PARTITIONS, b"6", []),
    packed(kafka.KEEP + b"m", b"", [(kafka.CANCEL, b"3/1893456000000")]),
    packed(kafka.KEEP + b"m", None, [(kafka.OUTCOME, b"cancelled"), (kafka.READ_TO, b"7")]),
    packed(b"m", None, [(kafka.MEMORY, b'{"answers": [["00", "s", 1, 2, 3]], "version": [1, 2]}')]),
]

# --- requests and messages --------------------------------------------------------------------------------

MESSAGE = (
    b'{"to": "handler:work", "payload": {"a": [1, "\\u00e9"]}, "delay": "1h30m", "id": "m", "key": "k",'
    b' "headers": {"a": "b", "c": {"base64": "AA=="}}, "conflict": {"newer": 7}, "late": {"drop": "5m"}}'
)
MESSAGES = [
    MESSAGE,
    b'{"to": "kafka:t", "payload_base64": "AA==", "at": "2030-01-01T00:00:00Z", "key_base64": "AA=="}',
    b'{"to": "kafka:t", "payload": null, "key": "k", "every": {"cron": "0 9 * * mon", "tz": "Europe/Paris"}}',
    b'{"to": "kafka:t", "payload": "x", "every": {"interval": "10m", "start": "2030-01-01T00:00:00Z"}, "spread": "1m"}',
]


def request(data: bytes) -> object:
    """Read a request of a delay box: a record, or the value of one."""
    try:
        _, value, headers = msgspec.msgpack.decode(data, type=OfKafka)
    except (ValueError, RecursionError):
        value, headers = data, []
    given = [(text(name), each) for name, each in headers]
    rules = Rules({"T"}, from_arrival=False, max_payload=1000)
    return read_request(value, given, rules, own_id="own", written_ms=NOW_MS, now_ms=NOW_MS)


def shape(data: bytes) -> Record | None:
    try:
        found = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return None
    return read_shape(found) if isinstance(found, dict) else None


def shaped(record: Record | None) -> bytes | None:
    """Return the shape, or None for a record with only one of appended items and their due time. No store makes one."""
    if record is None or (record.appended is None) is not (record.appended_due_ms is None):
        return None
    return msgspec.json.encode(record_shape(record))


def json_rule(data: bytes) -> Every | Cron | None:
    try:
        found = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return None
    return read_rule(found)


def stored_rule(data: bytes) -> Every | Cron | None:
    """Read a rule as a store has it, and look for its next due times."""
    try:
        found = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return None
    rule = decode_rule(found)
    for due_ms in (0, NOW_MS, 253_402_300_799_999):
        next_due(rule, due_ms, due_ms)
    describe(rule)
    return rule


def cursor(data: bytes) -> tuple[int, str, bytes] | None:
    return read_cursor(text(data), tuple[int, str, bytes])


# --- imports ----------------------------------------------------------------------------------------------


def of_black_box(data: bytes) -> Put:
    """Read a member of the zset, its score and its content. A zero byte is between two parts."""
    member, score, content = (*data.split(b"\x00", 2), b"", b"")[:3]
    due_ms = black_box._due_ms(number(score), 1_000, NOW_MS)
    return black_box._put_of(member, content, due_ms, {"orders"})


def of_fred84(data: bytes) -> Put:
    """Read an event of a list, and the same event with a score. A zero byte is between the score and the event."""
    score, _, value = data.partition(b"\x00")
    key = fred84._key_of(value)
    fred84._put_of(fred84._Found(key, None, value), fred84.simple_name)
    return fred84._put_of(fred84._Found(key, number(score), value), fred84.simple_name)


def of_etf1(data: bytes) -> list[Put]:
    record, skipped = unpacked(data), dict[str, str]()
    found = {record.key or b"": etf1._Newest(NOW_MS, record.value, record.given)}
    puts = list(etf1._puts(found, skipped))
    assert len(puts) + len(skipped) == 1
    return puts


def number(score: bytes) -> float:
    """Return a score of Redis. Redis has only scores that are numbers, and these may be infinite."""
    try:
        found = float(score)
    except ValueError:
        return 0.0
    return 0.0 if isnan(found) else found


# --- texts ------------------------------------------------------------------------------------------------


def cron(data: bytes) -> Cron:
    rule = Cron(text(data))
    next_due(rule, NOW_MS, NOW_MS)
    describe(rule)
    return rule


def instant(data: bytes) -> int:
    return to_epoch_ms(parse_instant(text(data), field="at"), field="at")


def limit(data: bytes) -> Limit | None:
    """Make a limit of three JSON values."""
    try:
        found = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return None
    return Limit(*found) if isinstance(found, list) and len(found) == 3 else None


def url(data: bytes) -> None:
    """Open the store, the sink or the source of a URL. No error, no name and no `repr` shows its password."""
    given = text(data)
    shown = [masked_url(given)]
    for opened in (partial(open_store, namespace="default", clock=None), open_sink, open_source):
        try:
            found: object = opened(given)
        except (ConfigurationError, InputError, MissingExtraError) as error:
            shown += [f"{error}", repr(error)]
        else:
            shown += [repr(found), f"{getattr(found, 'name', '')}"]
    has_password = f":{PASSWORD}@host" in given
    assert not [each for each in shown if not each.isprintable() or (has_password and f":{PASSWORD}@" in each)]


def settings(data: bytes) -> None:
    """Read a settings file."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "aiodelay.toml")
        file.touch(mode=0o600)
        file.write_bytes(data)
        read_configuration(file).settings()


def recorded(data: bytes) -> list[h.Event]:
    """Read a recorded history, check it, and print what the checker has found."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "history.jsonl")
        file.write_bytes(data)
        events = h.read(file)
    list(h.check(events).lines())
    return events


def told(events: Sequence[h.Event]) -> bytes:
    return b"\n".join(map(msgspec.json.encode, events))


def told_at_once(events: Sequence[h.Event]) -> bytes:
    for event in events:
        event.process, event.at_ns, event.wall_ms = "p", 7, NOW_MS
    return told(events)


TOLD = told_at_once(
    [
        h.Process(what="opened"),
        h.Invoked(call=1, op="schedule", id="m", digest="d", lane="x"),
        h.Returned(call=1, outcome="ok", answer="stored", revision=NOW_MS, due_ms=NOW_MS),
        h.Claiming(call=2),
        h.Claimed(call=2, now_ms=NOW_MS, claims=[h.ClaimNote("m", NOW_MS, NOW_MS, "x", 0, 1)]),
        h.RunStarted(id="m", delivery_id=f"m/{NOW_MS}/{NOW_MS}", attempt=1, lane="x", digest="d", token=1),
        h.Renewing(call=3, batch=[("m", 1, 2)]),
        h.Renewed(call=3, outcomes=["renewed"]),
        h.RunEnded(delivery_id=f"m/{NOW_MS}/{NOW_MS}", attempt=1, result="ok", token=1),
        h.PuttingBack(batch=[("m", NOW_MS)]),
        h.Settling(call=4, batch=[h.SettlingNote("m", NOW_MS, 2, "again")]),
        h.Settled(call=4, outcomes=["settled"]),
        h.Final(now_ms=NOW_MS, pending=[h.PendingNote("m", NOW_MS, "in_flight", NOW_MS)], dead=[]),
    ]
)

SETTINGS = b"""\
store = "sqlite:///delay.db"
namespace = "shop"
allowed_targets = ["handler:work", "kafka:orders"]
sinks = { kafka = { url = "kafka://localhost:9092" } }
[api]
host = "127.0.0.1"
port = 8080
[[api.tokens]]
name = "shop"
hash = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
scopes = ["read"]
[[intake]]
from = "kafka://localhost:9092/requests"
allow = ["orders"]
[limits]
max_payload = 1000
drain = "10s"
[log]
level = "debug"
"""

DECODERS: dict[str, Decoder] = {
    "import-black-box": Decoder(
        of_black_box, (SkippedError,), [b"m\x001893456000\x00" + b'{"topic": "orders", "message": {"a": [1, "x"]}}']
    ),
    "import-fred84": Decoder(
        of_fred84,
        (SkippedError,),
        [b"1893456000000\x00" + b'{"payload": {"id": 7}, "type": "a.Paid", "attempt": 1, "logContext": {"a": null}}'],
    ),
    "import-etf1": Decoder(of_etf1, (), OF_TOPIC),
    "record": Decoder(
        lambda data: decode_record(data, message_id="m", lane=lane),
        (RecordFormatError,),
        WRITTEN,
        lambda record: encode_record(record, int(record.envelope.lane[4:])),
    ),
    "columns": Decoder(columns, (RecordFormatError,), WRITTEN),
    "trace": Decoder(decode_trace, (), [encode_trace(each) for each in TRACES], encode_trace),
    "list-element": Decoder(element, (RecordFormatError,), [pushed(each) for each in RECORDS], pushed),
    "redis-value": Decoder(of_redis, (RecordFormatError,), [b"\x02\x02m" + bytes(6) + each for each in WRITTEN]),
    "log-entry": Decoder(log_entry, (RecordFormatError,), [pushed(each) for each in RECORDS]),
    "plain-log-entry": Decoder(plain_entry, (), [b"payload\x00p\x00key\x00k\x00header.a\x00b\x00at\x007"]),
    "kafka-record": Decoder(record_of_topic, (RecordFormatError,), OF_TOPIC, written_to_topic),
    "kafka-received": Decoder(received, (), OF_TOPIC),
    "kafka-history": Decoder(history, (), [b'{"at_ms": 1}'], lambda entry: entry and kafka.encode_history(entry).value),
    "delay-box": Decoder(
        request,
        (BadRequestError,),
        [
            ARTICLE.encode(),
            b'{"topic": "T", "message": [1.5e3, {}], "at": "2030-01-01T00:00:00Z", "id": "m", "key": "k"}',
            packed(b"k", b'{"topic": "T", "message": "m", "id": "i"}', [("aiodelay-conflict", b"debounce:5s:1m")]),
            *(each if isinstance(each, bytes) else each.encode() for each, _ in BAD if each and len(each) < 1000),
        ],
    ),
    "message": Decoder(read_message, REFUSED, MESSAGES),
    "message-shape": Decoder(shape, REFUSED, [msgspec.json.encode(record_shape(each)) for each in RECORDS], shaped),
    "rule": Decoder(
        json_rule,
        REFUSED,
        [b'"10m"', b'"0 9 * * mon"', b'{"cron": "0 9 * * mon", "tz": "UTC"}', b'{"interval": "1h"}'],
        lambda rule: rule and msgspec.json.encode(rule_shape(rule)),
    ),
    "stored-rule": Decoder(
        stored_rule,
        (RecordFormatError,),
        [
            b'{"c": "0 9 * * MON", "z": "UTC", "w": 60000, "d": 5}',
            b'{"e": 60000, "s": 1893456000000, "m": "all", "o": "skip"}',
        ],
        lambda rule: rule and msgspec.json.encode(encode_rule(rule)),
    ),
    "recorded-history": Decoder(recorded, (msgspec.ValidationError,), [TOLD, *TOLD.splitlines()], told),
    "cursor": Decoder(
        cursor,
        (InputError,),
        [f"{write_cursor((7, 'a', b'b'))}".encode()],
        lambda place: f"{write_cursor(place)}".encode(),
    ),
    "cron": Decoder(
        cron,
        (InputError,),
        texts_of("0 9 * * mon", "*/5 0-6,12 L 1-12/3 tue#2", "0 0 LW * 5L", "0 0 29 2 *"),
        lambda rule: rule.expression.encode(),
    ),
    "duration": Decoder(
        lambda data: parse_duration(text(data), field="delay"),
        REFUSED,
        texts_of("5s", "1h30m", "1.5d", "250ms", "PT5M", "P1W", "1w2d3h4m5s6ms", "-5s"),
        lambda ms: format_duration(ms).encode(),
    ),
    "instant": Decoder(
        instant, REFUSED, texts_of("2030-01-01T00:00:00Z", "2030-W01-1T00:00+01:00", "9999-12-31T23:59:59.999999-14:00")
    ),
    "rate": Decoder(
        lambda data: parse_rate(text(data), field="rate"),
        REFUSED,
        texts_of("5/min", "1000/s", "10/5m", "1/7d"),
        lambda rate: f"{rate[0]}/{format_duration(rate[1])}".encode(),
    ),
    "limit": Decoder(
        limit,
        (ConfigurationError,),
        [b'["customer", 2, "5/min"]', b"[null, 100000, null]"],
        lambda found: found and msgspec.json.encode([found.key, found.concurrency, found.rate]),
    ),
    "conflict": Decoder(
        lambda data: read_conflict(text(data)),
        REFUSED,
        texts_of("replace", "keep", "newer:7", "if_revision:7", "debounce:5s:1m", "throttle:1h:last", "append:50"),
    ),
    "log-start": Decoder(
        lambda data: read_start(text(data), field="from"), REFUSED, texts_of("oldest", "7", "2030-01-01T00:00:00+00:00")
    ),
    "url": Decoder(
        url,
        (),
        texts_of(
            "memory://?journal=5",
            "sqlite:///delay.db",
            "stdout:",
            f"redis://user:{PASSWORD}@host:6379/0?timeout_ms=500&durability=replicated:1&journal=9&connections=2",
            f"rediss://user:{PASSWORD}@host/0?ca_certs=ca.pem&shards=4&protocol=3",
            "unix:///redis.sock?db=1",
            "redis+cluster://a:1,b:2?announce=a:1=c:3",
            "redis+sentinel://a,b/main/0?sentinel_username=u&sentinel_password=x",
            f"kafka://user:{PASSWORD}@host:9092,b:9092/topic?security=SASL_PLAINTEXT&sasl=SCRAM-SHA-512&horizon=1h&members=3",
            "kafka://a:9092/t?ca_certs=none.pem&security=SSL",
            "kafka://a/t?create_topic=true&partitions=6&history=h&instance=i&index=x&max_pending=5&catch_up=7",
            f"redis-list://user:{PASSWORD}@host/0?max_length=9",
            "redis-fanout://host",
            "redis-log://host",
        ),
    ),
    "settings": Decoder(settings, (ConfigurationError,), [SETTINGS]),
}

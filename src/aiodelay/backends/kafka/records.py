"""The records of a schedules topic, and of the topics to which its messages go: encoding and decoding.

docs/formats.md describes the format, and `record_format` declares the headers of fields. A record schedules a message:
its key is the message's id, and its value is the payload. It has the headers `scheduler-epoch` (seconds) and
`scheduler-target-topic`, and `scheduler-target-key` if the delivered record has a key. A message for a handler has the
header `aiodelay-lane` instead of a topic. A later record with the same key replaces the message, and a tombstone
cancels it. The other headers whose names begin with `aiodelay-` belong to aiodelay, and may be left out. All remaining
headers are the message's own.

An *owner* is the process that owns the partition. Every other writer is a *user*: another process or program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from enum import Enum, auto
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol, cast, get_args

import msgspec

from aiodelay.core.durations import LAST_MS, to_epoch_ms
from aiodelay.core.record_codec import storable_texts
from aiodelay.core.record_format import FIELDS
from aiodelay.core.recurrence import decode_rule, is_of_unknown_zone
from aiodelay.core.transitions import NO_OP, base_id, occurrence_id, occurrence_of, retry_place
from aiodelay.core.validation import RESERVED_HEADERS, check_headers, check_id, check_key, split_target
from aiodelay.core.values import (
    NO_HEADERS,
    NO_TRACE,
    At,
    Cancel,
    Conflict,
    DeadKey,
    DeadLetter,
    DeadReason,
    Envelope,
    JournalEntry,
    Late,
    LateAction,
    Put,
    PutBack,
    Record,
    Stored,
)
from aiodelay.errors import PayloadTypeError, RecordFormatError, ScheduleTimeError, TargetError, kind_of, shortened

from .murmur2 import murmur2, partition_at
from .watermark import Watermark

__all__ = [
    "BARRIER",
    "CANCEL",
    "FORMAT",
    "INTAKE",
    "KEEP",
    "MARK",
    "PARTITIONS",
    "SINK",
    "Glance",
    "Headers",
    "Kind",
    "Memory",
    "Message",
    "Read",
    "Wire",
    "answer_of",
    "asked_back",
    "asked_cancel",
    "asked_op",
    "check_names",
    "dead_key",
    "dead_key_of",
    "decode",
    "decode_dead",
    "decode_history",
    "delivered",
    "encode",
    "encode_ask_to_cancel",
    "encode_back",
    "encode_cancel",
    "encode_dead",
    "encode_end",
    "encode_feature",
    "encode_history",
    "encode_hold",
    "encode_keep",
    "encode_mark",
    "encode_position",
    "encode_record",
    "feature_in",
    "glance",
    "held_in",
    "id_of",
    "is_plain",
    "is_topic",
    "java_partition",
    "kept_put",
    "key_of",
    "mark_of",
    "memory_of",
    "op_of",
    "partition_of",
    "partitions_in",
    "position_in",
    "readable",
    "received",
    "remembered",
    "user_headers",
]

Headers = Sequence[tuple[str, bytes | None]]

FORMAT = 1
SINK = "kafka"
"""The name of the sink whose addresses are topics. It is also the lane of messages to topics."""
RESERVED = b"\x00aiodelay/"
BARRIER, MARK, PARTITIONS = RESERVED + b"barrier", RESERVED + b"mark", RESERVED + b"partitions"
INTAKE = RESERVED + b"intake/"
AGAIN, DEAD, HOLD, KEEP = (RESERVED + name for name in (b"again/", b"dead/", b"hold/", b"keep/"))
FEATURE = RESERVED + b"feature/"
MAX_KEY = 255

EPOCH, TARGET_TOPIC, TARGET_KEY, TIMESTAMP, SCHEDULE_KEY, SCHEDULE_TOPIC = RESERVED_HEADERS
FORMAT_HEADER, READ_TO, PLACE, NULL = "aiodelay-format", "aiodelay-from", "aiodelay-place-ms", "aiodelay-null"
CANCEL = "aiodelay-cancel"
MEMORY = "aiodelay-memory"
DEAD_REASON, DEAD_AT = "aiodelay-dead-reason", "aiodelay-dead-at-ms"
OUTCOME, DELIVERY_ID, ATTEMPT = "aiodelay-outcome", "aiodelay-delivery-id", "aiodelay-attempt"
HEADER = {field.name: field.header for field in FIELDS if field.header is not None}
_OURS = frozenset({*RESERVED_HEADERS, FORMAT_HEADER, *HEADER.values()})
_FORMAT = b"%d" % FORMAT
_MOST_DIGITS = 36
_MOST_OFFSET_DIGITS = 18
_LANE, _DUE_MS, _RULE = HEADER["lane"], HEADER["due_ms"], HEADER["rule"]
_PREFIX = "aiodelay-"
_NOT_JSON = (msgspec.DecodeError, ValueError, RecursionError)  # ValueError: the JSON has a text that is not UTF-8
_MOST_MS = (1 << 48) - 1
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_FEATURE = re.compile(rb"[a-z0-9_]{1,64}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_LATE = {LateAction.DROP: b"drop", LateAction.DEAD_LETTER: b"dead_letter"}
_ENCODINGS: dict[str, Literal["", "json", "msgpack", "null"]] = {
    "": "",
    "json": "json",
    "msgpack": "msgpack",
    "null": "null",
}
_TEXT_TO_LATE = {text: action for action, text in _LATE.items()}


_HISTORY_MOST = {"at_ms": LAST_MS, "revision": (1 << 63) - 1, "due_ms": _MOST_MS, "attempt": (1 << 31) - 1}
"""The largest numbers in a journal entry, by name. The smallest is 0. A larger time could not be shown as a date."""


class Read(NamedTuple):
    """A record that was read. aiokafka's own records have the same attributes, so functions take them too."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers


class Wire(NamedTuple):
    """A record in the form that a producer takes."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]


_new = tuple.__new__
"""Makes a named tuple in a quarter of the time that a call of its class takes. Used for each record moved or read."""


class Memory(msgspec.Struct, omit_defaults=True):
    """Answers and a version to remember after their records are gone: header `aiodelay-memory`, as JSON.

    Attributes:
        answers: For each answer to a command: op in hexadecimal digits, answer, revision, due time, and the time until
            which to remember the answer.
        version: The version of a message that has ended, and the time until which to remember the version.
    """

    answers: list[tuple[str, str, int, int, int]] = []
    version: tuple[int, int] | None = None


def remembered(op: bytes, stored: Stored, until_ms: int) -> tuple[str, str, int, int, int]:
    """Return the answer to a command in the form of `Memory.answers`."""
    return op.hex(), stored.answer, stored.revision, stored.due_ms, until_ms


class Message(Protocol):
    """The argument of `encode`: an `aiodelay.Message`, or any object with these attributes."""

    @property
    def event(self) -> Any: ...  # noqa: ANN401 - `encode` checks its type
    @property
    def at(self) -> datetime | None: ...
    @property
    def id(self) -> str | None: ...
    @property
    def to(self) -> str | None: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def headers(self) -> Mapping[str, bytes]: ...
    @property
    def late(self) -> Late: ...


# --- writing ----------------------------------------------------------------------------------------------


def encode(message: Message) -> Wire:
    """Return the record that schedules a message, for a producer of your own.

    This function is pure: the same message gives the same record. Send the record with `acks=all`, to partition
    `partition_of(key, partitions)`. Java's producer chooses this partition by default, and librdkafka's producer with
    `partitioner=murmur2_random`.

    Args:
        message: `Message(b"...", at=..., id=..., to="kafka:<topic>")`, with `key`, `headers` and `late` if wanted. The
            event is bytes, or None for a record without value.

    Raises:
        InputError: A field cannot be used. The error names the field, its value and the allowed values.
    """
    if message.event is not None and type(message.event) is not bytes:
        raise PayloadTypeError("event", kind_of(message.event), "bytes, or None for a record without value")
    if message.id is None:
        raise TargetError("id", "missing", "an id, by which the message can be replaced and cancelled")
    if message.at is None:
        raise ScheduleTimeError("at", "missing", "an aware datetime")
    sink, topic = split_target(message.to)
    if sink != SINK:
        raise TargetError("to", shortened(message.to), f"'{SINK}:<topic>'")
    key = check_key(message.key)
    if message.event is None and key is None:
        raise PayloadTypeError("event", "None, and key is None too", "bytes, or None with a key")
    envelope = Envelope(
        check_id(message.id),
        SINK,
        topic,
        encoding="null" if message.event is None else "",
        payload=message.event or b"",
        key=key,
        headers=check_headers(message.headers),
    )
    due_ms, late = to_epoch_ms(message.at, field="at"), message.late
    expires_ms = due_ms + late.after_ms if late.action else 0
    return encode_record(Record(envelope, 0, due_ms, NO_OP, expires_ms, late.action))


def encode_record(
    record: Record, *, read_to: int | None = None, place_ms: int | None = None, memory: Memory | None = None
) -> Wire:
    """Return the record of a message.

    Args:
        record: The message and its state.
        read_to: In an owner's record: the offset up to which the owner has read. None = a user's record.
        place_ms: The time of the next attempt, if it is not the due time.
        memory: Answers to commands, and the version of an ended message, that readers must remember.
    """
    envelope = record.envelope
    headers: list[tuple[str, bytes]] = [(EPOCH, b"%d" % -(-record.due_ms // 1000))]
    if envelope.lane == SINK:
        headers.append((TARGET_TOPIC, envelope.address.encode()))
    else:
        headers.append((HEADER["lane"], envelope.lane.encode()))
        if envelope.address:
            headers.append((HEADER["address"], envelope.address.encode()))
    if envelope.key is not None:
        headers.append((TARGET_KEY, envelope.key))
    if envelope.encoding == "null":
        headers.append((NULL, b"1"))
    headers.append((HEADER["due_ms"], b"%d" % record.due_ms))
    headers.append((FORMAT_HEADER, b"%d" % FORMAT))
    headers += [(HEADER[name], value) for name, value in _rest_of(record)]
    if read_to is not None:
        headers.append((READ_TO, b"%d" % read_to))
    if record.revision:
        headers.append((HEADER["revision"], b"%d" % record.revision))
    if place_ms is not None and place_ms != record.due_ms:
        headers.append((PLACE, b"%d" % place_ms))
    headers += _remembering(memory)
    headers += _own_headers(envelope.headers)
    return Wire(key_of(record.id), envelope.payload, headers)


def _own_headers(headers: Mapping[str, bytes]) -> Iterable[tuple[str, bytes]]:
    """Return the headers of a message, except reserved headers. These would replace its destination or its due time.

    `check_headers` refuses such headers. But older versions stored them in Redis and SQLite, from where messages move.
    """
    if _OURS.isdisjoint(headers):
        return headers.items()
    return [(name, value) for name, value in headers.items() if name not in _OURS]


def _rest_of(record: Record) -> Iterable[tuple[str, bytes]]:
    """Yield the fields that differ from their defaults, by name."""
    envelope = record.envelope
    if record.op != NO_OP:
        yield "op", record.op.hex().encode()
    if record.late:
        yield "late", _LATE[record.late]
        yield "expires_ms", b"%d" % record.expires_ms
    for name in ("attempt", "lapses", "kills", "no_retry"):
        if value := getattr(record, name):
            yield name, b"%d" % value
    if envelope.version is not None:
        yield "version", b"%d" % envelope.version
    for name, text in (("type", envelope.type), ("encoding", envelope.encoding)):
        if text and text != "null":
            yield name, text.encode()
    for name, mapping in (("rule", envelope.rule), ("trace", envelope.trace), ("live", record.live)):
        if mapping:
            yield name, msgspec.json.encode(mapping)
    if record.appended is not None:
        yield "appended", record.appended
    for name in ("put_due_ms", "debounced_ms", "appended_due_ms"):
        if (time_ms := getattr(record, name)) is not None:
            yield name, b"%d" % time_ms
    yield from _errors_of(record)


def _errors_of(record: Record) -> Iterable[tuple[str, bytes]]:
    if record.earlier_errors:
        yield "earlier_errors", msgspec.json.encode(storable_texts(record.earlier_errors))
    for name in ("first_error", "last_error", "traceback"):
        text = getattr(record, name)
        if text is not None:
            yield name, text.encode(errors="backslashreplace")


def encode_keep(record: Record) -> Wire:
    """Return the record by which a user requests a put. If the key has a message already, that message stays."""
    wire = encode_record(record)
    assert wire.key is not None
    return wire._replace(key=KEEP + wire.key)


def kept_put(key: bytes, value: bytes, headers: Headers, *, written_ms: int) -> Put:
    """Return the put that a record of `encode_keep` requests; `key` is the message's key.

    Raises:
        RecordFormatError: The record has no message that can be read.
    """
    record = decode(key, value, headers, written_ms=written_ms)
    late = Late(record.late, record.expires_ms - record.due_ms) if record.late else Late()
    return Put(record.op, record.envelope, At(record.due_ms), Conflict.keep(), late)


def encode_ask_to_cancel(cancel: Cancel) -> Wire:
    """Return the record by which a user requests a cancel of one revision at one due time. The owner decides.

    The owner's answer is the tombstone of this record's key. `answer_of` returns the outcome in that tombstone.
    """
    assert cancel.only is not None
    revision, due_ms = cancel.only
    assert due_ms is not None
    headers = [(CANCEL, b"%d/%d" % (revision, due_ms)), (HEADER["op"], cancel.op.hex().encode())]
    return Wire(KEEP + key_of(cancel.id), b"", headers)


def asked_cancel(key: bytes, headers: Headers) -> Cancel | None:
    """Return the cancel that a record requests, or None if it requests something else. `key` is the message's key.

    Raises:
        RecordFormatError: The record does not name a revision and a due time.
    """
    found = dict(headers)
    if CANCEL not in found:
        return None
    revision, slash, due_ms = (found[CANCEL] or b"").partition(b"/")
    if not (slash and revision.isdigit() and due_ms.isdigit() and len(revision + due_ms) <= _MOST_DIGITS):
        raise RecordFormatError(f"its {CANCEL} is not a revision and a due time")
    return Cancel(op_of(headers), id_of(key), (int(revision), int(due_ms)))


def asked_op(key: bytes | None, value: bytes | None, headers: Headers) -> tuple[bytes, bytes] | None:
    """Return the message's key and the op in a record of `encode_ask_to_cancel`, or None for another kind of record."""
    if key is None or value is None or not key.startswith(KEEP) or CANCEL not in dict(headers):
        return None
    return key.removeprefix(KEEP), op_of(headers)


def answer_of(key: bytes | None, value: bytes | None, headers: Headers) -> tuple[bytes, str, int] | None:
    """Return the owner's answer to a request: the message's key, the outcome, and how far the owner had read.

    Return None if the record is not an answer.
    """
    if key is None or value is not None or not key.startswith(KEEP):
        return None
    found = dict(headers)
    outcome, read_to = found.get(OUTCOME) or b"", found.get(READ_TO) or b""
    if not read_to.isdigit() or len(read_to) > _MOST_DIGITS:
        return None
    return key.removeprefix(KEEP), outcome.decode("utf-8", "replace"), int(read_to)


def encode_back(message: PutBack, now_ms: int) -> Wire:
    """Return the record by which a user puts a message back.

    If the message is a dead letter, this is the record that keeps it. Otherwise the record is a request to the owner,
    who treats it like a put with the conflict rule `keep`.
    """
    if message.reason is not None:
        return encode_dead(DeadLetter(message.record, message.reason, now_ms))
    wire = encode_record(message.record, read_to=0, place_ms=retry_place(message.record, message.due_ms))
    assert wire.key is not None
    return wire._replace(key=KEEP + wire.key)


def asked_back(key: bytes, value: bytes, headers: Headers, *, place_ms: int) -> PutBack:
    """Return the message that a record of `encode_back` puts back; `key` is the message's key.

    Raises:
        RecordFormatError: The record has no message that can be read.
    """
    return PutBack(decode(key, value, headers, written_ms=0), place_ms)


def encode_cancel(key: bytes, memory: Memory | None = None) -> Wire:
    """Return the tombstone by which a user cancels a message."""
    return Wire(key, None, _remembering(memory))


def encode_end(key: bytes, *, read_to: int, outcome: str, memory: Memory | None = None) -> Wire:
    """Return the tombstone by which an owner ends a message.

    The tombstone counts if no user's record of the same key is at offset `read_to` or later.
    """
    if memory is None:
        return _new(Wire, (key, None, _end_headers(read_to, outcome)))
    return Wire(key, None, [*_end_headers(read_to, outcome), *_remembering(memory)])


@lru_cache(maxsize=64)
def _end_headers(read_to: int, outcome: str) -> list[tuple[str, bytes]]:
    """Return the headers that the tombstones of one transaction share. Callers must not change the list."""
    return [(READ_TO, b"%d" % read_to), (OUTCOME, outcome.encode())]


def _remembering(memory: Memory | None) -> list[tuple[str, bytes]]:
    return [(MEMORY, msgspec.json.encode(memory))] if memory is not None else []


def memory_of(headers: Headers) -> Memory | None:
    """Return the memory in a record, or None if the record has no memory that can be read."""
    text = dict(headers).get(MEMORY)
    if text is None:
        return None
    try:
        memory = msgspec.json.decode(text, type=Memory)
        for op, *_ in memory.answers:
            bytes.fromhex(op)
    except _NOT_JSON:
        return None
    return memory


def encode_dead(letter: DeadLetter) -> Wire:
    """Return the record that keeps a dead letter. Its key differs from the key of the message's record."""
    wire = encode_record(letter.record, read_to=0)
    reason = [(DEAD_REASON, letter.reason.encode()), (DEAD_AT, b"%d" % letter.at_ms)]
    return Wire(dead_key(letter.key), wire.value, [*reason, *wire.headers])


def encode_hold(lane: str, address: str | None, *, is_held: bool) -> Wire:
    """Return the record that pauses or resumes a lane or one of its addresses. Every partition gets this record."""
    return Wire(HOLD + msgspec.json.encode((lane, address)), b"1" if is_held else None, [])


def held_in(key: bytes) -> tuple[str, str | None] | None:
    """Return the lane and the address in the key of a record of `encode_hold`, or None if the key names no lane."""
    try:
        return msgspec.json.decode(key.removeprefix(HOLD), type=tuple[str, str | None])
    except _NOT_JSON:
        return None


def encode_feature(name: str, version: str) -> Wire:
    """Return the record that switches a feature on. Every partition gets this record.

    Args:
        name: The name of the feature.
        version: The version of aiodelay that switches it on.
    """
    return Wire(FEATURE + name.encode(), version.encode(), [])


def feature_in(key: bytes, value: bytes | None) -> tuple[str, str] | None:
    """Return the feature that a record names, and the version that switched it on; or None if it names no feature."""
    name = key.removeprefix(FEATURE)
    if value is None or not key.startswith(FEATURE) or not _FEATURE.fullmatch(name):
        return None
    return name.decode(), value.decode(errors="replace")


def dead_key(key: DeadKey) -> bytes:
    """Return the key of the record that keeps a dead letter."""
    return b"%s%d/%s" % (DEAD, key.revision, key_of(key.id))


def encode_mark(mark: Watermark) -> Wire:
    """Return the record of a watermark, by which an owner states which messages have certainly ended."""
    return Wire(MARK, msgspec.json.encode(mark), [])


def mark_of(value: bytes | None) -> Watermark:
    """Return the watermark in a record, or an empty watermark if the record cannot be read."""
    try:
        return msgspec.json.decode(value or b"", type=Watermark)
    except _NOT_JSON:
        return Watermark()


def encode_position(source: str, position: int) -> Wire:
    """Return the record that keeps the position of an intake."""
    return Wire(INTAKE + source.encode(), b"%d" % position, [])


def position_in(key: bytes, value: bytes | None) -> tuple[str, int] | None:
    """Return the source and the position in a record, or None if it keeps no position."""
    if not key.startswith(INTAKE) or value is None or not value.isdigit() or len(value) > _MOST_OFFSET_DIGITS:
        return None
    return key.removeprefix(INTAKE).decode(errors="replace"), int(value)


def delivered(envelope: Envelope, delivery_id: str, attempt: int, *, now_ms: int, schedules: str = "") -> Wire:
    """Return the record for a target topic.

    Args:
        envelope: The message.
        delivery_id: The id by which consumers recognise a repeated delivery.
        attempt: The number of the attempt, from 1.
        now_ms: The time of the delivery.
        schedules: The schedules topic of the message; "" if another store delivers it.
    """
    shared = _delivered_headers(now_ms // 1000, schedules, attempt)
    own = (SCHEDULE_KEY, key_of(base_id(envelope.id))), (DELIVERY_ID, delivery_id.encode())
    headers = [*_users_headers(envelope), *shared, *own] if envelope.headers or envelope.trace else [*shared, *own]
    if envelope.type:
        headers.append((HEADER["type"], envelope.type.encode()))
    if envelope.encoding in ("json", "msgpack"):
        headers.append((HEADER["encoding"], envelope.encoding.encode()))
    return _new(Wire, (envelope.key, None if envelope.encoding == "null" else envelope.payload, headers))


def _users_headers(envelope: Envelope) -> Iterable[tuple[str, bytes]]:
    """Return the message's own headers, and its trace, unless the headers have a trace already."""
    headers = envelope.headers.items()
    if not envelope.trace or not envelope.headers.keys().isdisjoint(envelope.trace):
        return headers
    return (*headers, *((name, text.encode()) for name, text in envelope.trace.items() if not name.startswith(_PREFIX)))


@lru_cache(maxsize=64)
def _delivered_headers(now_s: int, schedules: str, attempt: int) -> list[tuple[str, bytes]]:
    """Return the headers that records delivered together share. Callers must not change the list."""
    headers = [(TIMESTAMP, b"%d" % now_s), (ATTEMPT, b"%d" % attempt)]
    return [*headers, (SCHEDULE_TOPIC, schedules.encode())] if schedules else headers


def received(message_id: str, lane: str, key: bytes | None, value: bytes | None, headers: Headers) -> Envelope:
    """Return the message for a handler from a record of a topic. Any program may have written the record.

    Args:
        message_id: The id of the new message.
        lane: The lane of the handler.
        key: The record's key.
        value: The record's value; None = the payload is null.
        headers: The record's headers. If several headers have the same name, the last of them counts.
    """
    payload = b"" if value is None else value
    if not headers:
        return Envelope(message_id, lane, "", "", "null" if value is None else "", payload, key)
    found = dict(headers)
    encoding = "null" if value is None else _ENCODINGS.get(_text(found, "encoding"), "")
    own = dict(user_headers(headers)) or NO_HEADERS
    return Envelope(message_id, lane, "", _text(found, "type"), encoding, payload, key, own)


def encode_history(entry: JournalEntry) -> Wire:
    """Return the record of a journal entry for the history topic. The record's offset will be the entry's number."""
    return Wire(key_of(base_id(entry.id)), msgspec.json.encode(entry), [])


def decode_history(value: bytes | None, number: int) -> JournalEntry | None:
    """Return the journal entry in a record of a history topic, or None if another program wrote the record."""
    try:
        entry = msgspec.structs.replace(msgspec.json.decode(value or b"", type=JournalEntry), number=number)
    except _NOT_JSON:
        return None
    return entry if all(0 <= getattr(entry, name) <= most for name, most in _HISTORY_MOST.items()) else None


# --- keys and partitions ----------------------------------------------------------------------------------


def key_of(message_id: str) -> bytes:
    """Return the key of a message's record."""
    occurrence = occurrence_of(message_id)
    if occurrence is not None:
        series, due_ms = occurrence
        return b"%s%d/%s" % (AGAIN, due_ms, key_of(series))
    return bytes.fromhex(message_id[1:]) if message_id.startswith("\x00") else message_id.encode()


def id_of(key: bytes) -> str:
    """Return the message id of a key: its text, or a zero character and the key in hexadecimal if it is not plain text.

    Raises:
        RecordFormatError: No message can have this key.
    """
    if key.startswith(RESERVED):
        due, slash, series = key.removeprefix(AGAIN).partition(b"/")
        if not (key.startswith(AGAIN) and slash and due.isdigit()):
            raise RecordFormatError("its key is reserved")
        return occurrence_id(id_of(series), int(due))
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return f"\x00{key.hex()}"
    return text if text and not _CONTROL.search(text) and occurrence_of(text) is None else f"\x00{key.hex()}"


def partition_of(key: bytes, partitions: int) -> int:
    """Return the partition of a message's key. An occurrence is in the partition of its series."""
    return java_partition(key.removeprefix(AGAIN).partition(b"/")[2] if key.startswith(AGAIN) else key, partitions)


def java_partition(key: bytes, partitions: int) -> int:
    """Return the partition that Java's producer chooses for a key."""
    return partition_at(murmur2(key), partitions)


# --- reading ----------------------------------------------------------------------------------------------


class Kind(Enum):
    """The kinds of records in a schedules topic."""

    PUT = auto()
    END = auto()
    BARRIER = auto()
    MARK = auto()
    PARTITIONS = auto()
    FEATURE = auto()
    HOLD = auto()
    DEAD = auto()
    INTAKE = auto()
    BAD = auto()


class Glance(NamedTuple):
    """The facts that every reader needs about each record. The rest of a record is decoded when its message is near.

    Attributes:
        kind: A message, the end of a message, one of aiodelay's own kinds, or a record that cannot be read.
        place_ms: The time of the next attempt of a message.
        read_to: The offset up to which the writer of an owner's record had read; None = a user's record.
        problem: The reason why the record cannot be read; "" = it can be read.
        lane: The lane of a message that may be decoded later. "" = the record must be decoded at once, as for a series.
    """

    kind: Kind
    place_ms: int = 0
    read_to: int | None = None
    problem: str = ""
    lane: str = ""


_PUT = Kind.PUT
_CANCEL = Glance(Kind.END)
_INTAKE = Glance(Kind.INTAKE)
_OWN = {BARRIER: Glance(Kind.BARRIER), MARK: Glance(Kind.MARK), PARTITIONS: Glance(Kind.PARTITIONS)}
_DEAD, _HOLD, _WHOLE = Glance(Kind.DEAD), Glance(Kind.HOLD), Glance(Kind.PUT)
_IN_USE = Glance(Kind.FEATURE)
_RESERVED = Glance(Kind.BAD, problem="its key is reserved")


def glance(key: bytes | None, value: bytes | None, headers: Headers) -> Glance:
    """Return the facts about a record that decide how to read it. Never raises."""
    special = _by_key(key)
    if special is not None and special is not _WHOLE:
        return special
    if value is None and not headers:
        return _CANCEL
    found = dict(headers)
    try:
        read_to = _number(found, READ_TO) if READ_TO in found else None
        if value is None:
            return Glance(Kind.END, 0, read_to)
        if special is _WHOLE and CANCEL in found:
            return _WHOLE
        lane = _text(found, "lane") or SINK if _LANE in found else SINK
        own_lane = "" if _RULE in found or special is _WHOLE else lane
        return _new(Glance, (_PUT, _place_ms(found), read_to, "", own_lane))
    except RecordFormatError as error:
        return Glance(Kind.BAD, problem=error.problem)


def _by_key(key: bytes | None) -> Glance | None:
    """Return the facts of a record whose key alone decides them, or None if value and headers decide."""
    if key is None:
        return Glance(Kind.BAD, problem="it has no key")
    if key.startswith(RESERVED):
        return _reserved(key)
    if not 0 < len(key) <= MAX_KEY:
        return Glance(Kind.BAD, problem=f"its key has {len(key)} bytes, not 1 to {MAX_KEY}")
    return None


def _reserved(key: bytes) -> Glance:
    if key.startswith(HOLD):
        return _RESERVED if held_in(key) is None else _HOLD
    if key.startswith((INTAKE, FEATURE)):
        return _INTAKE if key.startswith(INTAKE) else _IN_USE
    if key.startswith(KEEP):
        return _WHOLE if is_plain(key.removeprefix(KEEP)) else _RESERVED
    prefix, _, rest = key.removeprefix(RESERVED).partition(b"/")
    number, slash, of = rest.partition(b"/")
    if slash and number.isdigit() and len(number) <= 15:
        if prefix == b"again" and is_plain(of):
            return _WHOLE
        if prefix == b"dead" and (is_plain(of) or (of.startswith(AGAIN) and _reserved(of) is _WHOLE)):
            return _DEAD
    return _OWN.get(key, _RESERVED)


def is_plain(key: bytes) -> bool:
    """Say whether a user's message can have this key."""
    return 0 < len(key) <= MAX_KEY and not key.startswith(RESERVED)


def _place_ms(found: Mapping[str, bytes | None]) -> int:
    is_plain = found.get(FORMAT_HEADER, _FORMAT) == _FORMAT
    if not is_plain and (version := _number(found, FORMAT_HEADER)) > FORMAT:
        raise RecordFormatError(f"its format is {version}, and this version reads formats up to {FORMAT}")
    if TARGET_TOPIC not in found and HEADER["lane"] not in found:
        raise RecordFormatError(f"it has no header {TARGET_TOPIC}")
    return _number(found, PLACE) if PLACE in found else _due_ms(found)


def _due_ms(found: Mapping[str, bytes | None]) -> int:
    if _DUE_MS in found:
        return _number(found, _DUE_MS)
    if EPOCH not in found:
        raise RecordFormatError(f"it has no header {EPOCH}")
    due_ms = _number(found, EPOCH) * 1000
    if due_ms > _MOST_MS:
        raise RecordFormatError(f"header {EPOCH} is too large: it counts seconds")
    return due_ms


def _number(found: Mapping[str, bytes | None], name: str, most: int = _MOST_MS) -> int:
    text = found[name]
    if text is None or not text.isdigit() or len(text) > 19 or int(text) > most:
        got = shortened(text.decode(errors="replace")) if text is not None else "null"
        raise RecordFormatError(f"header {name} is {got}, not a whole number from 0 to {most}")
    return int(text)


def partitions_in(value: bytes | None) -> int | None:
    """Return the topic's number of partitions in an owner's record, or None if the record names no number."""
    return int(value) if value is not None and value.isdigit() and len(value) <= 9 else None


def is_topic(name: str) -> bool:
    """Say whether a topic for messages can have this name."""
    return _TOPIC.fullmatch(name) is not None and name not in (".", "..") and not name.startswith("__")


def decode(key: bytes, value: bytes, headers: Headers, *, written_ms: int) -> Record:
    """Return the message in a record.

    Args:
        key: The record's key.
        value: The record's value.
        headers: The record's headers. If several headers have the same name, the last of them counts.
        written_ms: The record's timestamp. If no owner has written the message again, this is the message's revision.

    Raises:
        RecordFormatError: The record cannot be read. The error names the part that is wrong.
    """
    found = dict(headers)
    check_names(headers)
    _place_ms(found)
    lane, address = _destination(found)
    encoding = "null" if NULL in found else _text(found, "encoding")
    if encoding not in _ENCODINGS:
        raise RecordFormatError(f"its encoding {shortened(encoding)} is unknown")
    envelope = Envelope(
        id_of(key),
        lane,
        address,
        _text(found, "type"),
        _ENCODINGS[encoding],
        b"" if encoding == "null" else value,
        found.get(TARGET_KEY),
        dict(user_headers(headers)) or NO_HEADERS,
        _trace(found),
        _number(found, HEADER["version"], (1 << 63) - 1) if HEADER["version"] in found else None,
        _rule(found),
    )
    return Record(
        envelope,
        _field(found, "revision", max(written_ms, 0)),
        _due_ms(found),
        _op(found),
        _field(found, "expires_ms"),
        _TEXT_TO_LATE.get(found.get(HEADER["late"]) or b"", LateAction.DELIVER),
        **_state(found),
    )


def _state(found: Mapping[str, bytes | None]) -> dict[str, Any]:
    """Return the fields that only owners write."""
    if READ_TO not in found:
        return {}
    live = _json(found, "live") or []
    if not isinstance(live, list) or not all(type(due) is int for due in live):
        raise RecordFormatError(f"header {HEADER['live']} is not a list of due times")
    earlier_errors = _json(found, "earlier_errors") or []
    if not isinstance(earlier_errors, list) or not all(type(text) is str for text in earlier_errors):
        raise RecordFormatError(f"header {HEADER['earlier_errors']} is not a list of texts")
    return {
        "attempt": _field(found, "attempt"),
        "lapses": _field(found, "lapses"),
        "kills": _field(found, "kills"),
        "no_retry": bool(_field(found, "no_retry")),
        "live": tuple(live),
        "first_error": _optional_text(found, "first_error"),
        "last_error": _optional_text(found, "last_error"),
        "earlier_errors": tuple(earlier_errors),
        "traceback": _optional_text(found, "traceback"),
        "put_due_ms": _field(found, "put_due_ms") if HEADER["put_due_ms"] in found else None,
        "debounced_ms": _field(found, "debounced_ms") if HEADER["debounced_ms"] in found else None,
        "appended": found.get(HEADER["appended"]),
        "appended_due_ms": _field(found, "appended_due_ms") if HEADER["appended_due_ms"] in found else None,
    }


def _destination(found: Mapping[str, bytes | None]) -> tuple[str, str]:
    lane = _text(found, "lane")
    if lane not in ("", SINK):
        return lane, _text(found, "address")
    topic = (found.get(TARGET_TOPIC) or b"").decode(errors="replace")
    if READ_TO not in found and not is_topic(topic):
        raise RecordFormatError(f"header {TARGET_TOPIC} is {shortened(topic)}, which is not a topic's name")
    return SINK, topic


def dead_key_of(key: bytes) -> DeadKey:
    """Return the dead letter's id and revision from the key of its record."""
    revision, _, of = key.removeprefix(DEAD).partition(b"/")
    return DeadKey(id_of(of), int(revision))


def decode_dead(key: bytes, value: bytes, headers: Headers) -> DeadLetter:
    """Return the dead letter in a record.

    Raises:
        RecordFormatError: The record cannot be read. The error names the part that is wrong.
    """
    found = dict(headers)
    of = key.removeprefix(DEAD).partition(b"/")[2]
    record = decode(of, value, headers, written_ms=0)
    reason = (found.get(DEAD_REASON) or b"").decode(errors="replace")
    if reason not in get_args(DeadReason) or DEAD_AT not in found:
        raise RecordFormatError("it does not say why and when the message was given up")
    return DeadLetter(record, cast("DeadReason", reason), _number(found, DEAD_AT))


def user_headers(headers: Headers) -> Iterable[tuple[str, bytes]]:
    """Return the user's headers, in order, without the scheduler's and aiodelay's. The value null becomes empty."""
    return (
        (readable(name), value or b"")
        for name, value in headers
        if name not in _OURS and not name.lower().startswith(_PREFIX)
    )


def check_names(headers: Headers) -> None:
    """Refuse headers whose names are not UTF-8.

    Raises:
        RecordFormatError: A header has such a name. The error names the first of these headers.
    """
    for name, _ in headers:
        if readable(name) != name:
            raise RecordFormatError(f"the name of header {shortened(readable(name))} is not UTF-8")


def readable(name: str) -> str:
    r"""Return a header's name in which an escape, such as `\xe9`, stands for each byte that is not UTF-8."""
    return name if name.isascii() else name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _field(found: Mapping[str, bytes | None], name: str, default: int = 0) -> int:
    return _number(found, HEADER[name]) if HEADER[name] in found else default


def _optional_text(found: Mapping[str, bytes | None], name: str) -> str | None:
    text = found.get(HEADER[name])
    return None if text is None else text.decode(errors="replace")


def _text(found: Mapping[str, bytes | None], name: str) -> str:
    return _optional_text(found, name) or ""


def _op(found: Mapping[str, bytes | None]) -> bytes:
    text = found.get(HEADER["op"])
    try:
        op = bytes.fromhex(text.decode()) if text else NO_OP
    except ValueError:
        op = b""
    if len(op) != len(NO_OP):
        raise RecordFormatError(f"header {HEADER['op']} is not 16 hexadecimal digits")
    return op


def op_of(headers: Headers) -> bytes:
    """Return the op of the command that made a record, or `NO_OP` if the op cannot be read."""
    try:
        return _op(dict(headers))
    except RecordFormatError:
        return NO_OP


def _json(found: Mapping[str, bytes | None], name: str) -> object:
    text = found.get(HEADER[name])
    try:
        return None if text is None else msgspec.json.decode(text)
    except _NOT_JSON:
        raise RecordFormatError(f"header {HEADER[name]} is not JSON") from None


def _rule(found: Mapping[str, bytes | None]) -> dict[str, str | int] | None:
    rule = _object(found, "rule")
    if rule is not None and not is_of_unknown_zone(rule):  # such a series waits for an owner that knows the zone
        decode_rule(rule)
    return cast("dict[str, str | int] | None", rule)


def _trace(found: Mapping[str, bytes | None]) -> Mapping[str, str]:
    trace = _object(found, "trace") or NO_TRACE
    if not all(isinstance(text, str) for text in trace.values()):
        raise RecordFormatError(f"header {HEADER['trace']} is not an object of texts")
    return cast("Mapping[str, str]", trace)


def _object(found: Mapping[str, bytes | None], name: str) -> Any:  # noqa: ANN401 - the caller knows the field's type
    value = _json(found, name)
    if value is not None and not isinstance(value, dict):
        raise RecordFormatError(f"header {HEADER[name]} is not a JSON object")
    return value

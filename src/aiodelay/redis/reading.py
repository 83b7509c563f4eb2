"""Reading records and dead letters as Redis holds them; what cannot be read is salvaged, never lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiodelay.codecs import decode_record
from aiodelay.errors import RecordFormatError
from aiodelay.model import DeadLetter, DeadReason, Envelope, Lane, Record
from aiodelay.transitions import NO_OP

from .client import Client
from .keys import Keys, text_of

__all__ = ["Lanes", "lane_number", "place_and_record", "read_letter", "read_record"]

_RAW = 255


class Lanes:
    """Names of lanes by number; lanes are never taken away, so that what was read once stays right."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client, self._key = client, keys.key("lanes")
        self._names: dict[int, Lane] = {}
        self.numbers: dict[Lane, int] = {}

    async def read(self) -> Mapping[int, Lane]:
        """Read them afresh.

        Raises:
            Fault: The server did not answer.
        """
        reply: Any = await self._client.command("HGETALL", self._key)
        pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
        self.numbers = {name.decode("utf-8", "backslashreplace"): int(number) for name, number in pairs}
        self._names = {number: name for name, number in self.numbers.items()}
        return self._names

    def name(self, number: int) -> Lane:
        """Return a lane's name.

        Raises:
            LookupError: It has not been read yet.
        """
        return self._names[number]

    async def learn(self, values: Sequence[bytes]) -> None:
        """Read the names again if one of these values is of a lane that is not known yet."""
        numbers = {number for value in values if (number := lane_number(value)) is not None}
        if not numbers <= self._names.keys():
            await self.read()


def _record_at(value: bytes) -> int:
    return 12 if value[:1] >= b"\x80" else 6


def lane_number(value: bytes) -> int | None:
    """Return the number of the lane that a value of `msg` names."""
    at = _record_at(value) + 2
    return int.from_bytes(value[at : at + 2], "big") if len(value) >= at + 2 else None


def place_and_record(value: bytes) -> tuple[int, bytes]:
    """Split a value of `msg` into the message's place in its lane and its record."""
    at = _record_at(value)
    place_ms = int.from_bytes(value[6:12], "big") if at == 12 else int.from_bytes(value[at + 10 : at + 16], "big")
    return place_ms, value[at:]


def read_record(member: bytes, value: bytes, lanes: Lanes) -> Record:
    """Read a value of `msg`.

    Raises:
        RecordFormatError: It cannot be read.
    """
    return decode_record(value[_record_at(value) :], message_id=text_of(member), lane=lanes.name)


def read_letter(key: bytes, value: bytes, at_ms: int, lanes: Lanes) -> DeadLetter:
    """Read a value of `dead`; of one that cannot be read the bytes are the payload, and `last_error` says so."""
    member, revision = key[:-6], int.from_bytes(key[-6:], "big")
    if value[0] == _RAW:
        number, raw = int.from_bytes(value[1:3], "big"), value[3:]
        return DeadLetter(
            _salvaged(member, revision, number, raw, lanes=lanes, problem="not a record"), "undecodable", at_ms
        )
    size = value[0]
    reason: DeadReason = value[1 : size + 1].decode()  # type: ignore[assignment]
    record = value[size + 1 :]
    try:
        return DeadLetter(decode_record(record, message_id=text_of(member), lane=lanes.name), reason, at_ms)
    except RecordFormatError as error:
        number = int.from_bytes(record[2:4], "big")
        return DeadLetter(
            _salvaged(member, revision, number, record, lanes=lanes, problem=error.problem), reason, at_ms
        )


def _salvaged(member: bytes, revision: int, number: int, raw: bytes, *, lanes: Lanes, problem: str) -> Record:
    try:
        lane = lanes.name(number)
    except LookupError:
        lane = ""
    envelope = Envelope(text_of(member), lane, payload=raw)
    return Record(envelope, revision, 0, NO_OP, last_error=f"cannot be read: {problem}")

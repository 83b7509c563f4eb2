"""`Checkpoint`: the state of a partition's index besides its far messages, written to disk from time to time.

A checkpoint lets the next owner go on from the index on disk, instead of reading the whole partition.
"""

from __future__ import annotations

from zlib import crc32

from msgspec import Struct

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.watermark import Watermark
from aiodelay.core.dict_table.table import DictTable
from aiodelay.core.values import Stored

from .placement import Placement
from .read_state import ReadState

__all__ = ["Checkpoint", "Witness", "checkpoint_of"]


class Witness(Struct, frozen=True, array_like=True):
    """The last record that was read. A partition without this record is another partition, or its end was cut off.

    Attributes:
        offset: The offset of the record.
        timestamp: The timestamp of the record.
        crc: The checksum of the record's key and value.
    """

    offset: int
    timestamp: int
    crc: int

    @staticmethod
    def of(offset: int, timestamp: int, key: bytes | None, value: bytes | None) -> Witness:
        """Return the witness for a record."""
        return Witness(offset, timestamp, crc32(value or b"", crc32(key or b"")))


class Checkpoint(Struct):
    """The state of an index that has read everything up to a record.

    Attributes:
        offsets: Offsets of the records to read again, in order: near messages, cancels, requests, pauses, features and
            dead letters.
        edge_ms: No far message is due before this time.
        mark: The newest watermark.
        ended_at: The offset at which the last message ended.
        partitions: The number of partitions of the topic, as its first owner recorded it.
        is_mixed: Whether the partition has keys that belong to another partition.
        repeated: Offsets of messages that must be ended but have no end yet. Such a message was put again by a repeated
            command after it had ended, or is a retry of a series that was replaced or cancelled.
        revisions: By offset, the revisions of messages whose revision differs from the revision in their record.
        answers: For each answer: op, answer, revision, due time, and until when to remember the answer, as in `Memory`.
        versions: By id of an ended message: its version, and the time until which to remember it.
        witness: The last record that was read.
        whole_ms: The time at which reading last reached the end of the partition, in epoch ms.
    """

    offsets: list[int]
    edge_ms: int
    mark: Watermark
    ended_at: int
    partitions: int | None
    is_mixed: bool
    repeated: set[int]
    revisions: dict[int, int]
    answers: list[tuple[str, str, int, int, int]]
    versions: dict[str, tuple[int, int]]
    witness: Witness = Witness(-1, 0, 0)
    whole_ms: int = 0

    @property
    def read_to(self) -> int:
        """The offset below which everything had been read."""
        return self.witness.offset + 1


def checkpoint_of(
    state: ReadState, table: DictTable, placement: Placement, *, witness: Witness, now: int, whole_ms: int
) -> Checkpoint:
    """Return the checkpoint of an index. It contains everything except the far messages.

    Args:
        state: What the index has read.
        table: The messages of the index.
        placement: The partition.
        witness: The last record that was read.
        now: Epoch ms.
        whole_ms: The time at which reading last reached the end of the partition, in epoch ms.
    """
    standings, answers = state.standings, table.answers
    offsets = [standing.seen.offset for standing in standings.values()]
    offsets += [at for key in state.hidden if (at := standings[key].hidden_at) is not None]
    offsets += [asked.offset for requests in state.asked.values() for asked in requests]
    offsets += state.kept_at.values()
    return Checkpoint(
        sorted(offsets),
        state.edge_ms,
        state.mark,
        state.ended_at,
        state.partitions,
        placement.is_mixed,
        {standings[key].seen.offset for key in state.over},
        _raised(state, table),
        [
            records.remembered(op, stored, until_ms)
            for op, stored, until_ms in answers.by_op.items(now)
            if isinstance(stored, Stored)
        ],
        {message_id: (version, until_ms) for message_id, version, until_ms in answers.versions.items(now)},
        witness,
        whole_ms,
    )


def _raised(state: ReadState, table: DictTable) -> dict[int, int]:
    """Return, by offset, the revisions of messages whose revision differs from the revision in their record."""
    found = [(state.standings.get(records.key_of(each)), table.find(each)) for each in state.raised]
    return {
        standing.seen.offset: entry.record.revision
        for standing, entry in found
        if entry is not None and standing is not None and standing.seen.is_put
    }

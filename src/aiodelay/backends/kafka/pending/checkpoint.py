"""What must be known, beside what is far, to go on with a partition's index instead of reading the partition again."""

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
    """The last record that was read: a partition in which it does not stand is another one, or was cut off.

    Attributes:
        offset: Where it stands.
        timestamp: Its time.
        crc: Of its key and value.
    """

    offset: int
    timestamp: int
    crc: int

    @staticmethod
    def of(offset: int, timestamp: int, key: bytes | None, value: bytes | None) -> Witness:
        """Return what is remembered of a record."""
        return Witness(offset, timestamp, crc32(value or b"", crc32(key or b"")))


class Checkpoint(Struct):
    """An index, when all up to a record had been read.

    Attributes:
        offsets: The records by which what is near stands, with cancels, holds and dead letters; in order.
        edge_ms: Nothing that is far is due before this.
        mark: The newest.
        ended_at: Where the last message ended.
        partitions: How many the topic had when its first owner looked.
        is_mixed: Keys stand here that should stand in another partition.
        repeated: Of those records, which are over and have no end yet: they repeat a command whose message has ended
            since, or are retries of a series that was replaced or cancelled.
        revisions: Of messages at these offsets, where they are not what the record says.
        answers: Op, answer, revision, due time, and until when to remember it, as in `Memory`.
        versions: Of ids that ended: the version, and until when to remember it.
        witness: The last record that was read.
        whole_ms: When it was known last that this is all that there is.
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
        """Everything below this offset had been read."""
        return self.witness.offset + 1


def checkpoint_of(
    state: ReadState, table: DictTable, placement: Placement, *, witness: Witness, now: int, whole_ms: int
) -> Checkpoint:
    """Return the checkpoint of an index, which tells all that was read beside far messages.

    Args:
        state: The index's standing records.
        table: Its messages.
        placement: Its partition.
        witness: The last record that was read.
        now: Epoch ms.
        whole_ms: When reading has last found the end of the partition, epoch ms.
    """
    standings, answers = state.standings, table.answers
    offsets = [standing.seen.offset for standing in standings.values()]
    offsets += [at for key in state.hidden if (at := standings[key].hidden_at) is not None]
    offsets += [asked.offset for asked in state.asked.values()]
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
    """Return, by offset, the revisions that are not what their records say."""
    found = [(state.standings.get(records.key_of(each)), table.find(each)) for each in state.raised]
    return {
        standing.seen.offset: entry.record.revision
        for standing, entry in found
        if entry is not None and standing is not None and standing.seen.is_put
    }

"""Stream readers for numbered entries: offsets, limits of batches, and gaps.

The subclasses of `Follower` are `EventReader`, which follows a journal, and `TopicReader`, which follows a topic.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from msgspec import Struct
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from aiodelay.errors import AiodelayError, ConfigurationError, masked_url

from .options import Options

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["MOST_ROWS", "STARTING", "EventsLostError", "Follower", "Following", "Piece", "following_of"]

log: logging.Logger = logging.getLogger("aiodelay.spark")

MOST_ROWS: Final = 1_000_000
LEAST_PIECE = 20_000
"""A task reads at least this many entries: with fewer, starting the task costs more than reading."""
STARTING: Final = "starting"
"""A key that only the first offset of a stream has."""


class EventsLostError(AiodelayError):
    """Entries of a journal, or records of a topic, were deleted before a stream had read them.

    Attributes:
        store: The masked URL of the store or topic.
        part: The part of the journal, or the partition of the topic.
        first: The first lost number.
        last: The last lost number.
        reason: The cause, as part of the error text.
    """

    store: str
    part: int
    first: int
    last: int
    reason: str

    def __init__(self, store: str, part: int, first: int, last: int, reason: str) -> None:
        super().__init__(store, part, first, last, reason)
        self.store, self.part, self.first, self.last, self.reason = store, part, first, last, reason

    def __str__(self) -> str:
        n = self.last - self.first + 1
        return (
            f"events {self.first} to {self.last} of part {self.part} of {self.store} ({n:,} in all) {self.reason} "
            "before they were read. Read more often, or keep more events. failOnDataLoss=false continues without them"
        )


class Following(Struct, frozen=True, kw_only=True):
    """The options of a stream reader; pickled with the reader.

    Attributes:
        store: The URL of the store or topic, as it was given.
        starting: The start of a stream without a checkpoint.
        most_rows: Most rows of a batch.
        pieces: About the number of tasks that read a batch.
        must_have_all: True if a gap is an error. A gap is a range of numbers that were deleted before they were read.
    """

    store: str
    starting: Literal["earliest", "latest"]
    most_rows: int
    pieces: int
    must_have_all: bool

    def __repr__(self) -> str:  # tracebacks that show variables must not show a password
        return f"{type(self).__name__}({masked_url(self.store)!r})"


def following_of(options: Options, most_rows: int = MOST_ROWS) -> dict[str, Any]:
    """Return the values of `Following` from the options, except `store`.

    Raises:
        ConfigurationError: An option is out of range.
    """
    return {
        "starting": options.choice("startingOffset", ("earliest", "latest"), "earliest"),
        "most_rows": options.integer("maxRowsPerBatch", most_rows, 1, 10**9),
        "pieces": options.integer("partitions", 8, 1, 10_000),
        "must_have_all": options.flag("failOnDataLoss", default=True),
    }


class Piece(InputPartition):
    """A range of numbers of one part, for one task."""

    def __init__(self, part: int, first: int, end: int) -> None:
        super().__init__((part, first, end))
        self.part: int = part
        self.span: range = range(first, end)


class Follower(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows a source whose parts have numbered entries.

    A subclass returns the numbers that exist (`spans`), and reads the entries of a range of numbers (`batches`).

    An offset has the next number of each part, such as `{"0": 17}`. A stream begins at the offset
    `{"starting": "earliest"}`, which never changes. The first batch of a stream is empty, and ends at an offset with
    the real numbers. So a batch that runs again after a kill begins at the same number.

    Args:
        following: The options of the stream.
    """

    def __init__(self, following: Following) -> None:
        self._following = following
        self._target: Mapping[int, range] | None = None

    def spans(self) -> Mapping[int, range]:
        """Raise `NotImplementedError`. A subclass returns the numbers that exist now, by part.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        raise NotImplementedError

    def batches(self, piece: Piece) -> AsyncGenerator[pa.RecordBatch]:
        """Raise `NotImplementedError`. A subclass yields the rows of a piece; each read yields the same rows.

        Raises:
            EventsLostError: Some rows were deleted.
            StoreUnavailableError: The store did not answer.
        """
        raise NotImplementedError

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a piece to Spark."""
        assert isinstance(partition, Piece)
        with asyncio.Runner() as runner:
            batches = self.batches(partition)
            try:
                while (batch := runner.run(anext(batches, None))) is not None:
                    yield batch
            finally:
                runner.run(batches.aclose())

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the first offset of a stream without a checkpoint."""
        return {STARTING: self._following.starting}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - as above
        """Return the limit of a batch."""
        return ReadMaxRows(self._following.most_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - as above
        """Fix the end of the run at the numbers that exist now."""
        self._target = self.spans()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - as above
        """Return the end of the batch that begins at `start`.

        Raises:
            ConfigurationError: `start` belongs to another source.
            EventsLostError: Entries at `start` were deleted.
            StoreUnavailableError: The store did not answer.
        """
        spans = self._target or self.spans()
        if STARTING in start:
            is_latest = start[STARTING] == "latest"
            return {f"{part}": span.stop if is_latest else span.start for part, span in spans.items()}
        if not all(map(str.isdigit, start)):
            raise ConfigurationError(
                "checkpoint", "another source's", "a checkpoint of this source, or a new checkpoint"
            )
        for name, begin in start.items():
            stop = spans.get(int(name), range(0)).stop
            if begin > stop:
                self.lost(int(name), range(stop, begin), "were lost (the journal was truncated or created again)")
        begins = {part: start.get(f"{part}", 0) for part in spans}
        if self._following.must_have_all:  # fail here, before Spark starts tasks
            for part, span in spans.items():
                if f"{part}" in start and begins[part] < span.start:
                    self.lost(part, range(begins[part], span.start))
        most = None if isinstance(limit, ReadAllAvailable) else cast("ReadMaxRows", limit).max_rows
        return {f"{part}": stop for part, stop in _shared(begins, spans, most).items()}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Split the range between two offsets into pieces of about the same size. The first batch has no pieces."""
        if STARTING in start:
            return []
        ranges = {int(part): range(_begin(start.get(part, 0), stop), stop) for part, stop in end.items()}
        total = sum(map(len, ranges.values()))
        size = max(LEAST_PIECE, -(-total // self._following.pieces))
        return [
            Piece(part, first, min(first + size, span.stop))
            for part, span in ranges.items()
            for first in range(span.start, span.stop, size)
        ]

    def lost(self, part: int, gone: range, reason: str = "were trimmed") -> None:
        """Log a warning about lost numbers, or raise if the options do not allow gaps.

        Raises:
            EventsLostError: A gap is an error.
        """
        error = EventsLostError(masked_url(self._following.store), part, gone.start, gone.stop - 1, reason)
        if self._following.must_have_all:
            raise error
        log.warning("%s", error)


def _begin(start: int, stop: int) -> int:
    """Return the first number to read: `start`, or 0 if the journal was created again and is shorter than `start`."""
    return start if start <= stop else 0


def _shared(begins: Mapping[int, int], spans: Mapping[int, range], most: int | None) -> dict[int, int]:
    """Return the end of each part, so that all parts have at most `most` rows together.

    Each part gets an equal share, at least one row: with more parts than `most`, the rows exceed `most`. A short part
    does not need its whole share, so the longer parts get more.
    """
    left = {part: max(0, span.stop - max(span.start, _begin(begins[part], span.stop))) for part, span in spans.items()}
    ends = {part: span.stop for part, span in spans.items()}
    if most is None or sum(left.values()) <= most:
        return ends
    room = most
    for n, part in enumerate(sorted(left, key=left.__getitem__)):
        share = min(left[part], max(1, room // (len(left) - n)))
        ends[part] = spans[part].stop - left[part] + share
        room = max(0, room - share)
    return ends

"""What streams that follow numbered parts have in common: where a batch begins and ends, and what is told of gaps."""

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
"""Fewer entries than this are not worth a task of their own."""
STARTING: Final = "starting"
"""Stands in the offset with which a stream begins, and in no other."""


class EventsLostError(AiodelayError):
    """Entries of a journal, or records of a topic, are gone that had not been read.

    Attributes:
        store: Its URL, masked.
        part: Of the journal; a partition of a topic.
        first: The first number that is gone.
        last: The last one.
        reason: How that came, if it is known.
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
            f"events {self.first} to {self.last} of part {self.part} of {self.store} ({n:,}) {self.reason} before they "
            "were read; read more often or have more kept; failOnDataLoss=false goes on without them"
        )


class Following(Struct, frozen=True, kw_only=True):
    """How a stream is followed; pickled with the reader.

    Attributes:
        store: URL of what is followed, as it was given.
        starting: Where a stream begins that has no checkpoint yet.
        most_rows: Most rows of a batch.
        pieces: Into about how many tasks a batch is split.
        must_have_all: Whether a gap is an error.
    """

    store: str
    starting: Literal["earliest", "latest"]
    most_rows: int
    pieces: int
    must_have_all: bool

    def __repr__(self) -> str:  # a password must not stand in a traceback that shows variables
        return f"{type(self).__name__}({masked_url(self.store)!r})"


def following_of(options: Options, most_rows: int = MOST_ROWS) -> dict[str, Any]:
    """Return what options say of how a stream is followed.

    Raises:
        ConfigurationError: One of them is out of range.
    """
    return {
        "starting": options.choice("startingOffset", ("earliest", "latest"), "earliest"),
        "most_rows": options.integer("maxRowsPerBatch", most_rows, 1, 10**9),
        "pieces": options.integer("partitions", 8, 1, 10_000),
        "must_have_all": options.flag("failOnDataLoss", default=True),
    }


class Piece(InputPartition):
    """Some of a part's numbers, for one task."""

    def __init__(self, part: int, first: int, end: int) -> None:
        super().__init__((part, first, end))
        self.part: int = part
        self.span: range = range(first, end)


class Follower(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows numbered parts; a subclass says what there is, and reads it.

    An offset names, by part, the number to be read next: `{"0": 17}`. A stream begins at `{"starting": "earliest"}`,
    the same each time it is asked, and its first batch is empty: it records where that was, so that a batch that is
    run again after a kill begins where it began before.

    Args:
        following: How.
    """

    def __init__(self, following: Following) -> None:
        self._following = following
        self._target: Mapping[int, range] | None = None

    def spans(self) -> Mapping[int, range]:
        """Return the numbers that there are, by part.

        Raises:
            StoreUnavailableError: No answer.
        """
        raise NotImplementedError

    def batches(self, piece: Piece) -> AsyncGenerator[pa.RecordBatch]:
        """Yield the rows of a piece; the same, however often it is read.

        Raises:
            EventsLostError: Some of them are gone.
            StoreUnavailableError: No answer.
        """
        raise NotImplementedError

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield what `batches` does, to Spark."""
        assert isinstance(partition, Piece)
        with asyncio.Runner() as runner:
            batches = self.batches(partition)
            try:
                while (batch := runner.run(anext(batches, None))) is not None:
                    yield batch
            finally:
                runner.run(batches.aclose())

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return where a stream begins that has no checkpoint yet."""
        return {STARTING: self._following.starting}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - as above
        """Return the most rows of a batch."""
        return ReadMaxRows(self._following.most_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - as above
        """Read up to where the parts end now."""
        self._target = self.spans()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - as above
        """Return where a batch ends that begins at `start`.

        Raises:
            ConfigurationError: `start` is of another source.
            EventsLostError: What stands at `start` is gone.
            StoreUnavailableError: No answer.
        """
        spans = self._target or self.spans()
        if STARTING in start:
            is_latest = start[STARTING] == "latest"
            return {f"{part}": span.stop if is_latest else span.start for part, span in spans.items()}
        if not all(map(str.isdigit, start)):
            raise ConfigurationError(
                "checkpoint", "another source's", "one that was begun with this source, or a new one"
            )
        for name, begin in start.items():
            stop = spans.get(int(name), range(0)).stop
            if begin > stop:
                self.lost(int(name), range(stop, begin), "are not there: the journal was cut off or made anew")
        begins = {part: start.get(f"{part}", 0) for part in spans}
        if self._following.must_have_all:  # before tasks are started that would find it
            for part, span in spans.items():
                if f"{part}" in start and begins[part] < span.start:
                    self.lost(part, range(begins[part], span.start))
        most = None if isinstance(limit, ReadAllAvailable) else cast("ReadMaxRows", limit).max_rows
        return {f"{part}": stop for part, stop in _shared(begins, spans, most).items()}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Split what stands between two offsets into pieces of about the same size; a stream's first batch has none."""
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
        """Tell of numbers that are gone.

        Raises:
            EventsLostError: None of them may be.
        """
        error = EventsLostError(masked_url(self._following.store), part, gone.start, gone.stop - 1, reason)
        if self._following.must_have_all:
            raise error
        log.warning("%s", error)


def _begin(start: int, stop: int) -> int:
    """Return where a range begins: of a journal that was made anew, at its beginning."""
    return start if start <= stop else 0


def _shared(begins: Mapping[int, int], spans: Mapping[int, range], most: int | None) -> dict[int, int]:
    """Return where each part's share of at most so many rows ends; what a part does not use the others get."""
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

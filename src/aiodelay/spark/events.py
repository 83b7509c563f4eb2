"""`table=events`: what became of messages, as a stream whose every part is read from an exact place to another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast

import pyarrow as pa
from msgspec import Struct
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from aiodelay.errors import AiodelayError, ConfigurationError, UnsupportedByStoreError, masked_url, shortened
from aiodelay.model import JournalEntry
from aiodelay.ports import Followed, Trail
from aiodelay.registry import open_store

from .options import Options, store_url

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["EventReader", "EventsLostError", "stream_reader_of"]

log: logging.Logger = logging.getLogger("aiodelay.spark")

T = TypeVar("T")
MOST_ROWS: Final = 1_000_000
LEAST_PIECE = 20_000
"""Fewer entries than this are not worth a task of their own."""
STARTING: Final = "starting"

_MS = pa.timestamp("us", tz="UTC")
_COLUMNS: Final[Mapping[str, tuple[str, pa.DataType, Callable[[int, JournalEntry], Any]]]] = {
    "partition": ("int", pa.int32(), lambda part, _: part),
    "number": ("bigint", pa.int64(), lambda _, entry: entry.number),
    "at": ("timestamp", _MS, lambda _, entry: entry.at_ms * 1000),
    "event": ("string", pa.string(), lambda _, entry: entry.event),
    "id": ("string", pa.string(), lambda _, entry: entry.id),
    "revision": ("bigint", pa.int64(), lambda _, entry: entry.revision),
    "lane": ("string", pa.string(), lambda _, entry: entry.lane),
    "due_at": ("timestamp", _MS, lambda _, entry: entry.due_ms * 1000),
    "attempt": ("int", pa.int32(), lambda _, entry: entry.attempt),
    "detail": ("string", pa.string(), lambda _, entry: entry.detail or None),
}
"""By name, as `schemas.EVENTS` has them: Spark's type, Arrow's, and the value."""


class EventsLostError(AiodelayError):
    """Entries of a journal are gone that had not been read.

    Attributes:
        store: Its URL, masked.
        part: Of the journal; a partition of a history topic.
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


class _Settings(Struct, frozen=True, kw_only=True):
    """What the options say; pickled with the reader."""

    store: str
    namespace: str
    starting: Literal["earliest", "latest"]
    most_rows: int
    pieces: int
    must_have_all: bool

    def __repr__(self) -> str:  # a password must not stand in a traceback that shows variables
        return f"_Settings({masked_url(self.store)!r})"


class _Piece(InputPartition):
    """Some of a part's numbers, for one task."""

    def __init__(self, part: int, first: int, end: int) -> None:
        super().__init__((part, first, end))
        self.part, self.span = part, range(first, end)


class EventReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows a journal.

    An offset names, by part, the number to be read next: `{"0": 17}`. A stream begins at `{"starting": "earliest"}`,
    the same each time it is asked, and its first batch is empty: it records where that was, so that a batch that is
    run again after a kill begins where it began before.

    Args:
        settings: From the options.
        columns: Which, in order, as Spark expects them.
    """

    def __init__(self, settings: _Settings, columns: pa.Schema) -> None:
        self._settings, self._columns = settings, columns
        self._target: Mapping[int, range] | None = None

    # --- on the driver ------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return where a stream begins that has no checkpoint yet."""
        return {STARTING: self._settings.starting}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - as above
        """Return the most rows of a batch."""
        return ReadMaxRows(self._settings.most_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - as above
        """Read up to where the journal ends now."""
        self._target = self._spans()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - as above
        """Return where a batch ends that begins at `start`.

        Raises:
            EventsLostError: What stands at `start` is gone.
            StoreUnavailableError: No answer.
        """
        spans = self._target or self._spans()
        if STARTING in start:
            is_latest = start[STARTING] == "latest"
            return {f"{part}": span.stop if is_latest else span.start for part, span in spans.items()}
        begins = {part: start.get(f"{part}", 0) for part in spans}
        for part, span in spans.items():
            if begins[part] > span.stop:
                self._lost(part, range(span.stop, begins[part]), "are not there: the journal was cut off or made anew")
        if self._settings.must_have_all:  # before tasks are started that would find it
            for part, span in spans.items():
                if f"{part}" in start and begins[part] < span.start:
                    self._lost(part, range(begins[part], span.start))
        most = None if isinstance(limit, ReadAllAvailable) else cast("ReadMaxRows", limit).max_rows
        return {f"{part}": stop for part, stop in _shared(begins, spans, most).items()}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Split what stands between two offsets into pieces of about the same size; a stream's first batch has none."""
        if STARTING in start:
            return []
        ranges = {int(part): range(_begin(start.get(part, 0), stop), stop) for part, stop in end.items()}
        total = sum(map(len, ranges.values()))
        size = max(LEAST_PIECE, -(-total // self._settings.pieces))
        return [
            _Piece(part, first, min(first + size, span.stop))
            for part, span in ranges.items()
            for first in range(span.start, span.stop, size)
        ]

    def _spans(self) -> Mapping[int, range]:
        async def ask(trail: Trail) -> Mapping[int, range]:
            return await trail.spans()

        return _run(self._settings, ask)

    # --- in a task ----------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a piece's entries; the same, however often it is read.

        Raises:
            EventsLostError: Some of them are gone.
            StoreUnavailableError: No answer.
        """
        assert isinstance(partition, _Piece)
        part = partition.part
        with asyncio.Runner() as runner:
            batches = self._batches(partition)
            try:
                while (entries := runner.run(anext(batches, None))) is not None:
                    if entries:
                        yield _batch(part, entries, self._columns)
            finally:
                runner.run(batches.aclose())

    async def _batches(self, piece: _Piece) -> AsyncGenerator[Sequence[JournalEntry]]:
        async with _trail(self._settings) as trail:
            async for entries in trail.entries(piece.part, piece.span, lambda gone: self._lost(piece.part, gone)):
                yield entries

    def _lost(self, part: int, gone: range, reason: str = "were trimmed") -> None:
        error = EventsLostError(masked_url(self._settings.store), part, gone.start, gone.stop - 1, reason)
        if self._settings.must_have_all:
            raise error
        log.warning("%s", error)


def stream_reader_of(given: Mapping[str, str], schema: StructType) -> EventReader:
    """Return what follows the events of the store that the options name.

    Raises:
        ConfigurationError: An option is unknown or out of range; the table cannot be followed; a column is unknown, or
            of another type.
        UnsupportedByStoreError: The store keeps no journal.
    """
    options = Options(given)
    table = options.choice("table", ("messages", "dead", "done", "events"), "messages")
    if table != "events":
        raise ConfigurationError("option 'table'", shortened(table), "events: other tables are read, not followed")
    settings = _Settings(
        store=options.required("store", "redis://localhost:6379/0?journal=100000"),
        namespace=options.text("namespace", "default") or "default",
        starting=cast("Any", options.choice("startingOffset", ("earliest", "latest"), "earliest")),
        most_rows=options.integer("maxRowsPerBatch", MOST_ROWS, 1, 10**9),
        pieces=options.integer("partitions", 8, 1, 10_000),
        must_have_all=options.flag("failOnDataLoss", default=True),
    )
    options.finish()
    _followed(settings).trail()
    return EventReader(settings, _checked(schema))


def _checked(schema: StructType) -> pa.Schema:
    columns = []
    for field in schema.fields:
        if field.name not in _COLUMNS:
            raise ConfigurationError("column", shortened(field.name), ", ".join(_COLUMNS))
        (kind, arrow, _), given = _COLUMNS[field.name], field.dataType.simpleString()
        if given != kind:
            raise ConfigurationError(f"type of column {field.name!r}", given, kind)
        columns.append(pa.field(field.name, arrow, field.nullable))
    return pa.schema(columns)


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


def _batch(part: int, entries: Sequence[JournalEntry], columns: pa.Schema) -> pa.RecordBatch:
    arrays = []
    for name in columns.names:
        _, kind, value = _COLUMNS[name]
        values = [value(part, entry) for entry in entries]
        try:
            arrays.append(pa.array(values, kind))
        except UnicodeEncodeError:  # text that another program wrote
            arrays.append(pa.array([each and each.encode(errors="backslashreplace").decode() for each in values], kind))
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


def _followed(settings: _Settings) -> Followed:
    store = open_store(store_url(settings.store), namespace=settings.namespace, clock=None)
    if not isinstance(store, Followed):
        raise UnsupportedByStoreError(
            "table=events", f"{masked_url(settings.store)}", "a store of Redis, SQLite or Kafka"
        )
    return store


@asynccontextmanager
async def _trail(settings: _Settings) -> AsyncGenerator[Trail]:
    async with _followed(settings).trail() as trail:
        yield trail


def _run(settings: _Settings, ask: Callable[[Trail], Coroutine[Any, Any, T]]) -> T:
    async def asked() -> T:
        async with _trail(settings) as trail:
            return await ask(trail)

    return asyncio.run(asked())

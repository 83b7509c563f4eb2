"""The stream of `table=events`: the entries of a store's journal.

A task reads an exact range of numbers of one part of the journal. So a repeated batch has the same entries.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa

from aiodelay.backends.registry import open_store
from aiodelay.core.validation import check_namespace
from aiodelay.core.values import JournalEntry
from aiodelay.errors import ConfigurationError, UnsupportedByStoreError, masked_url, shortened
from aiodelay.ports import JournalReader, Store

from .following import Follower, Following, Piece, following_of
from .options import Options, store_url

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["EventReader", "stream_reader_of"]

T = TypeVar("T")
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
"""The columns of `schemas.EVENTS` by name: Spark's type, Arrow's type, and how to get the value from part and entry."""


class _Settings(Following, frozen=True, kw_only=True):
    """The options of the stream; pickled with the reader."""

    namespace: str


class EventReader(Follower):
    """Follows the journal of a store.

    Args:
        settings: The options of the stream.
        columns: The wanted columns, in Spark's order.
    """

    def __init__(self, settings: _Settings, columns: pa.Schema) -> None:
        super().__init__(settings)
        self._settings, self._columns = settings, columns

    def spans(self) -> Mapping[int, range]:
        """Return the numbers of the entries that the journal has now, by part of the journal."""

        async def ask(reader: JournalReader) -> Mapping[int, range]:
            return await reader.spans()

        return _run(self._settings, ask)

    async def batches(self, piece: Piece) -> AsyncGenerator[pa.RecordBatch]:
        """Yield the entries of a piece in record batches."""
        async with _journal_reader(self._settings) as reader:
            async for entries in reader.entries(piece.part, piece.span, lambda gone: self.lost(piece.part, gone)):
                if entries:
                    yield _batch(piece.part, entries, self._columns)


def stream_reader_of(given: Mapping[str, str], schema: StructType) -> EventReader:
    """Return the stream reader of the events of the store that the options name.

    Raises:
        ConfigurationError: An option is unknown or out of range, the table is not `events`, or a column is unknown or
            has another type.
        UnsupportedByStoreError: The store keeps no journal.
    """
    options = Options(given)
    table = options.choice("table", ("messages", "dead", "done", "events"), "messages")
    if table != "events":
        raise ConfigurationError("option 'table'", shortened(table), "events; read the other tables with spark.read")
    settings = _Settings(
        store=options.required("store", "redis://localhost:6379/0?journal=100000"),
        namespace=check_namespace(options.text("namespace", "default")),
        **following_of(options),
    )
    options.finish()
    _followed(settings).journal_reader()
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


def _batch(part: int, entries: Sequence[JournalEntry], columns: pa.Schema) -> pa.RecordBatch:
    arrays = []
    for name in columns.names:
        _, kind, value = _COLUMNS[name]
        values = [value(part, entry) for entry in entries]
        try:
            arrays.append(pa.array(values, kind))
        except UnicodeEncodeError:  # another program wrote text that is not valid UTF-8
            arrays.append(pa.array([each and each.encode(errors="backslashreplace").decode() for each in values], kind))
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


def _followed(settings: _Settings) -> Store:
    store = open_store(store_url(settings.store), namespace=settings.namespace, clock=None)
    if not store.traits.durable:
        raise UnsupportedByStoreError(
            "store of table=events", f"{masked_url(settings.store)}", "a store of Redis, SQLite or Kafka"
        )
    return store


@asynccontextmanager
async def _journal_reader(settings: _Settings) -> AsyncGenerator[JournalReader]:
    async with _followed(settings).journal_reader() as reader:
        yield reader


def _run(settings: _Settings, ask: Callable[[JournalReader], Coroutine[Any, Any, T]]) -> T:
    async def asked() -> T:
        async with _journal_reader(settings) as reader:
            return await ask(reader)

    return asyncio.run(asked())

"""Batch reading of a store's table: the driver plans the parts, executors read them. Nothing is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec import structs
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)

from aiodelay.backends.registry import open_store
from aiodelay.core.durations import to_epoch_ms
from aiodelay.core.table_scan import MOST_PARTS, Scan
from aiodelay.core.validation import check_namespace
from aiodelay.errors import ConfigurationError, InputError, UnsupportedByStoreError, masked_url, shortened
from aiodelay.operations.json_shapes import read_time, time_shape
from aiodelay.ports import Scannable

from .columns import Layout
from .options import Options, read_table, store_url

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["PushingReader", "Reader", "reader_of"]


def reader_of(given: Mapping[str, str], schema: StructType) -> DataSourceReader:
    """Return the reader of the table that the options name.

    Raises:
        ConfigurationError: An option or a column is wrong. The error names the option or column, and allowed values.
    """
    table = read_table(given)
    if table == "events":
        raise ConfigurationError(
            "option 'table'", "events, which is read as a stream", "spark.readStream, or another table"
        )
    options = Options(given)
    options.text("table")
    store = options.required("store", "redis://localhost:6379")
    namespace = check_namespace(options.text("namespace", "default"))
    pushes = options.flag("pushdown")
    scan = Scan(
        table=table,
        columns=Layout(table, schema).wanted,
        lane=options.text("lane"),
        from_ms=_instant(options, "dueFrom"),
        to_ms=_instant(options, "dueTo"),
        ids=_ids(options),
        parts=options.integer("partitions", 0, 0, MOST_PARTS),
    )
    options.finish()
    if table == "done" and (scan.lane, scan.from_ms, scan.to_ms) != (None, None, None):
        raise ConfigurationError(
            "option 'lane', 'dueFrom' or 'dueTo'",
            "given with table done",
            "only ids, because the table has no lanes and no due times",
        )
    if scan.from_ms is not None and scan.to_ms is not None and scan.from_ms > scan.to_ms:
        raise ConfigurationError("option 'dueFrom'", time_shape(scan.from_ms), f"up to dueTo, {time_shape(scan.to_ms)}")
    kind = PushingReader if pushes else Reader
    return kind(store, namespace, schema, scan)


class Reader(DataSourceReader):
    """Reads one table of a store.

    Args:
        url: The URL of the store. Each process resolves `env:NAME` and `file:PATH` itself.
        namespace: The namespace of the messages.
        schema: The wanted columns.
        scan: The table, and the conditions on the messages to read.
    """

    def __init__(self, url: str, namespace: str, schema: StructType, scan: Scan) -> None:
        self._url, self._namespace, self._schema, self._scan = url, namespace, schema, scan

    def partitions(self) -> list[InputPartition]:
        """Split the table into parts, on the driver.

        Raises:
            StoreUnavailableError: The store does not answer, or there is no such file or topic.
        """
        return [InputPartition(part) for part in self._store().scan_parts(self._scan)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the rows of a part as Arrow record batches, on an executor."""
        if partition.value is None:  # Spark makes this partition for a table without parts
            return
        layout = Layout(self._scan.table, self._schema)
        for columns in self._store().scan_part(self._scan, partition.value):
            batch = layout.batch(columns)
            if batch.num_rows:
                yield batch

    def _store(self) -> Scannable:
        url = store_url(self._url)
        store = open_store(url, namespace=self._namespace, clock=None)
        if not isinstance(store, Scannable):
            raise UnsupportedByStoreError("store to read in parts", masked_url(url), "redis:, sqlite: or kafka:")
        return store


class PushingReader(Reader):
    """A reader that also takes filters on ids and due times from Spark.

    Spark refuses such a reader unless `spark.sql.python.filterPushdown.enabled` is true.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Narrow the scan by the filters, and return all filters so that Spark checks the rows again.

        Spark must check due times, because the scan compares ms and not µs. Spark must check ids, because (at least up
        to 4.3) it may use the filters of one query of a frame for another query.
        """
        for each in filters:
            self._scan = _with_filter(self._scan, each) or self._scan
            yield each


def _with_filter(scan: Scan, given: Filter) -> Scan | None:
    """Return the scan, narrowed by a filter. If the filter cannot narrow the scan, return None."""
    narrowed: Scan | None = None
    match given:
        case EqualTo(("id",), str(value)):
            narrowed = _with_ids(scan, [value])
        case In(("id",), values) if all(isinstance(value, str) for value in values):
            narrowed = _with_ids(scan, cast("Iterable[str]", values))
        case EqualTo(("due_at",), datetime() as at):
            narrowed = _within(scan, at, at)
        case GreaterThan(("due_at",), datetime() as at) | GreaterThanOrEqual(("due_at",), datetime() as at):
            narrowed = _within(scan, at, None)
        case LessThan(("due_at",), datetime() as at) | LessThanOrEqual(("due_at",), datetime() as at):
            narrowed = _within(scan, None, at)
    return narrowed


def _with_ids(scan: Scan, ids: Iterable[str]) -> Scan:
    wanted = dict.fromkeys(ids)
    known = tuple(wanted) if scan.ids is None else tuple(each for each in scan.ids if each in wanted)
    return structs.replace(scan, ids=known)


def _within(scan: Scan, first: datetime | None, last: datetime | None) -> Scan:
    """Narrow a scan to due times from `first` to `last`, both included."""
    from_ms, to_ms = scan.from_ms, scan.to_ms
    if first is not None:
        at_ms = to_epoch_ms(first, field="due_at")
        from_ms = at_ms if from_ms is None else max(from_ms, at_ms)
    if last is not None:
        at_ms = to_epoch_ms(last, field="due_at") + 1
        to_ms = at_ms if to_ms is None else min(to_ms, at_ms)
    return structs.replace(scan, from_ms=from_ms, to_ms=to_ms)


# --- options ----------------------------------------------------------------------------------------------


def _instant(options: Options, name: str) -> int | None:
    text = options.text(name)
    try:
        at = read_time(text, f"option {name!r}")
        return None if at is None else to_epoch_ms(at, field=f"option {name!r}")
    except InputError as error:
        raise ConfigurationError(error.field, error.value, error.allowed) from error


def _ids(options: Options) -> tuple[str, ...] | None:
    allowed = "ids separated by commas, or a JSON list of texts; [] for no ids"
    is_given, text = options.has("ids"), options.text("ids")
    if text is None:
        if is_given:  # a program with an empty list must not read the whole table
            raise ConfigurationError("option 'ids'", "blank", allowed)
        return None
    if not text.startswith("["):
        found = [each.strip() for each in text.split(",")]
    else:
        try:
            found = msgspec.json.decode(text, type=list[str])
        except msgspec.MsgspecError:
            raise ConfigurationError("option 'ids'", shortened(text), allowed) from None
    return tuple(dict.fromkeys(each for each in found if each))

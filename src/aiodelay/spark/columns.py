"""Conversion of a store's columns into the Arrow columns of a table, for the readers of `format("aiodelay")`."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec
import pyarrow as pa

from aiodelay.core.table_scan import Columns
from aiodelay.core.validation import HANDLER_TARGET
from aiodelay.errors import ConfigurationError, shortened
from aiodelay.operations.json_shapes import stored_rule

from .schemas import SCHEMAS, Table

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["Layout"]

_COLUMN = re.compile(r"(\w+) (\w+(?:<[^>]*>)?)")
_ARROW: Final = {
    "string": pa.string(),
    "binary": pa.binary(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "array<string>": pa.list_(pa.field("element", pa.string())),
    "map<string,binary>": pa.map_(pa.string(), pa.binary()),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
}
_LATE = ("deliver", "drop", "dead_letter")


class Layout:
    """The columns of a table that a query wants, and their conversion.

    Args:
        table: A table of the data source.
        schema: The wanted columns of the table, in any order.

    Raises:
        ConfigurationError: The table does not have a column, or has it with another type. The error names the column.
    """

    wanted: tuple[str, ...]
    """The store's columns that the conversion needs, by their names in `aiodelay.core.table_scan`."""

    def __init__(self, table: Table, schema: StructType) -> None:
        known = _types_of(table)
        for field in schema.fields:
            given, allowed = field.dataType.simpleString(), known.get(field.name)
            if allowed is None:
                raise ConfigurationError(f"column of table {table}", shortened(field.name), ", ".join(known))
            if given != allowed:
                raise ConfigurationError(f"type of column {field.name!r}", given, allowed)
        if not schema.fields:
            raise ConfigurationError("schema", "empty", f"some of {', '.join(known)}")
        self._sources = [_SOURCES.get(field.name) or _Source((field.name,)) for field in schema.fields]
        self._schema = pa.schema(
            [pa.field(each.name, _ARROW[known[each.name]], nullable=each.nullable) for each in schema.fields]
        )
        self.wanted = tuple(dict.fromkeys(name for source in self._sources for name in source.needs))

    def batch(self, columns: Columns) -> Any:  # noqa: ANN401 - a pyarrow.RecordBatch, which has no types
        """Convert a store's columns into a record batch."""
        arrays = [
            _arrow(source.make(*(columns[name] for name in source.needs)), field.type)
            for source, field in zip(self._sources, self._schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _types_of(table: Table) -> dict[str, str]:
    return {
        name: type_.lower().replace(" ", "") for name, type_ in _COLUMN.findall(SCHEMAS[table].replace(" NOT NULL", ""))
    }


# --- values -----------------------------------------------------------------------------------------------


def _as_it_is(values: Sequence[Any]) -> Sequence[Any]:
    return values


class _Source(NamedTuple):
    """The origin of a column: the store's columns that it needs, and the function that converts them."""

    needs: tuple[str, ...]
    make: Callable[..., Sequence[Any]] = _as_it_is


def _to(lanes: Sequence[str], addresses: Sequence[str]) -> Sequence[str]:
    return [
        f"{lane}:{address}" if address else f"{HANDLER_TARGET}:{lane}"
        for lane, address in zip(lanes, addresses, strict=True)
    ]


def _type(
    types: Sequence[str], lanes: Sequence[str], addresses: Sequence[str], encodings: Sequence[str]
) -> Sequence[str | None]:
    return [
        type_ or (None if address or not encoding else lane)
        for type_, lane, address, encoding in zip(types, lanes, addresses, encodings, strict=True)
    ]


def _payload(payloads: Sequence[bytes], encodings: Sequence[str]) -> Sequence[bytes | None]:
    if "null" not in encodings:
        return payloads
    return [None if encoding == "null" else payload for payload, encoding in zip(payloads, encodings, strict=True)]


def _rule(rules: Sequence[Mapping[str, str | int] | None]) -> Sequence[str | None]:
    return [None if rule is None else msgspec.json.encode(stored_rule(rule)).decode() for rule in rules]


def _late(actions: Sequence[int]) -> Sequence[str]:
    return [_LATE[action] for action in actions]


def _or_none(values: Sequence[int]) -> Sequence[int | None]:
    return [value or None for value in values]


_SOURCES: Final = {
    "due_at": _Source(("due_ms",)),
    "next_attempt_at": _Source(("place_ms",)),
    "given_up_at": _Source(("at_ms",)),
    "until": _Source(("until_ms",)),
    "expires_at": _Source(("expires_ms",), _or_none),
    "to": _Source(("lane", "address"), _to),
    "type": _Source(("type", "lane", "address", "encoding"), _type),
    "payload": _Source(("payload", "encoding"), _payload),
    "late": _Source(("late",), _late),
    "rule": _Source(("rule",), _rule),
}
"""The columns of the table that need a conversion. Every other column is the store's column of the same name."""


# --- arrays -----------------------------------------------------------------------------------------------


def _arrow(values: Sequence[Any], type_: Any) -> Any:  # noqa: ANN401 - pyarrow has no types
    if pa.types.is_timestamp(type_):
        return _whole_numbers(values).cast(pa.timestamp("ms", tz="UTC")).cast(type_)
    if pa.types.is_map(type_):
        return _map_array(cast("Sequence[Mapping[str, Any]]", values), type_)
    if pa.types.is_integer(type_):
        return _integers(values, type_)
    return pa.array(values, type_)


def _whole_numbers(values: Sequence[int | None]) -> Any:  # noqa: ANN401 - as above
    if isinstance(values, array) and values.typecode == "q":
        return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(values)])
    return pa.array(values, pa.int64())


def _map_array(values: Sequence[Mapping[str, Any]], type_: Any) -> Any:  # noqa: ANN401 - as above
    if not any(values):
        empty = pa.array([], type_.key_type), pa.array([], type_.item_type)
        return pa.MapArray.from_arrays(pa.array([0] * (len(values) + 1), pa.int32()), *empty)
    offsets = pa.array([0, *accumulate(map(len, values))], pa.int32())
    keys = pa.array(list(chain.from_iterable(values)), type_.key_type)
    items = pa.array(list(chain.from_iterable(each.values() for each in values)), type_.item_type)
    return pa.MapArray.from_arrays(offsets, keys, items)


def _integers(values: Sequence[int | None], type_: Any) -> Any:  # noqa: ANN401 - as above
    """Return an Arrow array of integers.

    If another program has written a number that is too large for the type, the largest number of the type replaces it.
    """
    try:
        return _whole_numbers(values) if pa.types.is_int64(type_) else pa.array(values, type_)
    except (OverflowError, pa.ArrowInvalid):
        most = (1 << type_.bit_width - 1) - 1
        return pa.array([None if each is None else min(each, most) for each in values], type_)

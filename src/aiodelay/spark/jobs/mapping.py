"""The mapping of a frame's columns to the columns of a message, by name or by SQL expression."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from aiodelay.errors import ConfigurationError, cut, shortened
from aiodelay.spark.cold import WAS_DUE_AT
from aiodelay.spark.write_settings import NO_COLUMNS

__all__ = ["MAPPED", "conversions", "converted", "given", "mapped", "read_mapping", "read_zone"]

MAPPED: Final = ("id", "due_at", "payload", "to", "type", "encoding", "key", "headers", "version")
"""The columns that a mapping may give: the columns that the sender of a message decides."""

REQUIRED: Final = ("id", "due_at")
OFFSET: Final = r"(Z|[+-]\d{2}:?\d{2})\s*$"
"""A pattern for the offset at the end of a time as text. Without an offset, the text does not name an instant."""
_LOCAL: Final = r"\A\s*[\d-]+([T ][\d:.]*)?\s*\z"
"""A pattern for a time as text without any zone. Spark would read `09:00:00-05` or `09:00 EST` as a local time too."""

_INTEGERS = (ByteType, ShortType, IntegerType, LongType)
_NESTED = (StructType, MapType, ArrayType)
_HEADERS = MapType(StringType(), BinaryType())


def read_mapping(text: str) -> dict[str, str]:
    """Return the mapping of a text such as `id=order_id,due_at=remind_at,payload=struct(*)`.

    Commas in brackets, quotes and backticks do not separate entries.

    Raises:
        ConfigurationError: The text has another form, or names a column that messages do not have.
    """
    mapping: dict[str, str] = {}
    for part in _parts(text):
        name, equals, expression = (each.strip() for each in part.partition("="))
        if name in NO_COLUMNS:
            raise ConfigurationError("map", shortened(part), NO_COLUMNS[name])
        if not equals or not expression or name not in MAPPED:
            raise ConfigurationError("map", shortened(part), f"NAME=COLUMN, with NAME one of {', '.join(MAPPED)}")
        if name in mapping:
            raise ConfigurationError("map", f"given {name!r} twice", "each name once")
        mapping[name] = expression
    return mapping


def _parts(text: str) -> Iterator[str]:
    depth, quote, start = 0, "", 0
    for at, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"`":
            quote = letter
        elif letter in "([":
            depth += 1
        elif letter in ")]":
            depth -= 1
        elif letter == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    yield text[start:]


def read_zone(timezone: str | None) -> str | None:
    """Check the name of a time zone and return it.

    Raises:
        ConfigurationError: There is no time zone of this name.
    """
    try:
        return None if timezone is None else ZoneInfo(timezone).key
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ConfigurationError("timezone", shortened(timezone), "a time zone, such as Europe/Berlin") from None


def mapped(
    frame: DataFrame, mapping: Mapping[str, str] | None = None, *, to: str | None = None, timezone: str | None = None
) -> DataFrame:
    """Return a frame with the columns of a message and their types. Values that cannot be read are null.

    Args:
        frame: Any rows.
        mapping: For each column of a message, a column of the frame or an SQL expression. None = the columns of the
            frame that have the names of message columns.
        to: The destination of rows whose column `to` is null or missing.
        timezone: The time zone of times without an offset. None = a column of such times is an error, and a text with
            such a time becomes null.

    Raises:
        ConfigurationError: A column is missing, or has a type that cannot be converted.
    """
    return converted(given(frame, mapping, to=to), timezone=timezone)


def given(
    frame: DataFrame,
    mapping: Mapping[str, str] | None = None,
    *,
    to: str | None = None,
    names: Collection[str] = MAPPED,
    required: Sequence[str] = REQUIRED,
) -> DataFrame:
    """Return a frame with only the columns of a message, not converted.

    Args:
        frame: Any rows.
        mapping: As for `mapped`.
        to: As for `mapped`.
        names: The columns that the result may have, in order.
        required: The columns that the result must have.

    Raises:
        ConfigurationError: A column is missing, or an expression is wrong.
    """
    named = {name: name for name in names if name in frame.columns} if mapping is None else mapping
    if missing := [name for name in required if name not in named]:
        raise ConfigurationError("map", f"missing {missing[0]!r}", f"{missing[0]}=COLUMN; columns: {_listed(frame)}")
    columns = [_column(frame, name, named[name]) for name in names if name in named]
    found = frame.select(*columns)
    if to is None:
        return found
    if "to" not in found.columns:
        return found.withColumn("to", F.lit(to))
    return found.withColumn("to", F.coalesce("to", F.lit(to)))


def _column(frame: DataFrame, name: str, text: str) -> Column:
    """Return a column by its name, else by an SQL expression that Spark has checked."""
    quoted = text.replace("`", "``")
    column = (F.col(f"`{quoted}`") if text in frame.columns else F.expr(text)).alias(name)
    try:
        found = frame.select(column).schema
    except (AnalysisException, ParseException):
        allowed = f"a column or an SQL expression of {_listed(frame)}"
        raise ConfigurationError(f"map {name}", shortened(text), allowed) from None
    if len(found) != 1:
        raise ConfigurationError(
            f"map {name}", f"{len(found)} columns ({shortened(text)})", "one column, such as struct(*)"
        )
    return column


def _listed(frame: DataFrame) -> str:
    return cut(", ".join(frame.columns), 300)


def converted(found: DataFrame, *, timezone: str | None = None) -> DataFrame:
    """Convert the columns of a frame that `given` returned to the types of a message. Nested payloads become JSON.

    Raises:
        ConfigurationError: A column has a type that cannot be converted.
    """
    return found.select(*(column.alias(name) for name, column in conversions(found, timezone=timezone).items()))


def conversions(found: DataFrame, *, timezone: str | None = None) -> dict[str, Column]:
    """Return, for each column of a frame that `given` returned, the expression that converts the column.

    Raises:
        ConfigurationError: A column has a type that cannot be converted.
    """
    kinds = {field.name: field.dataType for field in found.schema}
    zone = read_zone(timezone)
    columns: dict[str, Column] = {
        name: convert(name, kinds[name], zone) for name, convert in _CONVERSIONS.items() if name in kinds
    }
    if "encoding" not in kinds and isinstance(kinds.get("payload"), _NESTED):
        columns["encoding"] = F.lit("json")
    return columns


def _text(name: str, kind: DataType, _: str | None) -> Column:
    _check(name, kind, "STRING", StringType)
    return F.col(name)


def _id(name: str, kind: DataType, _: str | None) -> Column:
    _check(name, kind, "STRING or an integer", StringType, *_INTEGERS)
    return F.col(name).cast("string")


def _due(name: str, kind: DataType, zone: str | None) -> Column:
    _check(name, kind, "TIMESTAMP, or STRING with an offset", StringType, TimestampType, TimestampNTZType)
    if isinstance(kind, TimestampNTZType) and zone is None:
        allowed = "TIMESTAMP; or give timezone, the time zone of these times"
        raise ConfigurationError(f"column {name!r}", "TIMESTAMP_NTZ, which is no instant", allowed)
    if isinstance(kind, TimestampType):
        return F.col(name)
    if isinstance(kind, TimestampNTZType):
        return _in_zone(F.col(name), f"{zone}")
    instant = F.when(F.col(name).rlike(OFFSET), F.try_to_timestamp(name))
    if zone is None:
        return instant
    local = F.when(F.col(name).rlike(_LOCAL), F.col(name).try_cast("timestamp_ntz"))
    return instant.otherwise(_in_zone(local, zone))


def _in_zone(local: Column, zone: str) -> Column:
    """Return the instant of a local time. If it exists twice because clocks are set back, return the later instant.

    With the earlier instant, the message could be early. The later instant has the offset that is valid in the zone
    three hours later. The expression does not use the session's time zone, in which other local times exist twice.
    """
    here, utc, hours = F.lit(zone), F.lit("UTC"), F.expr("INTERVAL 3 HOURS")
    first = F.convert_timezone(here, utc, local)
    second = F.convert_timezone(here, utc, local + hours) - hours
    is_there = F.convert_timezone(utc, here, second) == local
    instant = F.when(is_there, F.greatest(first, second)).otherwise(first)
    return F.concat(instant.cast("string"), F.lit("Z")).try_cast("timestamp")


def _payload(name: str, kind: DataType, _: str | None) -> Column:
    _check(name, kind, "BINARY, STRING, STRUCT, MAP or ARRAY", BinaryType, StringType, *_NESTED)
    if isinstance(kind, _NESTED):
        return F.to_json(name, {"ignoreNullFields": "false"}).cast("binary")
    return F.col(name).cast("binary")


def _key(name: str, kind: DataType, _: str | None) -> Column:
    _check(name, kind, "BINARY or STRING", BinaryType, StringType)
    return F.col(name).cast("binary")


def _headers(name: str, kind: DataType, _: str | None) -> Column:
    _check(name, kind, "MAP<STRING, BINARY>", MapType)
    return F.col(name).cast(_HEADERS)


def _version(name: str, kind: DataType, _: str | None) -> Column:
    _check(name, kind, "an integer", *_INTEGERS)
    return F.col(name).cast("bigint")


def _check(name: str, kind: DataType, allowed: str, *kinds: type[DataType]) -> None:
    if not isinstance(kind, kinds):
        raise ConfigurationError(f"column {name!r}", kind.simpleString().upper(), allowed)


_CONVERSIONS = {
    "id": _id,
    "due_at": _due,
    "payload": _payload,
    "to": _text,
    "type": _text,
    "encoding": _text,
    "key": _key,
    "headers": _headers,
    "version": _version,
    WAS_DUE_AT: _due,
}

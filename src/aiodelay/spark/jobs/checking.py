"""Checks of rows before they become messages: the rules of `aiodelay.core.validation` as Spark SQL expressions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it

from aiodelay.core.durations import MAX_HORIZON_MS
from aiodelay.core.validation import (
    MAX_ADDRESS_BYTES,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_ID_BYTES,
    MAX_KEY_BYTES,
    RESERVED_HEADERS,
)
from aiodelay.spark.cold import WAS_DUE_AT

from .mapping import conversions, converted

__all__ = ["DROPPED", "Rules", "accepted", "judged", "rejected"]

DROPPED: Final = ("repeated", "superseded")
"""Reasons to leave a good row out. `repeated`: an equal row was accepted. `superseded`: the id has a higher version."""

_CONTROL = r"[\x00-\x1f\x7f-\x9f\u2028\u2029]"
_OCCURRENCE = r"~[0-9]{10,}\z"
_SINK = r"\A[a-z][a-z0-9.+-]{0,63}:"
_TYPE = r"(?U)\A[^\s\x00-\x1f\x7f-\x9f:{}]{1,128}\z"
"""A pattern for a type name. With the flag U, its class of spaces has the spaces of Unicode too, as in Python."""
_HEADER = r"\A[A-Za-z0-9._-]{1,128}\z"
_RESERVED_HEADER = r"\A(?i)aiodelay-"
_ENCODINGS = ("", "json", "msgpack", "null")

_Check: TypeAlias = tuple[str, Column]
"""A reason, and the condition under which a row is rejected for this reason. A null condition rejects nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Rules for rows, in addition to the rules of every message.

    Attributes:
        now_ms: The current time for the checks of all rows, in epoch milliseconds.
        min_lead_ms: The least time from `now_ms` until the due time of a row. A shorter time is too soon.
        past_due: The rule for rows that are due in the past or too soon. `reject` rejects them. `now` accepts them with
            their due times: a message whose due time has passed is delivered at once.
        max_payload: Most bytes of a payload.
        conflict: The rule for rows with the same id and different contents. `insert` rejects all of them. `newer`
            accepts the row with the highest version; if several different rows have this version, it rejects them.
        timezone: The time zone of times without an offset.
    """

    now_ms: int
    min_lead_ms: int = 0
    past_due: Literal["reject", "now"] = "reject"
    max_payload: int = 262_144
    conflict: Literal["insert", "newer"] = "insert"
    timezone: str | None = None


def judged(found: DataFrame, rules: Rules) -> DataFrame:
    """Return the rows of `mapping.given` with the columns `reason` and `field`, which are null for accepted rows.

    Raises:
        ConfigurationError: A column has a type that cannot be converted.
    """
    message = conversions(found, timezone=rules.timezone)
    checks = [
        (field, *check)
        for field in _CHECKS
        if field in message
        for check in _CHECKS[field](message[field], F.col(field), rules)
    ]
    if "encoding" in message:
        checks.append(("encoding", "null", _has_wrong_null(message)))
    verdicts = [
        F.when(condition, F.struct(F.lit(reason).alias("reason"), F.lit(field).alias("field")))
        for field, reason, condition in checks
    ]
    checked = found.withColumn("_verdict", F.coalesce(*verdicts))
    return _without_duplicates(checked, message, rules)


def accepted(rows: DataFrame, rules: Rules) -> DataFrame:
    """Return the messages of the rows that `judged` accepted, each id once."""
    return converted(rows.where("reason IS NULL").drop("reason", "field"), timezone=rules.timezone)


def rejected(rows: DataFrame) -> DataFrame:
    """Return the rows that `judged` rejected, not converted, with `reason` and `field`."""
    return rows.where(F.col("reason").isNotNull() & ~F.col("reason").isin(*DROPPED))


def _without_duplicates(checked: DataFrame, message: Mapping[str, Column], rules: Rules) -> DataFrame:
    is_good = F.col("_verdict").isNull()
    own = F.concat(F.lit("\0"), F.monotonically_increasing_id().cast("string"))  # no accepted id begins with NUL
    version = F.coalesce(message["version"], F.lit(0)) if _counts_versions(message, rules) else F.lit(0).cast("bigint")
    values = [F.map_entries(column) if name == "headers" else column for name, column in message.items()]
    contents = [column for value in values for column in (value, value.isNull())]  # a hash leaves out each null
    same_id = Window.partitionBy("_id")
    rows = checked.withColumns(
        {"_id": F.when(is_good, message["id"]).otherwise(own), "_version": version, "_hash": F.xxhash64(*contents)}
    ).withColumn("_newest", F.max("_version").over(same_id))
    newest = F.when(F.col("_version") == F.col("_newest"), F.col("_hash"))
    rows = rows.withColumns(
        {
            "_differs": F.min(newest).over(same_id) != F.max(newest).over(same_id),
            "_place": F.row_number().over(same_id.orderBy(F.col("_version").desc(), "_hash")),
        }
    )
    reason = (
        F.when(~is_good, F.col("_verdict.reason"))
        .when(F.col("_version") < F.col("_newest"), "superseded")
        .when(F.col("_differs"), "duplicate")
        .when(F.col("_place") > 1, "repeated")
    )
    field = F.coalesce("_verdict.field", F.when(F.col("reason").isNotNull(), "id"))
    told = rows.withColumn("reason", reason).withColumn("field", field)
    return told.drop("_verdict", "_id", "_version", "_hash", "_newest", "_differs", "_place")


def _counts_versions(message: Mapping[str, Column], rules: Rules) -> bool:
    return rules.conflict == "newer" and "version" in message


# --- one function for each column; the first check that rejects a row gives the reason ------------------------


def _text(column: Column, most_bytes: int) -> Iterator[_Check]:
    yield "empty", F.octet_length(column) == 0
    yield "too_long", F.octet_length(column) > most_bytes
    yield "not_utf8", ~F.is_valid_utf8(column)
    yield "control_characters", column.rlike(_CONTROL)


def _id(column: Column, raw: Column, _: Rules) -> Iterator[_Check]:
    yield "missing", raw.isNull()
    yield from _text(column, MAX_ID_BYTES)
    yield "reserved", column.rlike(_OCCURRENCE)


def _due(column: Column, raw: Column, rules: Rules) -> Iterator[_Check]:
    yield "missing", raw.isNull()
    yield "unreadable", column.isNull()
    if rules.past_due == "reject":
        yield "past_due", column < _instant(rules.now_ms)
        yield "too_soon", column < _instant(rules.now_ms + rules.min_lead_ms)
    else:
        yield "before_1970", column < _instant(0)
    yield "too_far", column > _instant(rules.now_ms + MAX_HORIZON_MS)


def _instant(ms: int) -> Column:
    return F.timestamp_millis(F.lit(ms))


def _was_due(column: Column, raw: Column, _: Rules) -> Iterator[_Check]:
    yield "unreadable", raw.isNotNull() & column.isNull()


def _payload(column: Column, raw: Column, rules: Rules) -> Iterator[_Check]:
    yield "missing", raw.isNull()
    yield "too_large", F.octet_length(column) > rules.max_payload


def _to(column: Column, raw: Column, _: Rules) -> Iterator[_Check]:
    yield "missing", raw.isNull()
    address = F.regexp_replace(column, r"\A[^:]*:", "")
    yield "no_destination", ~column.rlike(_SINK) | (column.startswith("handler:") & ~address.rlike(_TYPE))
    yield from _text(address, MAX_ADDRESS_BYTES)


def _type(column: Column, _: Column, __: Rules) -> Iterator[_Check]:
    yield "no_type_name", ~column.rlike(_TYPE) | ~F.is_valid_utf8(column)


def _has_wrong_null(message: Mapping[str, Column]) -> Column:
    """Return whether the encoding is `null`, which means no payload and needs a key, for another message."""
    has_no_key = message["key"].isNull() if "key" in message else F.expr("true")
    return (message["encoding"] == "null") & ((F.octet_length(message["payload"]) > 0) | has_no_key)


def _encoding(column: Column, _: Column, __: Rules) -> Iterator[_Check]:
    yield "unknown", ~column.isin(*_ENCODINGS)


def _key(column: Column, _: Column, __: Rules) -> Iterator[_Check]:
    yield "too_long", F.octet_length(column) > MAX_KEY_BYTES


def _headers(column: Column, _: Column, __: Rules) -> Iterator[_Check]:
    entries = F.map_entries(column)
    yield "too_many", F.size(entries) > MAX_HEADERS
    yield "bad_name", F.exists(F.map_keys(column), lambda name: ~name.rlike(_HEADER))
    yield (
        "reserved",
        F.exists(F.map_keys(column), lambda name: name.rlike(_RESERVED_HEADER) | name.isin(*RESERVED_HEADERS)),
    )
    yield "missing", F.exists(F.map_values(column), lambda value: value.isNull())
    sizes = F.transform(entries, lambda each: F.octet_length(each["key"]) + F.octet_length(each["value"]))
    yield "too_large", F.aggregate(sizes, F.lit(0), lambda total, size: total + size) > MAX_HEADER_BYTES


def _version(column: Column, raw: Column, rules: Rules) -> Iterator[_Check]:
    if rules.conflict == "newer":
        yield "missing", raw.isNull()
        yield "negative", column < 0


_CHECKS: Final[dict[str, Callable[[Column, Column, Rules], Iterator[_Check]]]] = {
    "id": _id,
    "due_at": _due,
    "payload": _payload,
    "to": _to,
    "type": _type,
    "encoding": _encoding,
    "key": _key,
    "headers": _headers,
    "version": _version,
    WAS_DUE_AT: _was_due,
}

"""The differences between a truth and a store, id by id: frames in, a frame out."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from aiodelay.core.durations import to_epoch_ms
from aiodelay.spark.jobs.differences import judged, tallied

NOON = datetime(2031, 5, 4, 12, tzinfo=UTC)
DUE = NOON + timedelta(hours=1)
TRUTH = (
    "id string, due_at timestamp, to string, payload string, key binary, headers map<string, binary>, version bigint"
)
STORED = (
    "id string, due_at timestamp, to string, payload binary, key binary, headers map<string, binary>, version bigint, "
)
STORED += "revision bigint, rule string"


def test_every_id_is_judged_once_by_what_both_sides_say_of_it(spark: SparkSession) -> None:
    rows = _judged(
        spark,
        [
            _want("same"),
            _want("same-but-for-nothing", payload=None, headers=None),
            _want("same-in-another-order", headers={"b": b"2", "a": b"1"}),
            _want("rounded", due=DUE - timedelta(microseconds=999)),
            _want("missing"),
            _want("missing-newer", version=6),
            _want("ended", version=5),
            _want("ended-of-no-version"),
            _want("late"),
            _want("elsewhere", to="kafka:b"),
            _want("otherwise", payload="b", key=None, headers={"a": b"2"}),
            _want("soon", due=NOON),
            _want("soon-there"),
            _want("ahead", version=1),
            _want("series"),
        ],
        [
            _have("same"),
            _have("same-but-for-nothing", payload=b"", headers={}),
            _have("same-in-another-order", headers={"a": b"1", "b": b"2"}),
            _have("rounded"),
            _have("orphan"),
            _have("late", due=DUE + timedelta(milliseconds=1)),
            _have("elsewhere"),
            _have("otherwise", key=b""),
            _have("soon-there", due=NOON),
            _have("orphan-soon", due=NOON),
            _have("ahead", version=2, payload=b"b"),
            _have("series", rule="10m", payload=b"b"),
        ],
        [("missing-newer", 5), ("ended", 5), ("ended", 3), ("ended-of-no-version", None), ("in-neither", 3)],
    )
    assert {id_: (row["kind"], row["differs"]) for id_, row in rows.items()} == {
        **dict.fromkeys(["same", "same-but-for-nothing", "same-in-another-order", "rounded"], ("same", "")),
        **dict.fromkeys(["missing", "missing-newer"], ("missing", "")),
        **dict.fromkeys(["ended", "ended-of-no-version"], ("ended", "")),
        "orphan": ("orphan", ""),
        "late": ("drift", "due_at"),
        "elsewhere": ("drift", "to"),
        "otherwise": ("drift", "payload,key,headers"),
        "soon": ("soon", ""),
        "soon-there": ("soon", "due_at"),
        "orphan-soon": ("soon", ""),
        "ahead": ("ahead", "payload"),
        "series": ("recurring", "payload"),
    }
    late = rows["late"]
    assert (late["want_due_ms"], late["have_due_ms"]) == (_ms(DUE), _ms(DUE) + 1)
    assert (late["have_revision"], rows["missing-newer"]["want_version"], rows["orphan"]["want_due_ms"]) == (7, 6, None)


def test_a_truth_that_cannot_be_one_is_told_apart_and_a_tally_keeps_findings_alone(spark: SparkSession) -> None:
    truth = [_want(None), _want(None), _want("twice"), _want("twice"), _want("never", due=None), _want("a"), _want("b")]
    rows = tallied(_frame(spark, truth, [_have("a"), _have("b"), _have("c"), _have("d")], [])).collect()
    assert sorted((row["kind"], row["id"], row["ids"], row["in_truth"], row["in_store"]) for row in rows) == [
        ("null_due", "never", 1, 1, 0),
        ("null_id", None, 2, 2, 0),
        ("orphan", "c", 1, 0, 1),
        ("orphan", "d", 1, 0, 1),
        ("repeated", "twice", 2, 2, 0),
        ("same", None, 2, 2, 2),
    ]


def _judged(spark: SparkSession, *sides: list[Any]) -> dict[str, dict[str, Any]]:
    rows = [row.asDict() for row in _frame(spark, *sides).collect()]
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def _frame(spark: SparkSession, truth: list[Any], stored: list[Any], ended: list[Any]) -> DataFrame:
    return judged(
        spark.createDataFrame(truth, TRUTH),
        spark.createDataFrame(stored, STORED),
        spark.createDataFrame(ended, "id string, version bigint"),
        horizon_ms=_ms(NOON + timedelta(minutes=5)),
    )


def _want(
    id_: str | None,
    *,
    due: datetime | None = DUE,
    to: str = "kafka:a",
    payload: str | None = "a",
    key: bytes | None = b"k",
    headers: dict[str, bytes] | None = None,
    version: int | None = None,
) -> tuple[Any, ...]:
    return (id_, due, to, payload, key, {} if headers is None else headers, version)


def _have(
    id_: str,
    *,
    due: datetime = DUE,
    payload: bytes = b"a",
    key: bytes | None = b"k",
    headers: dict[str, bytes] | None = None,
    version: int | None = None,
    rule: str | None = None,
) -> tuple[Any, ...]:
    return (id_, due, "kafka:a", payload, key, headers, version, 7, rule)


def _ms(at: datetime) -> int:
    return to_epoch_ms(at, field="at")

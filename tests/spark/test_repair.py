"""Repair on a real store: differences are repaired once; later changes stay; no ended message comes back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import StructType

from aiodelay.backends.sqlite.store import SqliteStore
from aiodelay.core.ids import new_op
from aiodelay.core.transitions import NO_OP
from aiodelay.core.values import At, Cancel, Conflict, Envelope, Fire, Outcome, Put, Record, Reschedule, Snapshot, State
from aiodelay.errors import ConfigurationError, InputError, UnsupportedByStoreError
from aiodelay.ports.clock import SystemClock
from aiodelay.spark.jobs import reconcile, repair
from aiodelay.spark.jobs.mapping import mapped
from aiodelay.spark.repairing import Found, Repairer, repair_of
from aiodelay.spark.summary import Summary
from aiodelay.spark.write_settings import read_settings
from aiodelay.spark.writing import write_frame
from tests.support.planted import LANE, MAPPING, TO, apply, deliver, get, orders, plant

DAY_MS = 86_400_000
NOON_MS = 2_000_000_000_000
HORIZON_MS = NOON_MS + 300_000
DUE_MS = NOON_MS + DAY_MS


def test_what_was_found_is_mended_once_and_nothing_that_ended_comes_back(
    spark: SparkSession, url: str, namespace: str, tmp_path: Path
) -> None:
    truth, found = orders(spark, 1000), f"{tmp_path / 'found'}"
    plant(truth, url, namespace)
    assert _reconciled(truth, url, namespace, f"parquet:{found}").rejected == 35

    ops = iter(number.to_bytes(8, "big") for number in range(1, 9))
    # One that drifted is delivered, another cancelled; one that was missing is stored and delivered; an orphan moves.
    apply(url, namespace, Fire(next(ops), "order-2"), Cancel(next(ops), "order-103"))
    apply(url, namespace, _live_put(next(ops), "order-1"), Fire(next(ops), "order-1"))
    apply(url, namespace, Reschedule(next(ops), "order-1000004", At(2**41)))
    deliver(url, namespace, 2)

    def repaired(**options: object) -> Summary:
        differences = spark.read.parquet(found)
        return repair.run(spark, differences, truth, store=url, namespace=namespace, mapping=MAPPING, to=TO, **options)  # type: ignore[arg-type]

    for options, problem in (
        ({}, "max_fraction is 0.01, with 30 differences for 1,000 rows"),
        ({"max_fraction": 0.03, "delete_orphans": 5}, "max_fraction is 0.03, with 35"),
        ({"max_fraction": 0.1, "delete_orphans": 4}, "delete_orphans is 4, with 5 orphans"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            repaired(**options)
    assert get(url, namespace, "order-101") is None, "nothing is done above a bound"

    part = repaired(kinds=["missing"], max_fraction=0.015, delete_orphans=5, margin="3649d")
    assert part.rows == 15
    assert part.counts == {"stored": 9, "ended": 1, "soon": 4, "changed": 1}
    summary = repaired(max_fraction=0.1, delete_orphans=5)
    assert summary.rows == 35
    assert summary.counts == {"present": 9, "rescheduled": 9, "replaced": 9, "cancelled": 4, "ended": 3, "changed": 1}
    assert [get(url, namespace, ended) for ended in ("order-1", "order-2", "order-103", "order-1000000")] == [None] * 4
    mended = get(url, namespace, "order-3")
    assert mended is not None
    assert (mended.record.envelope.payload, mended.record.envelope.version) == (("é" * 20).encode(), 1)
    assert get(url, namespace, "order-1000004") is not None

    again = repaired(max_fraction=0.1, delete_orphans=5)
    assert again.counts == {"present": 9, "same": 18, "ended": 7, "changed": 1}
    last = _reconciled(truth, url, namespace)
    assert (last.counts["orphan"], last.counts["drift"], last.counts["missing"]) == (1, 0, 0)
    assert last.counts["ended"] == 3


def test_what_cannot_be_repaired_is_refused_before_anything_is_done(spark: SparkSession, tmp_path: Path) -> None:
    url, truth = f"sqlite:///{tmp_path / 'delay.db'}", orders(spark, 200)
    apply(url, "default")
    found = f"{tmp_path / 'found'}"
    _reconciled(truth.limit(1), url, "default", f"parquet:{found}")
    differences = spark.read.parquet(found)
    day_before = F.expr("found_at - interval 24 hours 1 second")
    older = differences.union(differences.withColumn("found_at", day_before)).withColumn("truth_rows", F.lit(100))
    bare = {name: MAPPING[name] for name in ("id", "due_at")}
    tomorrow = datetime.now(UTC) + timedelta(hours=24, seconds=1)
    for kind, options, problem in (
        (ConfigurationError, {"kinds": ["orphan"]}, "kinds is 'orphan'"),
        (ConfigurationError, {"mapping": bare}, "column 'payload' of truth is missing"),
        (ConfigurationError, {"differences": truth}, "differences is missing column 'kind'"),
        (ConfigurationError, {"max_fraction": 1.5}, "max_fraction is 1.5"),
        (UnsupportedByStoreError, {"store": "kafka://127.0.0.1:1/schedules"}, "kafka"),
        (InputError, {"now": tomorrow, "max_fraction": 1.0}, "differences is 1d.* old; allowed: at most"),
        (InputError, {"differences": older, "max_fraction": 1.0}, "differences is 1d.* old; allowed: at most"),
    ):
        given = {"differences": differences, "truth": truth, "store": url, "mapping": MAPPING, "to": TO} | options
        with pytest.raises(kind, match=problem):
            repair.run(spark, **given)  # type: ignore[arg-type]
    assert get(url, "default", "order-0") is None


def test_the_pages_program_repairs(spark: SparkSession, tmp_path: Path) -> None:
    store, truth = f"sqlite:///{tmp_path / 'delay.db'}", orders(spark, 100)
    write_frame(mapped(truth.where("number <> 7"), MAPPING, to=TO), {"store": store})
    page = Path(__file__).parents[2] / "docs" / "spark" / "reconcile.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    mapping = {**MAPPING, "version": "int(5)"}
    given = {"spark": spark, "orders": truth, "store": store, "mapping": mapping, "folder": f"{tmp_path / 'found'}"}
    exec(program, given)
    mended = get(store, "default", "order-7")
    assert mended is not None
    assert mended.record.envelope.version == 5


def test_what_ends_between_look_and_write_stays_ended_and_a_truth_with_an_id_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, due_ms = f"sqlite:///{tmp_path / 'delay.db'}", SystemClock().now_ms() + DAY_MS
    stands = _record(due_ms=due_ms)  # without a version: the store will not remember that it ended
    apply(url, "default", Put(new_op(), stands.envelope, At(due_ms)))
    snapshot = get(url, "default", "a")
    assert snapshot is not None
    schema = StructType().add("id", "string").add("due_at", "timestamp").add("payload", "binary")
    settings = read_settings({"store": url, "to": TO}, schema)
    repairer = Repairer(settings, ("payload",), due_ms - 1)

    def batch(rows_of_id: int) -> pa.RecordBatch:
        due_at = pa.array([due_ms], pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC"))
        found = {"kind": ["drift"], "have_revision": [snapshot.record.revision], "have_due_ms": [due_ms]}
        return pa.RecordBatch.from_pydict(
            {**found, "rows_of_id": [rows_of_id], "id": ["a"], "due_at": due_at, "payload": [b"other"]}
        )

    with pytest.raises(InputError, match="id of truth is 'a' in 2 rows; allowed: one row for each id"):
        list(repairer(iter([batch(2)])))
    bulk_load = SqliteStore.bulk_load

    async def late(store: SqliteStore, puts: Sequence[Put]) -> Sequence[Outcome]:
        await store.apply([Cancel(new_op(), put.id) for put in puts])
        return await bulk_load(store, puts)

    monkeypatch.setattr(SqliteStore, "bulk_load", late)
    (counts,) = repairer(iter([batch(1)]))
    assert counts.to_pylist() == [{"kind": "drift", "outcome": "ended", "n": 1}]
    assert get(url, "default", "a") is None


# --- what is decided --------------------------------------------------------------------------------------


def test_what_is_due_soon_is_not_cancelled_and_a_series_is_not_repaired() -> None:
    soon = Snapshot(_record(due_ms=HORIZON_MS), State.SCHEDULED, HORIZON_MS)
    given: dict[str, Any] = {"given": ("to", "payload"), "is_versioned": False, "horizon_ms": HORIZON_MS}
    assert repair_of(Found("a", "orphan", 7, HORIZON_MS), soon, None, **given) == "soon"
    record = _record()
    series = replace(record, envelope=replace(record.envelope, rule={"e": 600_000}))
    stands = Snapshot(series, State.SCHEDULED, DUE_MS)
    assert repair_of(Found("a", "drift", 7, DUE_MS), stands, _put(_record(payload=b"o")), **given) == "changed"


@pytest.mark.parametrize(
    ("kind", "stands", "want", "decided"),
    [
        ("missing", None, {}, "put"),
        ("missing", None, None, "withdrawn"),
        ("missing", {}, {}, "present"),
        ("orphan", {}, None, "cancel"),
        ("orphan", {}, {}, "wanted"),
        ("orphan", {"revision": 8}, None, "changed"),
        ("orphan", {"due_ms": DUE_MS - 1}, None, "changed"),
        ("orphan", None, None, "ended"),
        ("drift", {}, {"due_ms": DUE_MS + 1}, "reschedule"),
        ("drift", {}, {"payload": b"other"}, "put 4"),
        ("drift", {}, {"address": "elsewhere"}, "put 4"),
        ("drift", {"version": None}, {"payload": b"other"}, "put 0"),
        ("drift", {}, {"payload": b"other", "version": 9}, "put 9"),
        ("drift", {}, {"due_ms": DUE_MS + 1, "version": 9}, "put 9"),
        ("drift", {}, {"payload": b"other", "version": 2}, "ahead"),
        ("drift", {}, {}, "same"),
        ("drift", {"revision": 8}, {"payload": b"other"}, "changed"),
        ("drift", {}, {"due_ms": HORIZON_MS}, "soon"),
        ("drift", {}, None, "withdrawn"),
        ("drift", None, {}, "ended"),
    ],
)
def test_each_finding_is_decided_by_what_stands_now(
    kind: str, stands: dict[str, Any] | None, want: dict[str, Any] | None, decided: str
) -> None:
    now = (
        None if stands is None else Snapshot(_record(**{"version": 3, "key": b"k", **stands}), State.SCHEDULED, DUE_MS)
    )
    put = None if want is None else _put(_record(**want))
    found = Found("a", kind, 7, DUE_MS)
    is_versioned = want is not None and "version" in want
    answer = repair_of(found, now, put, given=("to", "payload"), is_versioned=is_versioned, horizon_ms=HORIZON_MS)
    match answer:
        case Put():
            assert answer.conflict == Conflict.newer(answer.envelope.version or 0)
            assert answer.envelope.key == (b"k" if now else None), "what the truth does not give stays"
            assert decided == ("put" if kind == "missing" else f"put {answer.envelope.version}")
        case str():
            assert answer == decided
        case _:
            assert decided == type(answer).__name__.lower()


def _record(
    *,
    revision: int = 7,
    due_ms: int = DUE_MS,
    address: str = "orders",
    payload: bytes = b"p",
    version: int | None = None,
    key: bytes | None = None,
) -> Record:
    return Record(Envelope("a", LANE, address, payload=payload, version=version, key=key), revision, due_ms, NO_OP)


def _put(record: Record) -> Put:
    return Put(NO_OP, record.envelope, At(record.due_ms), Conflict.newer(record.envelope.version or 0))


def _live_put(op: bytes, message_id: str) -> Put:
    envelope = Envelope(message_id, LANE, "orders", payload=b"live", version=0)
    return Put(op, envelope, At(DUE_MS), Conflict.newer(0))


def _reconciled(truth: DataFrame, url: str, namespace: str, out: str | None = None) -> Summary:
    return reconcile.run(truth.sparkSession, truth, store=url, namespace=namespace, mapping=MAPPING, to=TO, out=out)

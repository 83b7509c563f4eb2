"""The calls of one migration task to its stores, without Spark: margins, and no change to other messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from aiodelay.core.ids import new_op
from aiodelay.core.values import At, Conflict, Envelope, Put, Record, Stored
from aiodelay.ports.clock import SystemClock
from aiodelay.spark.moving import MOVED, Copier, Place, Taker, Withdrawer
from tests.spark.messages import stored

MARGIN_MS, PATIENCE_MS = 120_000, 5_000
NAMES = ("id", "revision", "due_ms", "due_at", "to", "payload", "version")


@pytest.fixture
def places(tmp_path: Path) -> tuple[Place, Place]:
    first, second = (Place(f"sqlite:///{tmp_path / name}.db", "default") for name in ("first", "second"))
    return first, second


def put_all(place: Place, dues: Mapping[str, int]) -> dict[str, Stored]:
    """Schedule messages; return what each was answered."""

    async def play() -> dict[str, Stored]:
        async with place.store() as store:
            puts = [Put(new_op(), Envelope(name, "lane"), At(due), Conflict.replace()) for name, due in dues.items()]
            outcomes = await store.apply(puts)
        return {name: each for name, each in zip(dues, outcomes, strict=True) if isinstance(each, Stored)}

    return asyncio.run(play())


def found(place: Place) -> Mapping[str, Record]:
    return stored(place.url, place.namespace)


def batches(rows: Mapping[str, tuple[int, int]]) -> Iterator[pa.RecordBatch]:
    """Return messages as a pass has found them: revision and due time of each id."""
    revisions, dues = zip(*rows.values(), strict=True)
    columns = [
        pa.array(rows, pa.string()),
        pa.array(revisions, pa.int64()),
        pa.array(dues, pa.int64()),
        pa.array([due * 1000 for due in dues], pa.timestamp("us", tz="UTC")),
        *(pa.array([text] * len(rows), type_) for text, type_ in (("redis-list:x", pa.string()), (b"p", pa.binary()))),
        pa.array([None] * len(rows), pa.int64()),
    ]
    yield pa.RecordBatch.from_arrays(columns, names=list(NAMES))


def told(given: Iterator[pa.RecordBatch]) -> Sequence[Mapping[str, object]]:
    return [row for batch in given for row in batch.to_pylist()]


def test_what_is_due_within_the_margin_is_neither_copied_nor_taken_out(places: tuple[Place, Place]) -> None:
    first, second = places
    now_ms = SystemClock().now_ms()
    dues = {"near": now_ms + MARGIN_MS // 2, "far": now_ms + 2 * MARGIN_MS, "again": now_ms + 2 * MARGIN_MS}
    answers = put_all(first, dues)
    rows = {name: (each.revision, each.due_ms) for name, each in answers.items()}
    copier = Copier(second, first.origin, NAMES, 1, MARGIN_MS, 0, PATIENCE_MS)
    assert told(copier(batches(rows))) == [{"copied": 2, "present": 0, "late": 1, "refused": 0}]
    assert found(second).keys() == {"far", "again"}

    taker = Taker(first, MARGIN_MS, 0, PATIENCE_MS)
    revision, due_ms = rows["again"]
    outdated = {"again": (revision - 1, due_ms), "gone": (revision, due_ms)}
    outcomes = {f"{row['id']}": row["outcome"] for row in told(taker(batches(rows | outdated)))}
    assert outcomes == {"near": "left", "far": "removed", "again": "changed", "gone": "gone"}
    assert found(first).keys() == {"near", "again"}
    moved = {"again": (revision, due_ms - 1)}
    assert [row["outcome"] for row in told(taker(batches(moved)))] == ["changed"], "it is due at another time"


def test_only_a_copy_of_just_what_is_named_is_taken_back(places: tuple[Place, Place]) -> None:
    first, second = places
    due_ms = SystemClock().now_ms() + 2 * MARGIN_MS
    rows = dict.fromkeys(("own", "other", "revision", "due", "theirs"), (7, due_ms))
    put_all(second, {"theirs": due_ms})
    copier = Copier(second, first.origin, NAMES, 1, MARGIN_MS, 0, PATIENCE_MS)
    assert told(copier(batches(rows)))[0]["present"] == 1
    assert found(second)["own"].envelope.trace == {MOVED: f"{first.origin}/7/{due_ms}"}
    named = {"own": (7, due_ms), "revision": (8, due_ms), "due": (7, due_ms + 1), "theirs": (7, due_ms)}
    back = [Withdrawer(second, origin, PATIENCE_MS) for origin in (second.origin, first.origin, first.origin)]
    assert [told(each(batches(named))) for each in back] == [[{"taken_back": n}] for n in (0, 1, 0)]
    assert found(second).keys() == {"other", "revision", "due", "theirs"}


def test_a_store_and_its_namespace_make_the_origin() -> None:
    urls = ("redis://one", "redis://two")
    assert len({Place(url, namespace).origin for url in urls for namespace in "ab"}) == 4
    with_password = Place("redis://:secret@one", "a")
    assert with_password.origin == Place("redis://:other@one", "a").origin

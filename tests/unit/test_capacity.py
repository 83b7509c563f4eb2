"""`aiodelay plan`: the arithmetic, the origin of its costs, and the sizes that it assumes."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from aiodelay.backends.kafka.pending.far_index import FarIndex
from aiodelay.core.ids import new_id, new_op
from aiodelay.core.values import After, Envelope, Put, Record
from aiodelay.kafka.records import encode_record
from aiodelay.operations.capacity import (
    BUSY,
    KAFKA_INDEX_BYTES,
    KAFKA_RECORD_BYTES,
    READ_S,
    SQLITE_BYTES,
    Need,
    Workload,
    costs,
    needs,
)
from aiodelay.sqlite import SqliteStore
from benchmarks.costs import COSTS, costs_of
from tests.support.cli import ran

DOCS = Path(__file__).parents[2] / "docs"
BILLION = 1_000_000_000


def found(load: Workload) -> dict[str, Need]:
    return {each.about: each for each in needs(load)}


def amount(load: Workload, about: str) -> float:
    value = found(load)[about].value
    assert value is not None
    return value


def test_the_costs_are_the_figures_of_the_page() -> None:
    performance = json.loads((DOCS / "performance.json").read_text(encoding="utf-8"))
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    assert json.loads(COSTS.read_text(encoding="utf-8")) == costs_of(performance, page), (
        "run python -m benchmarks.costs"
    )


def test_the_page_shows_what_the_command_prints() -> None:
    text = (DOCS / "capacity.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\$ aiodelay (plan .*)\n((?:.+\n)+)", text, re.MULTILINE)
    assert shown
    for arguments, lines in shown:
        printed = ran(*arguments.split()).out
        assert printed.startswith(lines.removesuffix("```\n")), arguments


@pytest.mark.parametrize("store", ["redis", "valkey"])
def test_memory_and_cores_of_redis(store: str) -> None:
    load = Workload(store=store, pending=BILLION, per_s=5000, payload=300, dead=10, journal=100)  # type: ignore[arg-type]
    memory = BILLION * (costs()["redis_memory"].value + 100) + 10 * (590 + 300) + 100 * 90
    assert amount(load, "memory") == memory
    assert amount(load, "disk") == 3 * memory
    cores = 5000 * (costs()["redis_put"].value + costs()["redis_run"].value) / 1e6
    assert amount(load, "server cores") == pytest.approx(cores * costs()["redis_nodes"].value)
    assert amount(load, "shards") == -(-memory // (64 << 30))
    assert amount(load, "lost with durability=memory") == 2 * 5000
    assert amount(load, "lost with durability=replicated") == 0
    assert amount(load, "repeated by a failover") == 5000


def test_a_message_costs_more_on_several_servers_than_on_one() -> None:
    one = (costs()["redis_put"].value + costs()["redis_run"].value) / 1e6
    most, several = BUSY / one, costs()["redis_nodes"].value
    for per_s, pending, factor in ((most - 1, 1, 1), (most + 1, 1, several), (most - 1, BILLION, several)):
        load = Workload(store="redis", pending=pending, per_s=per_s)
        assert amount(load, "server cores") == pytest.approx(per_s * one * factor)
        assert amount(load, "shards") >= amount(load, "server cores") / BUSY
        assert ("redis_nodes" in found(load)["server cores"].costs) == (factor > 1)


def test_shards_of_redis_by_the_cores() -> None:
    load = Workload(store="redis", pending=1, per_s=50_000)
    assert amount(load, "shards") == -(-amount(load, "server cores") // BUSY)
    assert amount(Workload(store="redis", pending=0, per_s=1), "shards") == 1


def test_an_index_on_disk_needs_disk_instead_of_memory_and_starts_sooner() -> None:
    memory = Workload(store="kafka", pending=BILLION, per_s=1000)
    disk = Workload(store="kafka", pending=BILLION, per_s=1000, index_on_disk=True)
    near = 1000 * 3600
    saved = (BILLION - near) * (costs()["kafka_memory"].value - costs()["kafka_memory_on_disk"].value)
    assert amount(memory, "memory") - amount(disk, "memory") == pytest.approx(saved)
    assert (amount(memory, "index on disk"), amount(disk, "index on disk")) == (0, BILLION * KAFKA_INDEX_BYTES)
    assert amount(memory, "start time") == amount(memory, "first start") == amount(disk, "first start")
    assert amount(disk, "start time") < amount(disk, "first start") / 5
    assert amount(disk, "late by a killed process") <= READ_S + costs()["kafka_kill"].value / 1000


def test_on_kafka_messages_within_the_horizon_are_at_most_all() -> None:
    load = Workload(store="kafka", pending=10, per_s=1000)
    assert "10 messages within the horizon" in found(load)["memory"].text
    assert amount(load, "partitions") == 3


def test_sqlite_has_one_writer() -> None:
    load = Workload(store="sqlite", pending=1000, per_s=20_000, payload=0, dead=1, journal=2)
    assert amount(load, "disk") == 1000 * SQLITE_BYTES + 750 + 2 * 140
    assert amount(load, "writer cores") > 1
    assert amount(load, "shards") == -(-amount(load, "writer cores") // BUSY)


def test_the_command_prints_each_need(tmp_path: Path) -> None:
    shown = ran("plan", "redis", "--pending", "1000", "--rate", "60/min", "--json")
    assert shown.code == 0
    rows = {each["about"]: each for each in shown.objects}
    assert rows["memory"]["value"] == 1000 * costs()["redis_memory"].value
    assert rows["memory"]["costs"][0]["benchmark"] == "BP5"
    assert rows["start time"]["value"] is None
    text = ran("plan", "redis", "--pending", "1000", "--rate", "60/min").out
    assert "not measured" in text
    wrong = ran("plan", "redis", "--pending", "1", "--rate", "fast")
    assert wrong.code == 1
    assert wrong.err.startswith("aiodelay: rate is 'fast'; allowed: ")


# --- sizes ------------------------------------------------------------------------------------------------


def test_the_size_of_a_message_in_sqlite(tmp_path: Path) -> None:
    async def play() -> None:
        async with SqliteStore(tmp_path / "delay.db") as store:
            for _ in range(10):
                puts = [
                    Put(new_op(), Envelope(new_id(), "work", payload=bytes(200)), After(86_400_000)) for _ in range(500)
                ]
                await store.apply(puts)

    asyncio.run(play())
    size = sum(each.stat().st_size for each in tmp_path.iterdir() if each.name == "delay.db")
    assert size / 5000 == pytest.approx(SQLITE_BYTES + 200, rel=0.15)


def test_the_size_of_a_record_and_of_a_row_of_the_index(tmp_path: Path) -> None:
    path = tmp_path / "far.index"
    index = FarIndex(str(path))
    for offset in range(5000):
        index.put(new_id().encode(), 1_800_000_000_000 + offset * 1000, offset, "kafka", is_users=False)
    index.commit(b"")
    index.close()
    assert path.stat().st_size / 5000 == pytest.approx(KAFKA_INDEX_BYTES, rel=0.15)
    due_ms = 1_800_000_000_000
    record = Record(Envelope(new_id(), "kafka", "orders", payload=bytes(200)), due_ms, due_ms, new_op(), 0)
    key, value, headers = encode_record(record)[:3]
    size = len(key or b"") + len(value or b"") + sum(2 + len(name) + len(each) for name, each in headers)
    assert size <= KAFKA_RECORD_BYTES + 200 <= size + 40  # Kafka's own fields

"""Two versions on one store under kills: nothing is lost or early; after the switch the older one claims nothing.

The newer version is this one with one more feature that it knows. docs/decisions/0016-rolling-upgrades.md says why it
is not built from another commit.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aiodelay import Message, Scheduler
from aiodelay.core import features
from tests.faults.programs.kafka_owner import Plan, Run
from tests.faults.programs.worker import Burst, Stream
from tests.faults.scene import Scene
from tests.support.cli import Cli
from tests.support.kafka import create_topic, new_name, read
from tests.support.processes import Crew, Worker
from tests.support.producing import instant
from tests.support.topics import shared_out
from tests.support.waiting import until, until_sync

NEW = "rehearsed"
REFUSAL = f"uses {NEW} (switched on by aiodelay "
OLDER: dict[str, Any] = {}
NEWER: dict[str, Any] = {"knows": (NEW,)}


def switch_on(url: str, folder: Path) -> None:
    """Run `aiodelay upgrade` of the newer version."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "KNOWN", frozenset({NEW}))
        ran = Cli(url, folder)("upgrade", "--yes")
    assert ran.code == 0, ran.err
    assert NEW in ran.out


def has_refused(worker: Worker) -> bool:
    return REFUSAL in worker.errors


# --- SQLite, Redis ----------------------------------------------------------------------------------------


def test_v1_two_versions_share_a_store_until_the_switch(any_scene: Scene, tmp_path: Path) -> None:
    scene, stream = any_scene, Stream(seconds=8, rate=30, ids=200, seed=1, until_told=True)

    def start(name: str, version: dict[str, Any], **settings: Any) -> Worker:  # noqa: ANN401 - the fields of a plan
        return scene.start(name, serve=("work",), run_ms=10, until="sigterm", **version, **settings)

    older, victim = start("older-1", OLDER, stream=stream), start("older-2", OLDER, stream=stream)
    newer = start("newer-1", NEWER, stream=stream)
    for each in (older, victim, newer):
        each.line("run 20")
    for each in (victim, newer):
        each.kill()
    victim, newer = start("older-3", OLDER, stream=stream), start("newer-2", NEWER, stream=stream)
    for each in (victim, newer):
        each.line("running")

    switch_on(scene.url, tmp_path)
    switched_ns = time.monotonic_ns()
    until_sync(lambda: has_refused(older) and has_refused(victim), "both older processes say so")
    for each in (victim, newer):
        each.kill()
    scene.start("older producer", burst=Burst(messages=30, prefix="late"), until="produced").ended_well()
    newer = start("newer-3", NEWER)
    newer.line("running")
    late = start("older-4", OLDER)
    assert late.wait() == 1
    assert has_refused(late)
    for each in (older, newer):
        each.terminate()
        each.ended_well()
    scene.start("last", serve=("work",), **NEWER).ended_well()

    scene.judge()
    story = scene.story()
    claimed = {lease.process for lease in story.leases if lease.asked_ns > switched_ns}
    assert claimed <= {"newer-2", "newer-3", "last"}
    late_runs = {attempt.start.id for attempt in story.attempts if attempt.start.id.startswith("late-")}
    assert len(late_runs) == 30, "what the older version schedules after the switch is delivered"


# --- Kafka ------------------------------------------------------------------------------------------------

PARTITIONS, SESSION_MS = 4, 6_000
N, STEP_MS = 200, 75
"""So many messages are scheduled before the switch and after it, each due so long after the one before."""


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    with Crew(tmp_path) as crew:
        yield crew


def runs_in(path: Path) -> list[Run]:
    return [msgspec.json.decode(line, type=Run) for line in path.read_bytes().splitlines()]


@pytest.mark.asyncio
async def test_v1_two_versions_share_topics_until_the_switch(kafka: str, crew: Crew, tmp_path: Path) -> None:
    target, schedules = await create_topic(kafka, new_name()), new_name("schedules")
    store = f"kafka://{kafka}/{schedules}?create_topic=true&partitions={PARTITIONS}"
    runs = tmp_path / "runs.jsonl"

    def start(name: str, version: dict[str, Any]) -> Worker:
        plan = Plan(name=name, store=store, runs=f"{runs}", session_ms=SESSION_MS, **version)
        return crew.start("kafka_owner", plan, name=name)

    async def ready(*workers: Worker) -> None:
        for each in workers:
            await asyncio.to_thread(each.line, "ready")

    async def shares() -> dict[str, set[int]]:
        return await asyncio.to_thread(shared_out, kafka, f"aiodelay.{schedules}")

    async def is_shared_by(*workers: Worker) -> bool:
        found = await shares()
        owners = {pid for pid in (each.pid for each in workers) for name in found if f"-{pid}-" in name}
        return len(found) == len(owners) == len(workers) and sum(map(len, found.values())) == PARTITIONS

    older, victim, newer = start("older-1", OLDER), start("older-2", OLDER), start("newer-1", NEWER)
    await ready(older, victim, newer)
    due_ms: dict[str, int] = {}
    async with Scheduler(store, dispatch=False) as producer:  # of the older version too

        async def schedule(prefix: str) -> None:
            now_ms = time.time_ns() // 1_000_000
            dues = {f"{prefix}{i}": now_ms + i * STEP_MS for i in range(N)}
            due_ms.update(dues)
            to = (f"kafka:{target}", "handler:work")
            await producer.schedule_many(
                Message(name.encode(), at=instant(at_ms), to=to[i % 2], id=name)
                for i, (name, at_ms) in enumerate(dues.items())
            )

        await schedule("before-")
        await until(lambda: is_shared_by(older, victim, newer), "all three own partitions")
        for each in (victim, newer):
            each.kill()
        victim, newer = start("older-3", OLDER), start("newer-2", NEWER)
        await ready(victim, newer)
        await until(lambda: is_shared_by(older, victim, newer), "all three own partitions again", 60)

        await asyncio.to_thread(switch_on, store, tmp_path)
        await until(lambda: has_refused(older) and has_refused(victim), "both older processes say so")
        await until(lambda: is_shared_by(newer), "the newer process alone owns partitions", 60)
        alone_ms = time.time_ns() // 1_000_000
        await schedule("after-")
        for each in (victim, newer):
            each.kill()
        newer = start("newer-3", NEWER)
        await ready(newer)
        late = start("older-4", OLDER)
        assert await asyncio.to_thread(late.wait) == 1
        assert has_refused(late)

        await until(lambda: len({run.payload for run in runs_in(runs)}) == N, "all is handled", 90)
        moved = [(record.value.decode(), record.timestamp) for record in await read(kafka, target, N)]
    for each in (older, newer):
        each.terminate()
        await asyncio.to_thread(each.ended_well)

    assert Counter(name for name, _ in moved) == Counter(set(due_ms) - {run.payload for run in runs_in(runs)})
    assert all(at_ms >= due_ms[name] for name, at_ms in moved), "S1"
    ran = runs_in(runs)
    assert all(run.started_ms >= due_ms[run.payload] for run in ran), "S1"
    assert {run.process for run in ran if run.started_ms > alone_ms} <= {"newer-2", "newer-3"}

"""`aiodelay reshard` beside processes that schedule, cancel and deliver, and that are killed. Histories are checked."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aiodelay.backends.redis.sharded import life_signs
from aiodelay.backends.redis.sharded.reshard import reshard
from aiodelay.testing import history as h
from aiodelay.testing.history import Limits
from tests.faults.programs.worker import Burst, Stream
from tests.faults.scene import TAKEOVER_MS, RedisScene
from tests.faults.test_redis_shards import ShardedScene
from tests.support.processes import PATIENCE_S, Crew, Worker
from tests.support.servers import redis_programs, start
from tests.support.slow_stores import PATIENT
from tests.support.waiting import until_sync

SPARED_MS = 1_500
FLOW = Stream(seconds=0.5, rate=150, ids=100, seed=1, until_told=True)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisScene]:
    monkeypatch.setattr(life_signs, "SPARED_MS", SPARED_MS)
    server = start(redis_programs()[0].program)
    with Crew(tmp_path) as crew:
        yield ShardedScene(crew, tmp_path, server)
    server.stop()


def moved(scene: RedisScene, shards: int) -> None:
    asyncio.run(reshard(f"{scene.url}?{PATIENT}", "default", shards, lambda _examined, _of: None))


def mover(scene: RedisScene, shards: int) -> subprocess.Popen[str]:
    """Start `aiodelay reshard` with small batches."""
    program = f"""
from aiodelay.backends.redis.sharded import life_signs, moving
from aiodelay.cli import main
life_signs.SPARED_MS, moving.AT_ONCE = {SPARED_MS}, 20
main()
"""
    arguments = ["reshard", scene.url, "--shards", str(shards), "--yes"]
    return subprocess.Popen([sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE, text=True)


def under_load(scene: RedisScene, *names: str, **settings: Any) -> list[Worker]:  # noqa: ANN401 - the fields of a plan
    workers = [scene.start(name, serve=("work",), run_ms=20, stream=FLOW, **settings) for name in names]
    for worker in workers:
        worker.line("run 40")
    return workers


def says_why(worker: Worker) -> bool:
    return "is being moved" in worker.errors


def runs(scene: RedisScene) -> int:
    return sum(isinstance(each, h.RunStarted) for each in h.read(scene.crew.history_path))


def works_again(scene: RedisScene) -> None:
    before = runs(scene)
    until_sync(lambda: runs(scene) > before + 20, "messages run again", PATIENCE_S)


def end(scene: RedisScene, workers: list[Worker]) -> None:
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.ended_well()
    report = scene.judge(Limits(takeover_ms=SPARED_MS + TAKEOVER_MS, spare=4))  # one thread of the pulse for each shard
    assert report.delivered > 80


@pytest.mark.nightly
def test_a_namespace_moves_to_more_and_to_fewer_shards_under_load(scene: RedisScene) -> None:
    workers = under_load(scene, "a", "b")
    for shards in (4, 2, 1):
        moved(scene, shards)
        works_again(scene)
    end(scene, workers)
    assert b"1" in scene.server.command("HGET", "{default:00}:meta", "shards")


@pytest.mark.nightly
def test_a_handler_runs_across_moves_and_settles_once(scene: RedisScene) -> None:
    """The run is longer than its lease, which nobody can renew during a move."""
    burst = Burst(messages=4, spread_ms=0, headers={"do": b"sleep:2500"})
    worker = scene.start("a", serve=("work",), burst=burst)
    worker.line("running")
    other = scene.start("b", serve=("work",), until="sigterm")
    other.line("ready")
    for shards in (3, 1):
        moved(scene, shards)
    worker.ended_well()
    other.terminate()
    other.ended_well()
    report = scene.judge(Limits(lapses=False, spare=4))
    assert (report.delivered, report.duplicates) == (4, 0)


def test_a_mover_and_a_process_are_killed_midway(scene: RedisScene) -> None:
    """The other process waits until somebody runs the move again. Then it gets the messages of the killed process."""
    workers = under_load(scene, "a", "b")
    with mover(scene, 4) as process:
        assert process.stderr is not None
        assert "examined" in process.stderr.readline()
        process.send_signal(signal.SIGKILL)
    if b"moving" in scene.server.command("HGET", "{default:00}:meta", "schema"):
        for worker in workers:
            until_sync(partial(says_why, worker), "the process says why it waits")
    victim = workers.pop()
    victim.kill()
    moved(scene, 4)
    works_again(scene)
    end(scene, workers)


@pytest.mark.nightly
def test_a_storm_of_moves_and_kills(scene: RedisScene) -> None:
    rng = random.Random(20)
    workers = under_load(scene, "w0", "w1", "w2")
    for number, shards in enumerate((4, 2, 3, 1, 5, 2), start=3):
        with mover(scene, shards) as process:
            time.sleep(rng.uniform(0.5, 1.5))  # at any point, or after the end
            process.send_signal(signal.SIGKILL)
        workers.pop(rng.randrange(len(workers))).kill()
        time.sleep(rng.uniform(0, 2))  # processes wait longer than their leases
        moved(scene, shards)
        workers += under_load(scene, f"w{number}")
        works_again(scene)
    end(scene, workers)

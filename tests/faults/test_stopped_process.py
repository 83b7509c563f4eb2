"""F3: a process is frozen for longer than its leases, then goes on: what it settles now is fenced off."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from tests.faults.programs.worker import Burst
from tests.faults.scene import TAKEOVER_MS, RedisScene, Scene
from tests.support.checker import Limits
from tests.support.processes import Worker
from tests.support.story import NEVER


def test_f3_a_zombie_settles_nothing_that_others_took_over(any_scene: Scene) -> None:
    burst = Burst(messages=40, spread_ms=0)
    zombie = any_scene.start("zombie", serve=("work",), burst=burst, run_ms=1_000)
    heir = any_scene.start("heir", serve=("work",), run_ms=20, waits=True)
    heir.line("waiting")
    zombie.line("produced")
    zombie.line("running")
    if isinstance(any_scene, RedisScene):
        zombie.stop()
    else:
        stop_between_transactions(zombie, any_scene.path)
    heir.tell("go")
    heir.ended_well()
    zombie.continue_()
    zombie.ended_well()
    report = any_scene.judge(Limits(takeover_ms=TAKEOVER_MS))
    leases = any_scene.story().leases
    inherited = {lease.note.id for lease in leases if lease.process == "heir"}
    taken_over = [lease for lease in leases if lease.process == "zombie" and lease.note.id in inherited]
    assert len(taken_over) >= max(report.duplicates, 1)
    assert {lease.settled_ns for lease in taken_over} == {NEVER}


def stop_between_transactions(worker: Worker, path: Path) -> None:
    """Freeze it at a moment when it does not hold the file's write lock, which nobody could take from it."""
    connection = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        while True:
            worker.stop()
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                worker.continue_()
                time.sleep(0.01)
            else:
                return
    finally:
        connection.close()

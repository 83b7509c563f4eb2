"""F3: a process is frozen for longer than its leases, then continues: the store refuses its settlements."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing

from aiodelay.testing.history import NEVER, Lease, Limits, Story
from tests.faults.programs.worker import Burst
from tests.faults.scene import TAKEOVER_MS, RedisScene, Scene
from tests.support.processes import PATIENCE_S, Worker
from tests.support.waiting import until_sync

LEASE_MS = 2_000
RUN_MS = 1_500
"""Shorter than a lease: runs are over when others take over, and are settled as soon as their process goes on."""


def test_f3_a_zombie_settles_nothing_that_others_took_over(any_scene: Scene) -> None:
    settings = {"serve": ("work",), "lease_ms": LEASE_MS}
    heir = any_scene.start("heir", waits=True, run_ms=1_000, concurrency=200, **settings)
    heir.line("waiting")
    burst = Burst(messages=200, spread_ms=0)
    zombie = any_scene.start("zombie", burst=burst, run_ms=RUN_MS, concurrency=20, **settings)
    zombie.line("run 20")
    held = freeze(zombie, any_scene)
    heir.tell("go")
    wait_for_takeover(any_scene)
    zombie.continue_()
    zombie.ended_well()
    heir.ended_well()
    report = any_scene.judge(Limits(takeover_ms=TAKEOVER_MS))
    assert report.duplicates - report.lapses <= held
    story = any_scene.story()
    late = [
        (settlement.outcome, older.note.id)
        for older, newer in taken_over(story)
        for settlement in older.settlements
        if settlement.asked_ns > newer.answered_ns
    ]
    assert late, "the zombie settled nothing that was not its own"
    assert {outcome for outcome, _ in late} == {"gone"}
    ended = {lease.note.id for lease in story.leases if lease.settled_ns < NEVER}
    assert ended >= {message_id for _, message_id in late}, "the one who took over has ended it"


def taken_over(story: Story) -> Iterator[tuple[Lease, Lease]]:
    """Yield the zombie's leases of messages that the heir had after it, each with the heir's."""
    zombies = [lease for lease in story.leases if lease.process == "zombie"]
    for newer in story.leases:
        for older in zombies if newer.process == "heir" else ():
            if older.note.id == newer.note.id and older.answered_ns < newer.asked_ns:
                yield older, newer


def wait_for_takeover(scene: Scene) -> None:
    until_sync(lambda: list(taken_over(scene.story())), "something is taken over", PATIENCE_S)


def freeze(worker: Worker, scene: Scene) -> int:
    """Freeze it while it runs messages and does not write, since its lock on the file could be taken by nobody.

    Returns:
        How many messages it holds.
    """
    while True:
        worker.stop()
        story = scene.story()
        if not is_locked(scene) and any(not attempt.result for attempt in story.attempts):
            return story.in_flight(story.faults[-1])
        worker.continue_()
        time.sleep(0.01)  # it must get on before it is frozen again


def is_locked(scene: Scene) -> bool:
    if isinstance(scene, RedisScene):
        return False
    with closing(sqlite3.connect(scene.path, timeout=0, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        return False

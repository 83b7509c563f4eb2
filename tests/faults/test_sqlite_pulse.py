"""B1, B2, L1 on SQLite: the claims of a process that has ended return at once, and the claims of no other process."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from aiodelay.core.values import LaneLimits, Limit
from aiodelay.sqlite import SqliteStore
from aiodelay.testing.history import Lease, Limits
from tests.faults.programs.worker import Burst
from tests.faults.scene import Scene
from tests.support.processes import PATIENCE_S, Worker
from tests.support.waiting import until_sync

LONG_LEASE_MS, SHORT_LEASE_MS, RENEWED_LEASE_MS = 45_000, 3_000, 12_000
RENEWALS = 4
"""So many renewals take longer than a lease, and one of them may be seconds late."""
ENDLESS_MS = 600_000
RETURNED = "of its messages were returned"


def start(scene: Scene, name: str, lease_ms: int = LONG_LEASE_MS, **settings: Any) -> Worker:  # noqa: ANN401 - of a plan
    worker = scene.start(name, serve=("work",), lease_ms=lease_ms, until="sigterm", is_patient=True, **settings)
    worker.line("ready")
    return worker


def leases(scene: Scene) -> dict[str, int]:
    """Return the tokens of all leases, by message id."""
    query = "SELECT m.id, l.token FROM leases AS l JOIN messages AS m ON m.n = l.n"
    with closing(sqlite3.connect(scene.path)) as connection:
        return dict(connection.execute(query).fetchall())


def begun(scene: Scene, process: str) -> set[str]:
    return {each.start.id for each in scene.story().attempts if each.start.process == process}


def holding(scene: Scene, messages: int, **settings: Any) -> Worker:  # noqa: ANN401 - the fields of a plan
    """Start a worker whose runs have begun and do not end."""
    first: dict[str, Any] = {"run_ms": ENDLESS_MS, "burst": Burst(messages=messages, spread_ms=0)}
    victim = start(scene, "victim", **first | settings)
    until_sync(lambda: len(begun(scene, "victim")) == messages, "all runs have begun", PATIENCE_S)
    return victim


def end(*workers: Worker) -> None:
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.ended_well()


def taken_over(scene: Scene) -> Iterator[tuple[Lease, Lease]]:
    """Yield the claims of the victim with the heir's claims of the same messages."""
    story = scene.story()
    for newer in (each for each in story.leases if each.process == "heir"):
        for older in story.leases:
            if older.process == "victim" and older.note.id == newer.note.id:
                yield older, newer


def wait_for_return(scene: Scene, heir: Worker) -> None:
    """Wait until the heir runs the messages of the victim, because it has noticed the end of the victim's process."""
    until_sync(lambda: f"8 {RETURNED}" in heir.errors, "the other process has logged the return", PATIENCE_S)
    until_sync(lambda: begun(scene, "heir") >= begun(scene, "victim"), "it runs the messages", PATIENCE_S)


@contextmanager
def child_of(victim: Worker) -> Iterator[int]:
    """Yield the pid of the child that a worker has forked, and end the child."""
    pid = int(victim.line("child"))
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


def test_b1_b2_the_messages_of_a_killed_process_return_long_before_their_leases_end(scene: Scene) -> None:
    victim = holding(scene, 8)
    heir = start(scene, "heir")
    victim.kill()
    wait_for_return(scene, heir)
    end(heir)
    assert scene.judge(Limits(lapses=False)).duplicates == 8
    assert not [each.name for each in scene.path.parent.glob("*-workers")]


def test_c1_the_end_of_a_process_makes_room_within_the_limits_of_a_lane(scene: Scene) -> None:
    async def limit() -> None:
        async with SqliteStore(scene.path) as store:
            await store.set_limits("work", LaneLimits(whole=Limit(concurrency=8)), is_declared=False)

    asyncio.run(limit())
    victim = holding(scene, 8)
    heir = start(scene, "heir")
    victim.kill()
    wait_for_return(scene, heir)
    end(heir)
    assert scene.judge(Limits(lapses=False)).duplicates == 8
    with closing(sqlite3.connect(scene.path)) as connection:
        assert set(connection.execute("SELECT running FROM limited_keys")) == {(0,)}


def test_b2_the_only_process_gets_its_messages_back_when_it_is_started_again(scene: Scene) -> None:
    holding(scene, 8).kill()
    heir = start(scene, "heir")
    wait_for_return(scene, heir)
    end(heir)
    assert scene.judge(Limits(lapses=False)).duplicates == 8


def test_b1_l1_the_messages_of_a_process_that_stands_still_return_when_their_leases_end(scene: Scene) -> None:
    victim = holding(scene, 8, lease_ms=SHORT_LEASE_MS)
    heir = start(scene, "heir", lease_ms=SHORT_LEASE_MS)
    victim.stop()
    until_sync(lambda: len(begun(scene, "heir")) == 8, "the other process runs the messages", PATIENCE_S)
    for older, newer in taken_over(scene):
        assert newer.now_ms >= older.deadline_ms(newer.asked_ns)
    until_sync(lambda: not leases(scene), "the other process has settled the messages", PATIENCE_S)
    victim.continue_()
    until_sync(lambda: "leases were lost" in victim.errors, "the stopped process notices", PATIENCE_S)
    assert RETURNED not in heir.errors
    end(victim, heir)
    assert scene.judge().duplicates <= 8


@pytest.mark.parametrize("how", ["python", "c"])
def test_b1_l1_a_child_that_outlives_a_killed_process(scene: Scene, how: str) -> None:
    """Python closes the file in the child. If a library in C has forked it, the child keeps the lock."""
    # A lapse before the kill would make suspects of the messages, and their trials last for a minute.
    lease_ms = LONG_LEASE_MS if how == "python" else 2 * SHORT_LEASE_MS
    burst = Burst(messages=8, spread_ms=0, special={7: f"fork:{how}".encode()})
    victim = holding(scene, 8, burst=burst, lease_ms=lease_ms, misbehaves=True)
    with child_of(victim):
        if how == "python":
            heir = start(scene, "heir", lease_ms=lease_ms)
            victim.kill()
            wait_for_return(scene, heir)
        else:
            victim.kill()  # before the other process can take over what lapses
            heir = start(scene, "heir", lease_ms=lease_ms)
            until_sync(lambda: len(begun(scene, "heir")) == 8, "the other process runs the messages", PATIENCE_S)
            assert RETURNED not in heir.errors
            for older, newer in taken_over(scene):
                assert newer.now_ms >= older.deadline_ms(newer.asked_ns)
    end(heir)
    assert scene.judge(Limits(lapses=False)).duplicates == 8


def test_b1_a_process_that_lives_keeps_its_lock_when_its_child_ends(scene: Scene) -> None:
    burst = Burst(messages=8, spread_ms=0, special={7: b"fork:c"})
    victim = holding(scene, 8, burst=burst, misbehaves=True)
    with child_of(victim):
        pass
    heir = start(scene, "heir")
    scene.start("producer", burst=Burst(messages=1, prefix="last", spread_ms=0), until="produced").ended_well()
    until_sync(lambda: begun(scene, "heir") == {"last-0"}, "the other process looks and works", PATIENCE_S)
    victim.kill()
    wait_for_return(scene, heir)
    end(heir)
    assert scene.judge(Limits(lapses=False)).duplicates == 8


@pytest.mark.parametrize("way", ["block", pytest.param("spin", marks=pytest.mark.nightly)])
def test_l1_b1_a_process_whose_loop_is_blocked_keeps_what_it_runs_and_gives_back_the_rest(
    scene: Scene, way: str
) -> None:
    times: dict[str, Any] = {"lease_ms": RENEWED_LEASE_MS, "run_ms": 0, "concurrency": 8}
    burst = Burst(messages=20, spread_ms=0, special={0: way.encode()})
    victim = start(scene, "victim", misbehaves=True, burst=burst, **times)
    victim.line("blocking")
    heir = start(scene, "heir", **times)
    kept = begun(scene, "victim")
    others = {f"m-{i}" for i in range(20)} - kept
    assert others, "everything had begun, so nothing is tested"
    until_sync(lambda: begun(scene, "heir") >= others, "the other process runs the rest", PATIENCE_S)
    until_sync(lambda: leases(scene).keys() <= kept, "the other process has settled the rest", PATIENCE_S)
    tokens: dict[str, set[int]] = {each: set() for each in leases(scene)}
    assert "m-0" in tokens

    def is_renewed() -> bool:
        for each, token in leases(scene).items():
            tokens[each].add(token)
        return all(len(each) > RENEWALS for each in tokens.values())

    until_sync(is_renewed, "the leases are renewed while the loop is blocked", PATIENCE_S)
    victim.tell("go")
    end(victim, heir)
    assert begun(scene, "heir") == others
    assert scene.judge(Limits(lapses=False)).duplicates == 0

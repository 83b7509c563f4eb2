"""B1, B2 on Redis: the claims of a process that ends or stands still return before their leases end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import closing
from typing import Any

import pytest
import redis

from aiodelay.backends.redis.records.keys import text_of
from aiodelay.core.values import Limit, lane_limits
from aiodelay.redis import open_store
from aiodelay.testing.history import Limits
from tests.faults.programs.worker import Burst
from tests.faults.scene import RedisScene
from tests.support.processes import PATIENCE_S, Worker
from tests.support.waiting import until_sync

LEASE_MS = 120_000
"""No test waits for the end of such a lease."""
RETURNED = "of its messages were returned"
PULSES = "{default:00}:pulses"
ENDLESS_MS = 600_000
RUN_MS = 10_000
KEPT_MS = 12_000
"""The length of a lease that a blocked process keeps. It is renewed after a third of this time."""
RENEWALS = 4
"""So many renewals take more than a lease."""
STALL_S = 5.0
"""Longer than the time after which a process is declared dead, and shorter than a lease."""


@pytest.fixture
def scene(redis_scene: RedisScene) -> RedisScene:
    return redis_scene


def start(scene: RedisScene, name: str, **settings: Any) -> Worker:  # noqa: ANN401 - the fields of a plan
    worker = scene.start(name, serve=("work",), until="sigterm", **{"lease_ms": LEASE_MS} | settings)
    worker.line("ready")
    return worker


def recorded(scene: RedisScene) -> int:
    """Return the number of claimed messages that return when their process is declared dead."""
    client: Any
    with closing(redis.Redis.from_url(scene.server.url, decode_responses=True)) as client:
        marks = [mark for name in client.hkeys(PULSES) for mark in client.zrange(f"{{default:00}}:held:{name}", 0, -1)]
        held = [mark.split(" ") for mark in marks]
        return sum(client.zcount(f"{{default:00}}:leased:{lane}", token, token) for lane, token in held)


def produce(scene: RedisScene, name: str, burst: Burst) -> None:
    scene.start(name, burst=burst, until="produced").ended_well()


def leases(scene: RedisScene) -> dict[str, int]:
    """Return the tokens of all leases, by message id."""
    client: Any
    with closing(redis.Redis.from_url(scene.server.url)) as client:
        found = [client.zrange(key, 0, -1, withscores=True) for key in client.scan_iter("{default:00}:leased:*")]
        return {text_of(member): int(token) for each in found for member, token in each}


def begun(scene: RedisScene, process: str) -> set[str]:
    return {each.start.id for each in scene.story().attempts if each.start.process == process}


def end(*workers: Worker) -> None:
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.ended_well()


def holding_one(scene: RedisScene, name: str, **settings: Any) -> Worker:  # noqa: ANN401 - the fields of a plan
    """Start a worker that holds a message, and is known to the store: so its next claims are recorded too."""
    victim = start(scene, name, **settings)
    produce(scene, "first", Burst(messages=1, prefix="first", spread_ms=0))
    until_sync(lambda: recorded(scene) == 1, "the store has recorded the claim", PATIENCE_S)
    return victim


def test_b1_b2_the_messages_of_a_killed_process_return_before_their_leases_end(scene: RedisScene) -> None:
    victim = start(scene, "victim", run_ms=ENDLESS_MS, concurrency=8)
    produce(scene, "producer", Burst(messages=20, spread_ms=0))
    until_sync(lambda: recorded(scene) == 8, "the store has recorded the claims", PATIENCE_S)
    until_sync(lambda: len(begun(scene, "victim")) == 8, "the messages run", PATIENCE_S)
    held = begun(scene, "victim")
    other = start(scene, "other", is_patient=True)
    until_sync(lambda: len(begun(scene, "other")) == 12, "the other worker runs what is left", PATIENCE_S)
    end(other)
    victim.kill()
    heir = start(scene, "heir")
    until_sync(lambda: begun(scene, "heir") >= held, "the heir runs the messages", PATIENCE_S)
    until_sync(lambda: f"8 {RETURNED}" in heir.errors, "the heir has logged the return", PATIENCE_S)
    end(heir)
    assert scene.judge(Limits(lapses=False)).duplicates == 8
    assert scene.server.command("EXISTS", PULSES) == b":0\r\n", "an idle worker has no number, nor has a dead one"


def test_c1_the_messages_of_a_killed_process_give_their_room_back(scene: RedisScene) -> None:
    async def limit() -> None:
        async with open_store(scene.server.url, namespace="default", clock=None) as store:
            await store.set_limits("work", lane_limits([Limit(concurrency=3)]), is_declared=False)

    asyncio.run(limit())
    victim = start(scene, "victim", run_ms=ENDLESS_MS, concurrency=8)
    produce(scene, "producer", Burst(messages=12, spread_ms=0))
    until_sync(lambda: recorded(scene) == 3, "the store has recorded the claims", PATIENCE_S)
    until_sync(lambda: len(begun(scene, "victim")) == 3, "the messages run", PATIENCE_S)
    other = start(scene, "other", concurrency=8, is_patient=True)
    assert begun(scene, "other") == set()
    victim.kill()
    heir = start(scene, "heir", concurrency=8)
    others = ("other", "heir")
    until_sync(lambda: len(set[str]().union(*(begun(scene, each) for each in others))) == 12, "all run", PATIENCE_S)
    end(other, heir)
    assert scene.judge(Limits(lapses=False)).duplicates == 3


def test_b1_a_process_that_stood_still_begins_nothing_that_others_have_got(scene: RedisScene) -> None:
    victim = holding_one(scene, "victim", run_ms=ENDLESS_MS, concurrency=8, misbehaves=True)
    produce(scene, "producer", Burst(messages=8, spread_ms=0, special={0: b"block"}))
    victim.line("blocking")
    victim.stop()
    heir = start(scene, "heir")
    begun_before = begun(scene, "victim")
    claimed = {each.note.id for each in scene.story().leases if each.process == "victim"}
    assert claimed - begun_before, "everything had begun, so nothing is tested"
    until_sync(lambda: begun(scene, "heir") >= claimed, "the other worker runs the messages", PATIENCE_S)
    until_sync(lambda: RETURNED in heir.errors, "the other worker has logged the return", PATIENCE_S)
    victim.continue_()
    victim.tell("go")
    until_sync(lambda: "declared" in victim.errors, "the stopped process notices", PATIENCE_S)
    end(victim, heir)
    assert begun(scene, "victim") == begun_before
    assert scene.judge(Limits(lapses=False)).duplicates <= len(begun_before)


def test_b1_a_server_that_stood_still_costs_no_process_its_claims(scene: RedisScene) -> None:
    workers = [start(scene, f"w{i}", run_ms=RUN_MS, concurrency=4) for i in range(2)]
    produce(scene, "producer", Burst(messages=8, spread_ms=0))
    until_sync(lambda: recorded(scene) == 8, "the store has recorded the claims", PATIENCE_S)
    os.kill(scene.server.pid, signal.SIGSTOP)
    time.sleep(STALL_S)  # the fault
    os.kill(scene.server.pid, signal.SIGCONT)
    end(*workers)
    assert scene.judge(Limits(lapses=False)).duplicates == 0
    assert all(RETURNED not in each.errors for each in workers)


@pytest.mark.parametrize("way", ["block", "spin"])
def test_l1_b1_a_process_whose_loop_is_blocked_keeps_what_it_runs_and_gives_back_the_rest(
    scene: RedisScene, way: str
) -> None:
    times = {"lease_ms": KEPT_MS, "run_ms": 0, "concurrency": 8, "is_patient": True}
    victim = start(scene, "victim", misbehaves=True, **times)
    produce(scene, "first", Burst(messages=1, prefix="first", spread_ms=0, special={0: b"sleep:20000"}))
    until_sync(lambda: recorded(scene) == 1, "the store has recorded the claim", PATIENCE_S)
    produce(scene, "producer", Burst(messages=20, spread_ms=0, special={0: way.encode()}))
    victim.line("blocking")
    heir = start(scene, "heir", **times)
    kept = begun(scene, "victim")
    others = {f"m-{i}" for i in range(20)} - kept
    assert others, "everything had begun, so nothing is tested"
    until_sync(lambda: begun(scene, "heir") >= others, "the other worker runs the rest", PATIENCE_S)
    until_sync(lambda: leases(scene).keys() <= kept, "the other worker has settled the rest", PATIENCE_S)
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


def test_b2_others_get_the_messages_of_a_process_whose_loop_is_blocked_for_too_long(scene: RedisScene) -> None:
    victim = start(scene, "victim", run_ms=ENDLESS_MS, concurrency=8, misbehaves=True, stuck_after_ms=3_000)
    produce(scene, "producer", Burst(messages=8, spread_ms=0, special={0: b"block"}))
    victim.line("blocking")
    heir = start(scene, "heir", run_ms=0)
    until_sync(lambda: len(begun(scene, "heir")) == 8, "the other worker runs the messages", PATIENCE_S)
    until_sync(lambda: "the event loop has been blocked for" in victim.errors, "the victim says why", PATIENCE_S)
    until_sync(lambda: "block_until_told" in victim.errors, "the log says where", PATIENCE_S)
    begun_before = begun(scene, "victim")
    victim.tell("go")
    until_sync(lambda: "declared" in victim.errors, "the blocked process notices", PATIENCE_S)
    end(victim, heir)
    assert begun(scene, "victim") == begun_before
    assert victim.errors.count("the event loop has been blocked for") == 1

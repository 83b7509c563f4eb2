"""F4: if a handler blocks its event loop for longer than a lease, another process takes over the lapsed claims.

L5: if it does so in each process that takes it, it is not taken for a killer, and is delivered.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from aiodelay.redis import RedisFanout, RedisLog
from aiodelay.testing.history import Limits
from tests.faults.programs.worker import Burst, Stream
from tests.faults.scene import TAKEOVER_MS, RedisScene, Scene
from tests.faults.test_redis_lists import end, start_role
from tests.support.processes import PATIENCE_S
from tests.support.waiting import until_sync

STUCK_AFTER_MS = 500
"""Shorter than the time after which a blocked process begins to renew its leases: nobody renews them."""
LAG_S = 2.0
"""More than the lag of an event loop of which a process warns."""


def test_f4_what_a_blocked_process_holds_is_taken_over_and_afterwards_both_work(any_scene: Scene) -> None:
    burst = Burst(messages=100, spread_ms=2_500, special={25: b"block"})
    blocked = any_scene.start(
        "blocked",
        serve=("work",),
        burst=burst,
        run_ms=100,
        misbehaves=True,
        waits=True,
        until="sigterm",
        stuck_after_ms=STUCK_AFTER_MS,
    )
    flow = Stream(seconds=0, rate=60, ids=100, seed=1, until_told=True)  # so that work is left for both
    other = any_scene.start("other", serve=("work",), run_ms=100, waits=True, stream=flow)
    other.line("waiting")
    blocked.tell("go")
    blocked.line("blocking")
    blocked_at_s = time.monotonic()
    other.tell("go")

    def runs(since_ns: int) -> set[tuple[str, str]]:
        return {
            (each.start.process, each.start.id) for each in any_scene.story().attempts if each.start.at_ns > since_ns
        }

    until_sync(lambda: ("other", "m-25") in runs(0), "the other process takes over what the first one runs", PATIENCE_S)
    time.sleep(max(LAG_S - (time.monotonic() - blocked_at_s), 0))  # the loop must be blocked for that long
    freed_ns = time.monotonic_ns()
    blocked.tell("go")
    until_sync(lambda: {each for each, _ in runs(freed_ns)} == {"blocked", "other"}, "both work", PATIENCE_S)
    blocked.terminate()
    blocked.ended_well()
    other.terminate()
    other.ended_well()
    report = any_scene.judge(Limits(takeover_ms=TAKEOVER_MS))
    assert report.duplicates >= 1, "nothing was in flight, so nothing was tested"
    assert "the event loop ran " in blocked.errors


def test_l5_who_blocks_the_loop_of_each_process_for_many_leases_is_delivered(any_scene: Scene) -> None:
    burst = Burst(messages=1, spread_ms=0, special={0: b"hog:6000"})
    any_scene.start("producer", burst=burst, until="produced").ended_well()
    workers = [any_scene.start(f"w{i}", serve=("work",)) for i in range(2)]
    for worker in workers:
        worker.ended_well()
    any_scene.judge(Limits(takeover_ms=TAKEOVER_MS))
    assert any(attempt.result == "ok" for attempt in any_scene.story().attempts)


SOURCES = {"list": "redis-list:orders", "topic": "redis-fanout:orders", "log": "redis-log:orders"}
WAITING = {
    "list": ["orders", "{orders}:aiodelay:consumers"],
    "topic": [f"{{default:00}}:fanout:orders@billing:{each}" for each in ("refs", "consumers")],
    "log": [f"{{default:00}}:log:orders@billing:{each}" for each in ("refs", "consumers")],
}
"""The keys that are there while a source holds messages, or a process has taken some from it."""


def register(scene: RedisScene, kind: str) -> str:
    """Make the consumer of a topic known; return what a handler takes from."""

    async def play() -> None:
        async with RedisFanout(scene.url) as fanout, RedisLog(scene.url) as log:
            await (fanout if kind == "topic" else log).register("orders", "billing")

    if kind == "list":
        return SOURCES[kind]
    asyncio.run(play())
    return f"{SOURCES[kind]}?consumer=billing"


@pytest.mark.parametrize("kind", SOURCES)
def test_l5_who_blocks_the_loop_of_each_process_that_takes_it_from_a_source_is_delivered(
    redis_scene: RedisScene, kind: str
) -> None:
    scene, source = redis_scene, register(redis_scene, kind)
    mover = start_role(scene, "mover", "moves")
    workers = [start_role(scene, f"w{i}", "handles", source=source) for i in range(2)]
    burst = Burst(messages=1, spread_ms=0, special={0: b"hog:6000"}, to=SOURCES[kind])
    scene.start("producer", burst=burst, until="produced").ended_well()

    def is_over() -> bool:
        has_run = any(each.result == "ok" for each in scene.story().attempts)
        return has_run and scene.server.command("EXISTS", *WAITING[kind]) == b":0\r\n"

    until_sync(is_over, "no process holds the message any more", PATIENCE_S)
    for worker in (mover, *workers):
        end(worker)
    scene.judge(Limits(takeover_ms=TAKEOVER_MS))
    assert scene.server.command("HLEN", "{default:00}:dead") == b":0\r\n"

"""F19: a node of a cluster falls silent, as in a power cut, and its replica takes over. Processes follow by themselves.

A node that is killed closes its connections. A silent node closes none: only time limits end the calls to it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from aiodelay import Scheduler
from aiodelay.backends.redis.records.shards import shard_of
from aiodelay.core.pulse import AGAIN_MS
from aiodelay.ports import Work
from aiodelay.ports.pulse import Pulse, Pulsing
from aiodelay.redis import ShardedStore
from tests.support.failover_probe import FailoverProbe
from tests.support.servers import redis_products, stopped
from tests.support.slow_stores import opened_patiently
from tests.support.topologies import Cluster, clustered
from tests.support.waiting import until

BACK_S = 2.0
"""A process is back this long after the cluster, with timeout_ms=1000."""


@dataclass
class Order:
    number: int


@pytest.fixture(params=redis_products(), ids=lambda found: found.name)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with clustered(request.param.program, "--cluster-require-full-coverage", "no") as found:
        yield found


class Steps(threading.Thread):
    """Takes the steps of a pulse, as the engine does.

    Attributes:
        answered_ns: When the store has answered a step, for each answer.
        is_over: Set to end the thread.
    """

    def __init__(self, pulse: Pulse) -> None:
        super().__init__(name="steps of a pulse")
        self._pulse, self.answered_ns, self.is_over = pulse, list[int](), threading.Event()

    def run(self) -> None:
        while not self.is_over.is_set():
            step = self._pulse.step([])
            if step.wait_ms != AGAIN_MS:
                self.answered_ns.append(time.monotonic_ns())
            self.is_over.wait(AGAIN_MS / 1000)
        self._pulse.leave()


@asynccontextmanager
async def working(url: str) -> AsyncIterator[Work]:
    async with ShardedStore(url) as store, store.work("w", ["other"]) as work:
        yield work


@pytest.mark.parametrize("shards", [1, pytest.param(4, marks=pytest.mark.nightly)])
def test_f19_l4_b2_a_process_and_its_pulse_follow_the_replica_of_a_silent_node(cluster: Cluster, shards: int) -> None:
    meta = f"{{default:{shards - 1:02d}}}:meta"
    silent = cluster.owner(meta)
    first, *others = (each for each in cluster.primaries if each is not silent)
    hosts = ",".join(f"127.0.0.1:{each.port}" for each in (first, silent, *others))  # the node to ask next is silent
    url = f"redis+cluster://{hosts}/?shards={shards}&timeout_ms=1000"
    ids = (each for each in (f"m{i}" for i in range(1_000_000)) if shard_of(each, shards) == shards - 1)

    async def play() -> None:
        begun = dict[int, int]()
        scheduler = Scheduler(url, open_timeout="1m")

        @scheduler.handler
        async def handle(order: Order) -> None:
            begun[order.number] = time.monotonic_ns()

        async def runs(number: int) -> None:
            await scheduler.schedule(Order(number), id=next(ids), delay="1ms")
            await until(lambda: number in begun, f"message {number} runs")

        async with scheduler, opened_patiently(lambda: working(url)) as work:
            assert isinstance(work, Pulsing)
            assert work.pulse is not None
            steps = Steps(work.pulse)
            steps.start()
            try:
                await runs(0)
                await until(lambda: steps.answered_ns, "the store answers the pulse")
                with FailoverProbe(lambda: cluster.works_without(silent, meta)) as probe, stopped(silent):
                    await runs(1)
                    await asyncio.to_thread(probe.wait)
                    answered_ns = await until(
                        lambda: next((each for each in steps.answered_ns if each > probe.works_ns), 0),
                        "the store answers the pulse again",
                    )
                    assert probe.seconds_until(begun[1]) <= BACK_S
                    assert probe.seconds_until(answered_ns) <= BACK_S
            finally:
                steps.is_over.set()
                await asyncio.to_thread(steps.join)

    asyncio.run(play())

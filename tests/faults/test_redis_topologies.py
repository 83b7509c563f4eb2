"""F19: a slot moves to another node, or a primary dies, while processes schedule and deliver: nothing is lost."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from aiodelay import Message, Scheduler
from aiodelay.backends.redis.records.elements import decode_element
from aiodelay.redis import RedisListSource, RedisStore
from aiodelay.testing import history as h
from aiodelay.testing.history import Limits
from tests.faults.programs.worker import Stream
from tests.faults.scene import TAKEOVER_MS, RedisScene
from tests.support.failover_probe import FailoverProbe
from tests.support.processes import PATIENCE_S, Crew
from tests.support.servers import RedisServer, redis_products, replicate
from tests.support.topologies import Cluster, SentinelTrio, clustered, watched
from tests.support.waiting import until, until_sync

META = "{default:00}:meta"
FLOW = Stream(seconds=2, rate=200, ids=100, seed=1, until_told=True)
FULL_FLOW = Stream(seconds=20, rate=1_000, ids=2_000, seed=1, until_told=True)
"""Two processes give more than 1,000 commands per second together, if the machine carries it."""
BACK_S = 2.0
"""With timeout_ms=1000, each process is back this long after the servers."""
PATIENT_NODES = ("--cluster-node-timeout", "20000")
"""No node that stands still for seconds fails over, where a test does not want it to."""
MIN_REPLICAS = ("--min-replicas-to-write", "1")
"""Without it, a primary that comes back takes writes until the Sentinels make it a replica."""


class TopologyScene(RedisScene):
    """A cluster or Sentinels, their clients and their history."""

    def __init__(self, crew: Crew, folder: Path, topology: Cluster | SentinelTrio) -> None:
        self.topology = topology
        super().__init__(crew, folder, self.owner())
        self.url = topology.url

    def owner(self) -> RedisServer:
        """Return the server that has the namespace now."""
        return self.topology.owner(META) if isinstance(self.topology, Cluster) else self.topology.primary()

    def store_url(self) -> str:
        return self.topology.url

    def leases(self) -> int:
        self.server = self.owner()
        return super().leases()

    def runs(self) -> int:
        """Return how many runs the history has."""
        return self.crew.history_path.read_bytes().count(b'"event":"run"')


@pytest.fixture(params=redis_products(), ids=lambda found: found.name)
def cluster_scene(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TopologyScene]:
    with clustered(request.param.program) as cluster, Crew(tmp_path) as crew:
        yield TopologyScene(crew, tmp_path, cluster)


@pytest.fixture(params=redis_products(), ids=lambda found: found.name)
def sentinel_scene(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TopologyScene]:
    with watched(request.param.program, *MIN_REPLICAS) as trio, Crew(tmp_path) as crew:
        yield TopologyScene(crew, tmp_path, trio)


def works_again(scene: TopologyScene) -> None:
    """Wait until messages run, after whatever was done to the servers."""
    before = scene.runs()
    until_sync(lambda: scene.runs() > before + 40, "messages run again", PATIENCE_S)


@pytest.fixture(params=redis_products(), ids=lambda found: found.name)
def patient_scene(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TopologyScene]:
    with clustered(request.param.program, *PATIENT_NODES) as cluster, Crew(tmp_path) as crew:
        yield TopologyScene(crew, tmp_path, cluster)


def test_f19_a_slot_moves_under_load(patient_scene: TopologyScene) -> None:
    scene, cluster = patient_scene, patient_scene.topology
    assert isinstance(cluster, Cluster)
    scene.url += "?durability=replicated:1"
    workers = [scene.start(name, serve=("work",), run_ms=20, stream=FLOW) for name in ("a", "b")]
    for worker in workers:
        worker.line("run 40")
    for _ in range(3):
        owner = cluster.owner(META)
        cluster.move(META, next(each for each in cluster.primaries if each is not owner))
        works_again(scene)
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.ended_well()
    assert scene.judge(Limits(takeover_ms=TAKEOVER_MS)).delivered > 100


@pytest.fixture(params=redis_products(), ids=lambda found: found.name)
def primaries_scene(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TopologyScene]:
    with clustered(request.param.program, *PATIENT_NODES, replicas=False) as cluster, Crew(tmp_path) as crew:
        yield TopologyScene(crew, tmp_path, cluster)


NEAR, FAR = "near{default:00}", "far"
"""A list in the slot of the namespace, and a list elsewhere."""


async def schedule_to(keys: Sequence[str], url: str, round_: int) -> None:
    """Schedule messages for each list, due one by one."""
    now = datetime.now(UTC)
    messages = [
        Message(b"", id=f"{key}-{round_}-{i}", to=f"redis-list:{key}", at=now + timedelta(milliseconds=3 * i))
        for i in range(300)
        for key in keys
    ]
    async with Scheduler(url, dispatch=False) as scheduler:
        assert await scheduler.schedule_many(messages) == len(messages)


async def pushed(url: str, key: str) -> Counter[str]:
    """Return the ids in a list, with the number of elements of each."""
    async with RedisListSource(url) as source:
        assert source._client is not None
        elements = await source._client.command("LRANGE", key, 0, -1)
    return Counter(decode_element(each, lane="lists").record.id for each in elements)


async def until_empty(url: str) -> None:
    async def is_empty() -> bool:
        return not await store.counts()

    async with RedisStore(url) as store:
        await until(is_empty, "no message is left", PATIENCE_S)


@pytest.mark.parametrize("keys", [(NEAR,), pytest.param((NEAR, FAR), marks=pytest.mark.nightly)], ids=str)
def test_f19_movers_are_killed_while_their_slot_moves(primaries_scene: TopologyScene, keys: Sequence[str]) -> None:
    """Each message for the list in the slot arrives once. Only messages for the other list are claimed."""
    scene, cluster = primaries_scene, primaries_scene.topology
    assert isinstance(cluster, Cluster)

    def length() -> int:
        found = until_sync(lambda: re.match(rb":(\d+)", scene.owner().command("LLEN", NEAR)), "the owner answers")
        assert found is not None
        return int(found[1])

    movers = [scene.start(f"mover{i}", moves=True, until="sigterm") for i in range(2)]
    for round_ in range(2):
        began = length()
        asyncio.run(schedule_to(keys, scene.url, round_))
        until_sync(lambda: length() > began, "messages move")  # noqa: B023
        owner = scene.owner()
        target = next(each for each in cluster.primaries if each is not owner)
        cluster.begin_move(META, target)
        cluster.move_keys(META, owner, target, most=3)  # The list may be on one node, and the namespace on the other.
        movers.pop(0).kill()
        while cluster.move_keys(META, owner, target):
            pass
        cluster.end_move(META, owner, target)
        movers.append(scene.start(f"heir{round_}", moves=True, until="sigterm"))
    asyncio.run(until_empty(scene.url))
    for mover in movers:
        mover.line("ready")
        mover.terminate()
        mover.ended_well()
    found = {key: asyncio.run(pushed(scene.url, key)) for key in keys}
    assert found[NEAR] == Counter(f"{NEAR}-{round_}-{i}" for round_ in range(2) for i in range(300))
    for key in keys:
        assert set(found[key]) == {f"{key}-{round_}-{i}" for round_ in range(2) for i in range(300)}


def replicated_ns(primary: RedisServer) -> int:
    """Wait until the replica has all writes from before this call. Return the time of the call."""

    def found(pattern: bytes) -> int:
        offset = re.search(pattern, primary.command("INFO", "replication"))
        return -1 if offset is None else int(offset[1])

    called_ns, written = time.monotonic_ns(), found(rb"master_repl_offset:(\d+)")
    until_sync(lambda: found(rb"slave0:.*offset=(\d+)") >= written, "the replica has all writes", PATIENCE_S)
    return called_ns


def stops(former: RedisServer) -> None:
    os.kill(former.pid, signal.SIGSTOP)


def continues(former: RedisServer) -> None:
    os.kill(former.pid, signal.SIGCONT)


def fails_over(
    scene: TopologyScene,
    fail: Callable[[RedisServer], None],
    come_back: Callable[[RedisServer], None],
    flow: Stream,
) -> None:
    """Let the primary fail under load. Processes must be back soon, and commands that were called replicated survive.

    The former primary comes back as the replica, without which nothing is called replicated.
    """
    topology = scene.topology
    scene.url += f"{'&' if '?' in scene.url else '?'}durability=replicated:1&timeout_ms=1000"
    workers = [scene.start(name, serve=("work",), run_ms=20, stream=flow) for name in ("a", "b")]
    for worker in workers:
        worker.line("run 40")
    until_sync(lambda: scene.runs() > flow.rate, "the load is there", PATIENCE_S)
    former = scene.owner()

    def works(replicas: int) -> bool:
        if isinstance(topology, Cluster):
            return topology.works_without(former, META, replicas=replicas)
        return topology.works_without(former, replicas=replicas)

    replicated = replicated_ns(former)
    with FailoverProbe(lambda: works(0)) as replaced, FailoverProbe(lambda: works(1)) as probe:
        fail(former)
        replaced.wait()
        come_back(former)
        if isinstance(topology, SentinelTrio):  # The Sentinels would do so after some 10 s.
            replicate(former, scene.owner().port)
        probe.wait()
        scene.crew.history.write(h.Loss(since_ns=replicated, commands=False))
        until_sync(lambda: len(first_answers(scene, probe.works_ns)) == 2 * len(workers), "all are back", PATIENCE_S)
    back_s = {of: probe.seconds_until(at_ns) for of, at_ns in first_answers(scene, probe.works_ns).items()}
    print(f"{commands_per_s(scene, replicated)} commands/s before the fault; back after {back_s}")
    assert max(back_s.values()) <= BACK_S
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.ended_well()
    assert scene.judge(Limits(takeover_ms=TAKEOVER_MS)).delivered > 60


def commands_per_s(scene: TopologyScene, until_ns: int) -> int:
    """Return the number of answers to commands in the second before a time."""
    answers = (each.at_ns for each in h.read(scene.crew.history_path) if isinstance(each, h.Returned))
    return sum(until_ns - 1_000_000_000 <= each < until_ns for each in answers)


def first_answers(scene: TopologyScene, since_ns: int) -> dict[tuple[str, str], int]:
    """Return when each process has got its first claims, and the first answer to a command, from a time on."""
    found: dict[tuple[str, str], int] = {}
    for each in h.read(scene.crew.history_path):
        is_answer = isinstance(each, h.Returned) and each.outcome == "ok"
        if each.at_ns >= since_ns and (is_answer or (isinstance(each, h.Claimed) and each.claims)):
            found.setdefault((each.process, type(each).__name__), each.at_ns)
    return found


@pytest.mark.parametrize("flow", [FLOW, pytest.param(FULL_FLOW, marks=pytest.mark.nightly)], ids=["400/s", "full load"])
def test_f19_the_primary_of_the_namespace_dies_in_a_cluster(cluster_scene: TopologyScene, flow: Stream) -> None:
    fails_over(cluster_scene, RedisServer.kill, RedisServer.start, flow)


@pytest.mark.nightly
def test_f19_the_primary_of_the_namespace_falls_silent_in_a_cluster(cluster_scene: TopologyScene) -> None:
    fails_over(cluster_scene, stops, continues, FULL_FLOW)


@pytest.mark.parametrize("flow", [FLOW, pytest.param(FULL_FLOW, marks=pytest.mark.nightly)], ids=["400/s", "full load"])
def test_f19_the_primary_dies_behind_sentinels(sentinel_scene: TopologyScene, flow: Stream) -> None:
    fails_over(sentinel_scene, RedisServer.kill, RedisServer.start, flow)


@pytest.mark.nightly
def test_f19_the_primary_falls_silent_behind_sentinels(sentinel_scene: TopologyScene) -> None:
    fails_over(sentinel_scene, stops, continues, FULL_FLOW)

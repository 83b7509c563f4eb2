"""F19: a slot moves to another node, or a primary dies, while processes schedule and deliver: nothing is lost."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiodelay.testing import history as h
from aiodelay.testing.history import Limits
from tests.faults.programs.worker import Stream
from tests.faults.scene import TAKEOVER_MS, RedisScene
from tests.support.processes import PATIENCE_S, Crew
from tests.support.servers import RedisServer, redis_products, replicate
from tests.support.topologies import Cluster, SentinelTrio, clustered, watched
from tests.support.waiting import until_sync

META = "{default:00}:meta"
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
        return sum(isinstance(each, h.RunStarted) for each in h.read(self.crew.history_path))


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


def test_f19_a_slot_moves_under_load(cluster_scene: TopologyScene) -> None:
    scene, cluster = cluster_scene, cluster_scene.topology
    assert isinstance(cluster, Cluster)
    flow = Stream(seconds=2, rate=200, ids=100, seed=1, until_told=True)
    workers = [scene.start(name, serve=("work",), run_ms=20, stream=flow) for name in ("a", "b")]
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


def replicated_ns(primary: RedisServer) -> int:
    """Wait until the replica has all writes from before this call. Return the time of the call."""

    def found(pattern: bytes) -> int:
        offset = re.search(pattern, primary.command("INFO", "replication"))
        return -1 if offset is None else int(offset[1])

    called_ns, written = time.monotonic_ns(), found(rb"master_repl_offset:(\d+)")
    until_sync(lambda: found(rb"slave0:.*offset=(\d+)") >= written, "the replica has all writes", PATIENCE_S)
    return called_ns


def dies(scene: TopologyScene) -> None:
    """Kill the primary under load. Commands that were called replicated must survive."""
    scene.url += f"{'&' if '?' in scene.url else '?'}durability=replicated:1&timeout_ms=1000"
    flow = Stream(seconds=2, rate=200, ids=100, seed=1, until_told=True)
    workers = [scene.start(name, serve=("work",), run_ms=20, stream=flow) for name in ("a", "b")]
    for worker in workers:
        worker.line("run 40")
    former = scene.owner()
    replicated = replicated_ns(former)
    since_ns = time.monotonic_ns()
    former.kill()
    scene.crew.history.write(h.Loss(since_ns=replicated, commands=False))
    until_sync(lambda: scene.owner() is not former, "another server is the primary", PATIENCE_S)
    print(f"failover after {(time.monotonic_ns() - since_ns) / 1e9:.1f} s")
    former.start()
    if isinstance(scene.topology, SentinelTrio):  # The Sentinels would do so after some 10 s.
        replicate(former, scene.owner().port)
    works_again(scene)
    print(f"works again after {(time.monotonic_ns() - since_ns) / 1e9:.1f} s")
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.ended_well()
    assert scene.judge(Limits(takeover_ms=TAKEOVER_MS)).delivered > 60


def test_f19_the_primary_of_the_namespace_dies_in_a_cluster(cluster_scene: TopologyScene) -> None:
    dies(cluster_scene)


def test_f19_the_primary_dies_behind_sentinels(sentinel_scene: TopologyScene) -> None:
    dies(sentinel_scene)

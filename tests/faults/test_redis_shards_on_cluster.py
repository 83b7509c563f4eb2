"""F19 with shards on several nodes: a slot moves, or a node is away. The shards of the other nodes go on meanwhile."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from aiodelay.backends.redis.records.shards import shard_of
from aiodelay.testing import history as h
from aiodelay.testing.history import Limits
from tests.faults.programs.worker import Burst, Stream
from tests.faults.scene import TAKEOVER_MS
from tests.faults.test_redis_topologies import TopologyScene, replicated_ns
from tests.support.processes import PATIENCE_S, Crew, Worker
from tests.support.servers import RedisServer, redis_products
from tests.support.topologies import Cluster, clustered
from tests.support.waiting import until_sync

pytestmark = pytest.mark.nightly

SHARDS, MESSAGES = 4, 400
FLOW = Stream(seconds=2, rate=200, ids=100, seed=1, until_told=True)
SERVED_APART = ("--cluster-require-full-coverage", "no")


class ShardedScene(TopologyScene):
    """A namespace of four shards on a cluster."""

    def __init__(self, crew: Crew, folder: Path, cluster: Cluster) -> None:
        super().__init__(crew, folder, cluster)
        self.cluster = cluster
        self.url = f"{cluster.url}?shards={SHARDS}"

    def shards_on(self, node: RedisServer) -> set[int]:
        return {shard for shard in range(SHARDS) if self.cluster.owner(meta(shard)) is node}

    def ids_run(self, shards: Collection[int], since_ns: int = 0) -> int:
        """Return how many messages of some shards have begun to run, from a time on."""
        events = (each for each in h.read(self.crew.history_path) if isinstance(each, h.RunStarted))
        return len({each.id for each in events if each.at_ns >= since_ns and shard_of(each.id, SHARDS) in shards})

    def works(self, shards: Collection[int]) -> None:
        """Wait until messages run in each of some shards, from now on."""
        since_ns = time.monotonic_ns()
        for shard in shards:
            until_sync(lambda: self.ids_run({shard}, since_ns) > 5, f"shard {shard} works", PATIENCE_S)  # noqa: B023

    def end(self, workers: list[Worker]) -> None:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.ended_well()

    def _leases(self) -> int:
        found = 0
        for shard in range(SHARDS):
            node = self.cluster.owner(meta(shard))
            lanes = node.command("HVALS", f"{{default:0{shard}}}:lanes").split(b"\r\n")[2::2]
            keys = [f"{{default:0{shard}}}:leased:{lane.decode()}" for lane in lanes if lane]
            found += sum(int(node.command("ZCARD", key)[1:]) for key in keys)
        return found


def meta(shard: int) -> str:
    return f"{{default:0{shard}}}:meta"


@pytest.fixture(params=redis_products(), ids=lambda found: found.name)
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ShardedScene]:
    settings = (*SERVED_APART, "--cluster-replica-validity-factor", "0")
    with clustered(request.param.program, *settings) as cluster, Crew(tmp_path) as crew:
        yield ShardedScene(crew, tmp_path, cluster)


def test_f19_a_primary_dies_and_only_its_shards_stand_still(scene: ShardedScene) -> None:
    """The replica becomes the primary only after all messages of the other shards have run."""
    scene.url += "&durability=replicated:1"
    former = scene.cluster.owner(meta(0))
    lost = scene.shards_on(former)
    others = set(range(SHARDS)) - lost
    assert lost
    assert others
    in_others = sum(shard_of(f"m-{i}", SHARDS) in others for i in range(MESSAGES))
    burst = Burst(messages=MESSAGES, spread_ms=4_000)
    workers = [scene.start("a", serve=("work",), run_ms=20, burst=burst, until="sigterm")]
    workers.append(scene.start("b", serve=("work",), run_ms=20, until="sigterm"))
    workers[0].line("produced")
    scene.works(range(SHARDS))
    replica = scene.cluster.replica_of(former)
    replica.command("CONFIG", "SET", "cluster-replica-no-failover", "yes")
    replicated = replicated_ns(former)
    former.kill()
    scene.crew.history.write(h.Loss(since_ns=replicated, commands=False))
    until_sync(lambda: scene.ids_run(others) == in_others, "all messages of the other shards have run", PATIENCE_S)
    assert scene.ids_run(lost) < MESSAGES - in_others, "nothing was left in the lost shards: the test shows nothing"
    replica.command("CONFIG", "SET", "cluster-replica-no-failover", "no")
    until_sync(lambda: scene.cluster.owner(meta(0)) is replica, "the replica is the primary", PATIENCE_S)
    former.start()  # it returns as the replica, without which nothing is called replicated
    until_sync(lambda: scene.ids_run(range(SHARDS)) == MESSAGES, "all messages have run", PATIENCE_S)
    scene.end(workers)
    assert scene.judge().delivered >= MESSAGES


def test_f19_the_slot_of_a_shard_moves_under_load(scene: ShardedScene) -> None:
    cluster = scene.cluster
    workers = [scene.start(name, serve=("work",), run_ms=20, stream=FLOW) for name in ("a", "b")]
    for worker in workers:
        worker.line("run 40")
    for shard in range(2):
        owner = cluster.owner(meta(shard))
        cluster.move(meta(shard), next(each for each in cluster.primaries if each is not owner))
        scene.works(range(SHARDS))
    scene.end(workers)
    assert scene.judge(Limits(takeover_ms=TAKEOVER_MS)).delivered > 100

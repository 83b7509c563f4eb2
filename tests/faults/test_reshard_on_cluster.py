"""F19 on a cluster: nodes fail over in the middle of a move, under load or at one write. Histories are checked."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from aiodelay.backends.redis.connection.faults import Fault
from aiodelay.backends.redis.connection.options import read_url
from aiodelay.backends.redis.records.shards import shard_of
from aiodelay.backends.redis.sharded import life_signs, moving
from aiodelay.backends.redis.sharded.move_client import MoveClient
from aiodelay.backends.redis.sharded.reshard import reshard
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Envelope, Put, Query, Stored
from aiodelay.errors import ConfigurationError
from aiodelay.redis import ShardedStore
from aiodelay.testing import history as h
from aiodelay.testing.history import Limits
from tests.faults.scene import TAKEOVER_MS
from tests.faults.test_redis_shards_on_cluster import SERVED_APART, ShardedScene, meta
from tests.faults.test_redis_topologies import replicated_ns
from tests.faults.test_reshard_live import SPARED_MS, mover, under_load
from tests.support.processes import PATIENCE_S, Crew
from tests.support.servers import RedisServer, redis_products
from tests.support.topologies import Cluster, clustered
from tests.support.waiting import until_sync

pytestmark = pytest.mark.nightly

LANE, MESSAGES = "orders", 90
REPLICATED = "durability=replicated:1&timeout_ms=500"


@pytest.fixture(scope="module", params=redis_products(), ids=lambda found: found.name)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    settings = (*SERVED_APART, "--cluster-replica-validity-factor", "0")
    with clustered(request.param.program, *settings) as found:
        yield found


@pytest.fixture
def scene(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardedScene]:
    monkeypatch.setattr(life_signs, "SPARED_MS", SPARED_MS)
    for node in cluster.nodes:
        node.command("FLUSHALL")
    with Crew(tmp_path) as crew:
        scene = ShardedScene(crew, tmp_path, cluster)
        scene.url = f"{cluster.url}?{REPLICATED}"
        yield scene


def replica_of(cluster: Cluster, primary: RedisServer) -> RedisServer:
    """Return the node that replicates another one now."""
    wanted = f"master_port:{primary.port}\r".encode()
    return next(node for node in cluster.nodes if wanted in node.command("INFO", "replication"))


def fails_over(cluster: Cluster, key: str) -> None:
    """Kill the primary of a key. When its replica has taken over, start the former primary as a replica."""
    former = cluster.owner(key)
    former.kill()
    until_sync(lambda: cluster.owner(key) is not former, "the replica is the primary", PATIENCE_S)
    former.start()
    until_sync(cluster.is_whole, "the former primary is a replica", PATIENCE_S)


# --- under load -------------------------------------------------------------------------------------------


@pytest.mark.timeout(400)
def test_f19_a_mover_is_killed_and_a_primary_fails_over_under_load(scene: ShardedScene) -> None:
    workers = under_load(scene, "a", "b")
    for shards, kills_mover in ((4, True), (2, False), (1, True)):
        primary = scene.cluster.owner(meta(0))
        replicated = replicated_ns(primary)
        with mover(scene, shards) as process:
            assert process.stderr is not None
            assert "examined" in process.stderr.readline()
            if kills_mover:
                process.send_signal(signal.SIGKILL)
            scene.crew.history.write(h.Loss(since_ns=replicated, commands=False))
            fails_over(scene.cluster, meta(0))
            if not kills_mover:
                assert process.wait(PATIENCE_S) == 0, process.stderr.read()
        if kills_mover:
            asyncio.run(reshard(scene.url, "default", shards, lambda *_: None))
        since_ns = time.monotonic_ns()
        until_sync(lambda: ran_since(scene, since_ns) > 20, "messages run again", PATIENCE_S)  # noqa: B023
    scene.end(workers)
    report = scene.judge(Limits(takeover_ms=SPARED_MS + TAKEOVER_MS, spare=4))
    assert report.delivered > 80


def ran_since(scene: ShardedScene, since_ns: int) -> int:
    events = (each for each in h.read(scene.crew.history_path) if isinstance(each, h.RunStarted))
    return sum(each.at_ns >= since_ns for each in events)


# --- at one write -----------------------------------------------------------------------------------------

Write = Callable[..., Awaitable[Any]]


@pytest.mark.parametrize("loses", ["copy", "deletion"])
def test_s2_s6_a_failover_after_a_copy_or_a_deletion_loses_and_doubles_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, loses: str
) -> None:
    """The replica is cut off before the write, and becomes the primary without it."""
    namespace = uuid4().hex
    ids = [f"m{i}" for i in range(MESSAGES)]
    keys = [f"{{{namespace}:0{shard}}}:msg" for shard in range(4)]
    apart = next(each for each in keys if cluster.owner(each) is not cluster.owner(keys[0]))
    key = apart if loses == "copy" else keys[0]
    write, replicas = MoveClient.write, list[RedisServer]()

    def fail_over() -> None:
        cluster.owner(key).kill()
        (replica,) = replicas
        os.kill(replica.pid, signal.SIGCONT)
        until_sync(lambda: cluster.owner(key) is replica, "the replica is the primary", PATIENCE_S)

    async def cut(self: MoveClient, name: str, at: Any, *arguments: Any) -> Any:  # noqa: ANN401 - passed on
        if replicas or at != key or name != ("HSET" if loses == "copy" else "HDEL"):
            return await write(self, name, at, *arguments)
        former = cluster.owner(key)
        replicas.append(replica_of(cluster, former))
        os.kill(replicas[0].pid, signal.SIGSTOP)
        former.command("CLIENT", "KILL", "TYPE", "replica")  # otherwise the stopped process would read the write later
        try:
            return await write(self, name, at, *arguments)
        finally:
            await asyncio.to_thread(fail_over)
            former.start()

    async def play() -> None:
        url = f"{cluster.url}?{REPLICATED}"
        async with ShardedStore(url, namespace=namespace) as store:
            puts = [Put(new_op(), Envelope(each, LANE), After(3_600_000)) for each in ids]
            assert all(isinstance(each, Stored) for each in await store.apply(puts))
        monkeypatch.setattr(moving, "AT_ONCE", 20)
        monkeypatch.setattr(MoveClient, "write", cut)
        moved = await reshard(url, namespace, 4, lambda *_: None)
        assert (moved.former, moved.shards, moved.messages) == (1, 4, MESSAGES)
        assert replicas, "no node has failed over: the test shows nothing"
        async with ShardedStore(url, namespace=namespace) as store:
            assert sorted(each.record.id for each in await store.search(Query(limit=1_000))) == sorted(ids)
            for each in ids:
                assert await store.shards[shard_of(each, 4)].get(each) is not None
            assert (await store.counts())[LANE].scheduled == MESSAGES

    asyncio.run(play())
    until_sync(cluster.is_whole, "the former primary is a replica", PATIENCE_S)


def test_s2_a_write_that_another_mover_repeats_waits_too(cluster: Cluster) -> None:
    """On Valkey, WAIT alone would wait only for writes of its own connection."""
    key = "{repeated:00}:holds"
    replica = replica_of(cluster, cluster.owner(key))

    async def nothing() -> None:
        pass

    async def play() -> None:
        for _ in range(2):
            client = MoveClient(read_url(f"{cluster.url}?{REPLICATED}"), nothing)
            with pytest.raises(Fault, match="only 0 of 1 replicas"):
                await client.write("SADD", key, "m")
            await client.aclose()

    os.kill(replica.pid, signal.SIGSTOP)
    try:
        asyncio.run(play())
    finally:
        os.kill(replica.pid, signal.SIGCONT)
    until_sync(cluster.is_whole, "the replica goes on", PATIENCE_S)


def test_a_move_whose_writes_would_not_wait_for_replicas_is_refused(cluster: Cluster) -> None:
    async def play() -> None:
        async with ShardedStore(cluster.url, namespace="refused"):
            pass
        with pytest.raises(ConfigurationError, match=r"durability in .*: replicated:<number of replicas>.*failover"):
            await reshard(cluster.url, "refused", 4, lambda *_: None)
        async with ShardedStore(cluster.url, namespace="refused") as store:
            assert len(store.shards) == 1

    asyncio.run(play())

"""A namespace of several shards on the nodes of a cluster: where shards are, what adds up, checks, wake-ups, clocks."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from msgspec.structs import replace
from redis.crc import key_slot

from aiodelay import Scheduler
from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.records.shards import shard_of
from aiodelay.backends.redis.sharded.reshard import reshard
from aiodelay.core.ids import new_id, new_op
from aiodelay.core.table_scan import Scan
from aiodelay.core.values import (
    LEASE_MS,
    At,
    Cancel,
    Command,
    Demand,
    Done,
    Envelope,
    Put,
    Query,
    Refused,
    Renewal,
    RenewOutcome,
    SettleOutcome,
    Stored,
)
from aiodelay.errors import StoreMismatchError, StoreUnavailableError
from aiodelay.ports import PartialAnswerError, Work
from aiodelay.redis import RedisStore, ShardedStore
from tests.support.cli import Cli
from tests.support.server_clock import SteppedClock
from tests.support.servers import RedisServer, redis_products
from tests.support.topologies import SLOTS, Cluster, clustered
from tests.support.waiting import until, until_sync

LANE, SHARDS = "orders", 4
STABLE = ("--cluster-node-timeout", "60000")
"""The ms after which the cluster gives up a node that does not answer: no test here needs that."""
HOUR_AHEAD_MS = int(time.time() * 1000) + 3_600_000


@dataclass
class Order:
    number: int


@pytest.fixture(scope="module", params=redis_products(), ids=lambda found: found.name)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with clustered(request.param.program, *STABLE, replicas=False) as found:
        yield found


@pytest.fixture
def namespace() -> str:
    return uuid4().hex


def meta(namespace: str, shard: int) -> str:
    return f"{{{namespace}:{shard:02d}}}:meta"


def nodes_of(cluster: Cluster, namespace: str, shards: int = SHARDS) -> list[RedisServer]:
    return [cluster.owner(meta(namespace, shard)) for shard in range(shards)]


@asynccontextmanager
async def opened(cluster: Cluster, namespace: str, query: str = "") -> AsyncIterator[tuple[ShardedStore, Work]]:
    url = f"{cluster.url}?shards={SHARDS}{query}"
    async with ShardedStore(url, namespace=namespace) as store, store.work("w", [LANE]) as work:
        yield store, work


def ids_of(shards: Collection[int], number: int) -> list[str]:
    """Return ids of messages in some shards."""
    names = (f"m{i}" for i in range(1_000_000))
    return [next(each for each in names if shard_of(each, SHARDS) in shards) for _ in range(number)]


async def put(store: ShardedStore, ids: Sequence[str], due_ms: int = 1) -> None:
    commands: list[Command] = [Put(new_op(), Envelope(each, LANE), At(due_ms)) for each in ids]
    assert all(isinstance(each, Stored) for each in await store.apply(commands))


async def claim(work: Work) -> list[str]:
    claimed = await work.claim({LANE: Demand(100)}, request=new_id(), lease_ms=LEASE_MS)
    return [each.record.id for each in claimed.claims]


# --- where the shards are ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [4, 8, 16, 64])
def test_each_of_three_primaries_has_shards_whatever_the_name_of_the_namespace(shards: int) -> None:
    for _ in range(200):
        name = uuid4().hex
        counts = Counter(key_slot(meta(name, shard).encode()) * 3 // SLOTS for shard in range(shards))
        assert set(counts) == {0, 1, 2}
        assert max(counts.values()) <= shards / 2


def test_the_shards_of_a_namespace_are_spread_over_all_nodes(cluster: Cluster, namespace: str) -> None:
    async def play() -> None:
        async with ShardedStore(f"{cluster.url}?shards=16", namespace=namespace) as store:
            await put(store, [f"m{i}" for i in range(200)])
        async with ShardedStore(f"{cluster.url}?shards=3", namespace=namespace) as store:
            assert len(store.shards) == 16, "the number counts for a new namespace only"

    asyncio.run(play())
    nodes = nodes_of(cluster, namespace, 16)
    assert {each.port for each in nodes} == {each.port for each in cluster.nodes}
    for shard, node in enumerate(nodes):
        stored = node.command("HLEN", meta(namespace, shard).replace("meta", "msg"))
        assert int(stored[1:]) > 0, f"shard {shard} has no message"


@pytest.mark.valkey_too
def test_the_shards_of_all_nodes_add_up_also_after_a_slot_has_moved(cluster: Cluster, namespace: str) -> None:
    ids = [f"m{i:02d}" for i in range(60)]

    async def adds_up(store: ShardedStore, work: Work, left: Sequence[str]) -> None:
        assert (await store.counts())[LANE].overdue == len(left)
        assert sorted(each.record.id for each in await store.search(Query(limit=100))) == sorted(left)
        assert await asyncio.to_thread(scanned, store) == set(left)
        claimed = await work.claim({LANE: Demand(20)}, request=new_id(), lease_ms=LEASE_MS)
        assert len({shard_of(each.record.id, SHARDS) for each in claimed.claims}) == SHARDS
        ends = [Done(each.record.id, each.record.revision, each.token) for each in claimed.claims]
        assert set(await work.settle(ends)) == {SettleOutcome.SETTLED}
        assert await store.vanished() == ""

    async def play() -> None:
        async with opened(cluster, namespace) as (store, work):
            await put(store, ids)
            cancels: list[Command] = [Cancel(new_op(), each) for each in ids[:10]]
            assert all(isinstance(each, Stored) for each in await store.apply(cancels))
            await adds_up(store, work, ids[10:])
            owner = cluster.owner(meta(namespace, 1))
            target = next(each for each in cluster.primaries if each is not owner)
            await asyncio.to_thread(cluster.move, meta(namespace, 1), target)
            left = [each.record.id for each in await store.search(Query(limit=100))]
            assert len(left) == 30
            await adds_up(store, work, left)

    asyncio.run(play())


def scanned(store: ShardedStore) -> set[str]:
    """Read the table of messages as Spark does, from a thread without an event loop."""
    scan = Scan(table="messages", columns=("id",))
    batches = [columns for part in store.scan_parts(scan) for columns in store.scan_part(scan, part)]
    return {each for columns in batches for each in columns["id"]}


def test_messages_of_all_shards_reach_a_list_and_a_handler(cluster: Cluster, namespace: str) -> None:
    async def play() -> None:
        handled: list[int] = []
        scheduler = Scheduler(f"{cluster.url}?shards={SHARDS}", namespace=namespace)

        @scheduler.handler
        async def handle(order: Order) -> None:
            handled.append(order.number)

        async with scheduler:
            for i in range(20):
                await scheduler.schedule(b"%d" % i, to=f"redis-list:{namespace}", delay="1ms")
                await scheduler.schedule(Order(i), delay="1ms")
            await scheduler.run_until_idle()
            assert sorted(handled) == list(range(20))
            lengths = await scheduler.store.lengths([f"redis-list:{namespace}"])  # type: ignore[attr-defined]
            assert lengths == {f"redis-list:{namespace}": 20}

    asyncio.run(play())


def unavailable(call: Callable[[], Coroutine[Any, Any, object]]) -> str:
    """Return the error of a call. If a server stands still, it may be another error than the expected one."""
    with pytest.raises(StoreUnavailableError) as raised:
        asyncio.run(call())
    return str(raised.value)


def test_s2_the_layout_of_a_new_namespace_waits_for_its_level_of_durability(cluster: Cluster) -> None:
    """Later calls to the other shards do not wait for this write: they are on other nodes."""

    async def opens() -> None:
        url = f"{cluster.url}?shards={SHARDS}&durability=replicated:1&timeout_ms=500"
        async with ShardedStore(url, namespace=uuid4().hex):
            pass

    until_sync(lambda: "only 0 of 1 replicas" in unavailable(opens), "the error is that of the durability")


def test_s2_s6_a_namespace_moves_to_other_nodes_and_its_processes_follow(cluster: Cluster, namespace: str) -> None:
    ids, later = [f"m{i}" for i in range(60)], [f"later {i}" for i in range(40)]

    async def play() -> None:
        async with (
            ShardedStore(cluster.url, namespace=namespace) as store,
            store.work("w", [LANE]) as work,
            ShardedStore(cluster.url, namespace=namespace) as other,
        ):
            await put(store, later, HOUR_AHEAD_MS)
            for shards in (4, 2, 1):
                await put(store, ids)
                claims = (await work.claim({LANE: Demand(100)}, request=new_id(), lease_ms=LEASE_MS)).claims
                assert len(claims) == len(ids)
                await reshard(cluster.url, namespace, shards, lambda *_: None)
                assert await claim(work) == []
                ends = [Done(each.record.id, each.record.revision, each.token) for each in claims]
                assert set(await work.settle(ends)) == {SettleOutcome.SETTLED}
                found = [each.record.id for each in await other.search(Query(limit=100))]
                assert sorted(found) == sorted(later)
                assert await other.get("later 7") is not None
                assert (len(store.shards), len(other.shards), await store.vanished()) == (shards, shards, "")
        used = [each for node in cluster.nodes for each in keys_on(node, namespace) if "}:req:" not in each]
        assert {each for each in used if ":00}" not in each} == {meta(namespace, shard) for shard in (1, 2, 3)}

    asyncio.run(play())


def test_s2_each_write_of_a_move_waits_for_its_durability_and_a_copy_comes_before_its_deletion(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without replicas, nothing can be waited for. So the test only records which calls would wait."""
    one, several, script = Client.command, Client.commands, Client.run_on
    plain, confirmed, waiting = set[str](), set[str](), list[tuple[str, str]]()

    async def command(self: Client, *arguments: Any, durable: bool = False) -> Any:  # noqa: ANN401 - passed on
        (confirmed if durable else plain).add(arguments[0])
        return await one(self, *arguments)

    async def commands(self: Client, given: Any, *, durable: bool = False) -> Any:  # noqa: ANN401 - passed on
        (confirmed if durable else plain).update(each[0] for each in given)
        return await several(self, given)

    async def run_on(self: Client, name: str, keys: Any, arguments: Any, *, durable: bool) -> Any:  # noqa: ANN401 - passed on
        assert (name, durable) == ("move", True)
        waiting.append((arguments[1], str(arguments[2])))
        return await script(self, name, keys, arguments)

    async def play() -> None:
        async with ShardedStore(cluster.url, namespace=namespace) as store:
            await put(store, [f"m{i}" for i in range(40)])
        monkeypatch.setattr(Client, "command", command)
        monkeypatch.setattr(Client, "commands", commands)
        monkeypatch.setattr(Client, "run_on", run_on)
        await reshard(f"{cluster.url}?durability=replicated:1", namespace, 4, lambda *_: None)

    asyncio.run(play())
    assert not plain & {"HSET", "HSETNX", "HDEL", "HINCRBY", "ZADD", "ZREM", "SADD", "SREM", "UNLINK"}
    assert confirmed == {"HSET", "HDEL", "HINCRBY"}, "before the move, in `meta`"
    copies = [waiting.index(("HSET", f"{{{namespace}:0{shard}}}:msg")) for shard in (1, 2, 3)]
    assert max(copies) < len(waiting) - 1 - waiting[::-1].index(("HDEL", f"{{{namespace}:00}}:msg"))


def test_a_move_whose_writes_reach_too_few_replicas_does_not_begin(cluster: Cluster, namespace: str) -> None:
    async def moves() -> None:
        await reshard(f"{cluster.url}?durability=replicated:1&timeout_ms=500", namespace, 4, lambda *_: None)

    async def play() -> None:
        async with ShardedStore(cluster.url, namespace=namespace) as store:
            await put(store, ["m"])

            async def is_refused() -> bool:
                return "only 0 of 1 replicas" in await asyncio.to_thread(unavailable, moves)

            await until(is_refused, "the error is that of the durability")
            assert await store.get("m") is not None
        for field in ("mover", "confirmed"):
            assert cluster.owner(meta(namespace, 0)).command("HEXISTS", meta(namespace, 0), field) == b":0\r\n"
        for key in (meta(namespace, shard) for shard in (1, 2, 3)):
            assert cluster.owner(key).command("EXISTS", key) == b":0\r\n"

    asyncio.run(play())


def keys_on(node: RedisServer, namespace: str) -> list[str]:
    return [each.decode() for each in node.command("KEYS", f"{{{namespace}:*").split(b"\r\n")[2::2]]


# --- the checks at opening --------------------------------------------------------------------------------


def test_each_node_is_checked_once(cluster: Cluster, namespace: str, caplog: pytest.LogCaptureFixture) -> None:
    async def opens() -> None:
        async with ShardedStore(f"{cluster.url}?shards={SHARDS}", namespace=namespace):
            pass

    with caplog.at_level(logging.WARNING, "aiodelay.redis"):
        asyncio.run(opens())
    told = sorted(each.getMessage().partition(" of ") for each in caplog.records)
    assert [first for first, *_ in told] == sorted(f"127.0.0.1:{node.port}" for node in cluster.nodes)
    assert all("cluster-require-full-coverage is yes" in rest for *_, rest in told)
    for node in cluster.nodes:
        node.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        try:
            with pytest.raises(StoreMismatchError, match=rf"maxmemory-policy of 127\.0\.0\.1:{node.port} of redis"):
                asyncio.run(opens())
        finally:
            node.command("CONFIG", "SET", "maxmemory-policy", "noeviction")


def test_check_diagnoses_each_node(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    check = ("check", "--namespace", namespace, "--json")
    found = Cli(f"{cluster.url}?shards={SHARDS}", tmp_path)(*check)
    warned = {each["text"].partition(": ")[0]: each for each in found.objects if each["level"] == "warning"}
    assert set(warned) == {f"127.0.0.1:{node.port}" for node in cluster.nodes}
    for each in warned.values():
        assert "cluster-require-full-coverage is yes" in each["text"]
        assert each["mend"].startswith("CONFIG SET cluster-require-full-coverage no")
    node = cluster.nodes[1]
    node.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        (problem,) = (each for each in Cli(cluster.url, tmp_path)(*check).objects if each["level"] == "problem")
        assert problem["about"].startswith(f"maxmemory-policy of 127.0.0.1:{node.port} of ")
    finally:
        node.command("CONFIG", "SET", "maxmemory-policy", "noeviction")


# --- wake-ups ---------------------------------------------------------------------------------------------


@pytest.mark.valkey_too
def test_l2_a_put_of_another_process_ends_a_wait_also_after_a_slot_has_moved(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wakes(work: Work, other: ShardedStore, message_id: str) -> None:
        work.clear()
        assert await claim(work) == []
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(work.wait(until_ms=None))
            await asyncio.sleep(0)
            await put(other, [message_id])
            await waiting
        assert await claim(work) == [message_id]

    async def play() -> None:
        async with opened(cluster, namespace) as (_, work), ShardedStore(cluster.url, namespace=namespace) as other:
            ids = {shard: ids_of([shard], 2) for shard in range(SHARDS)}
            for shard in range(SHARDS):
                await wakes(work, other, ids[shard][0])
            owner = cluster.owner(meta(namespace, 0))
            target = next(each for each in cluster.primaries if each is not owner)
            before = listeners_on(target)
            await asyncio.to_thread(cluster.move, meta(namespace, 0), target)
            await until(lambda: listeners_on(target) == before + 1, "the listener of the shard follows its slot")
            for shard in range(SHARDS):
                await wakes(work, other, ids[shard][1])

    monkeypatch.setattr(RedisStore, "traits", replace(RedisStore.traits, safety_poll_ms=3_600_000))
    asyncio.run(play())


def listeners_on(node: RedisServer) -> int:
    return node.command("CLIENT", "LIST").count(b"cmd=xread")


# --- clocks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead_s", [0.3, -0.3])
def test_s1_the_clock_of_a_shards_node_decides_and_no_claim_is_repeated_in_vain(
    cluster: Cluster, namespace: str, ahead_s: float
) -> None:
    """Without a translation of due times, the loop would claim again and again until the slower clock is there."""

    async def play() -> None:
        async with opened(cluster, namespace) as (store, work):
            clocks = [SteppedClock(ahead_s if shard else 0) for shard in range(SHARDS)]
            for each, clock in zip(store.shards, clocks, strict=True):
                each._clock = clock  # the nodes of this cluster share the clock of the machine
            assert await claim(work) == []
            (message_id,) = ids_of([2], 1)
            due_ms = clocks[2].now_ms() + 500
            await put(store, [message_id], due_ms)
            claims = 0
            while True:
                work.clear()
                claimed = await work.claim({LANE: Demand(100)}, request=new_id(), lease_ms=LEASE_MS)
                claims += 1
                if claimed.claims:
                    break
                await work.wait(until_ms=claimed.next_due_ms)
            assert clocks[2].now_ms() >= due_ms
            assert claims < 10

    asyncio.run(play())


# --- a node that is away ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parted() -> Iterator[Cluster]:
    """A cluster without replicas, whose nodes serve their slots while others are away, and keep their data."""
    settings = ("--cluster-require-full-coverage", "no", "--appendonly", "yes", "--appendfsync", "always")
    with clustered(redis_products()[0].program, *STABLE, *settings, replicas=False) as found:
        yield found


def test_l4_a_node_that_is_away_stops_only_its_shards(parted: Cluster, namespace: str) -> None:
    """Commands, claims, settlements, renewals and reads."""

    async def play() -> None:
        async with opened(parted, namespace) as (store, work):
            node = parted.owner(meta(namespace, 1))
            lost = {shard for shard, each in enumerate(nodes_of(parted, namespace)) if each is node}
            others = set(range(SHARDS)) - lost
            assert others
            held = [*ids_of(lost, 3), *ids_of(others, 3)]
            await put(store, held)
            claims = (await work.claim({LANE: Demand(100)}, request=new_id(), lease_ms=LEASE_MS)).claims
            ends = {each.record.id: Done(each.record.id, each.record.revision, each.token) for each in claims}
            node.kill()

            with pytest.raises(PartialAnswerError) as settled:
                await work.settle([ends[each] for each in held])
            assert settled.value.outcomes == [None] * 3 + [SettleOutcome.SETTLED] * 3
            renewals = [Renewal(each, ends[each].revision, ends[each].token, ends[each].token + 1) for each in held]
            with pytest.raises(PartialAnswerError) as renewed:
                await work.renew(renewals)
            assert renewed.value.outcomes == [None] * 3 + [RenewOutcome.LOST] * 3
            fresh = [f"n{i}" for i in range(40)]
            commands: list[Command] = [Put(new_op(), Envelope(each, LANE), At(1)) for each in fresh]
            for each, outcome in zip(fresh, await store.apply(commands), strict=True):
                assert isinstance(outcome, Refused if shard_of(each, SHARDS) in lost else Stored), (each, outcome)
            assert set(await claim(work)) == {each for each in fresh if shard_of(each, SHARDS) in others}
            assert await store.get(next(each for each in fresh if shard_of(each, SHARDS) in others)) is not None
            for read in (lambda: store.get(held[0]), store.counts, lambda: store.search(Query())):
                with pytest.raises(StoreUnavailableError):
                    await read()

            await asyncio.to_thread(node.start)
            await until(lambda: not any(each.is_away for each in store.shards), "the node serves its shards again")
            assert set(await work.settle([ends[each] for each in held[:3]])) == {SettleOutcome.SETTLED}
            assert all(isinstance(each, Stored) for each in await store.apply(commands))
            late = {each for each in fresh if shard_of(each, SHARDS) in lost}
            await until(lambda: claims_all(work, late), "the messages of the lost shards are claimed")

    asyncio.run(play())


def test_the_error_of_a_shard_that_is_away_has_the_present_reason(parted: Cluster, namespace: str) -> None:
    async def reason(store: ShardedStore, message_id: str) -> str:
        with pytest.raises(StoreUnavailableError) as raised:
            await store.get(message_id)
        return str(raised.value)

    async def play() -> None:
        node = parted.owner(meta(namespace, 1))
        async with opened(parted, namespace) as (store, _):
            (message_id,) = ids_of([1], 1)
            os.kill(node.pid, signal.SIGSTOP)
            assert "no answer within 5000 ms" in await reason(store, message_id)
            node.kill()

            async def is_present() -> bool:
                return f"connecting to 127.0.0.1:{node.port}" in await reason(store, message_id)

            await until(is_present, "the error says that nothing listens at the address")
            await asyncio.to_thread(node.start)

    asyncio.run(play())
    until_sync(
        lambda: all(b"cluster_state:ok" in each.command("CLUSTER", "INFO") for each in parted.nodes), "it serves"
    )


async def claims_all(work: Work, left: set[str]) -> bool:
    left -= set(await claim(work))
    return not left


@pytest.mark.nightly
def test_l4_a_message_whose_settlement_waits_for_its_node_takes_no_place(parted: Cluster, namespace: str) -> None:
    """A handler that runs one message at a time runs the messages of other shards meanwhile."""

    async def play() -> None:
        handled, may_end = list[int](), asyncio.Event()
        scheduler = Scheduler(f"{parted.url}?shards={SHARDS}", namespace=namespace)
        node = parted.owner(meta(namespace, 1))

        @scheduler.handler(concurrency=1)
        async def handle(order: Order) -> None:
            handled.append(order.number)
            await may_end.wait()

        async with scheduler:
            lost = {shard for shard, each in enumerate(nodes_of(parted, namespace)) if each is node}
            await scheduler.schedule(Order(1), id=ids_of(lost, 1)[0], delay="1ms")
            await until(lambda: handled == [1], "the message of the lost shard runs")
            node.kill()
            await scheduler.schedule(Order(2), id=ids_of(set(range(SHARDS)) - lost, 1)[0], delay="1ms")
            may_end.set()
            await until(lambda: handled == [1, 2], "the message of another shard runs")
            await asyncio.to_thread(node.start)
            await scheduler.run_until_idle()
            assert handled == [1, 2]

    until_sync(
        lambda: all(b"cluster_state:ok" in each.command("CLUSTER", "INFO") for each in parted.nodes), "it serves"
    )
    asyncio.run(play())

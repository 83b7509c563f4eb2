"""A Redis store on a cluster and behind Sentinels: URLs, errors, redirections, lists."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping

import pytest

from aiodelay import Every, Limit, Scheduler
from aiodelay.backends.redis.connection import locator
from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.key_types import KEY_TYPES
from aiodelay.backends.redis.connection.locator import slot_of
from aiodelay.backends.redis.connection.options import read_url
from aiodelay.backends.redis.records.keys import FIXED, guard_of
from aiodelay.core.ids import new_op
from aiodelay.core.table_scan import Scan
from aiodelay.core.values import (
    After,
    Claimed,
    Demand,
    Done,
    Envelope,
    Promise,
    Put,
    Query,
    Refused,
    SettleOutcome,
    Stored,
    lane_limits,
)
from aiodelay.errors import (
    ConfigurationError,
    StoreMismatchError,
    StoreUnavailableError,
    TargetError,
    UnsupportedByStoreError,
)
from aiodelay.redis import RedisFanoutSink, RedisListSink, RedisStore
from aiodelay.testing.clock import VirtualClock
from tests.support.proxy import proxied
from tests.support.servers import Found, RedisServer, redis_products, stopped
from tests.support.topologies import PRIMARY, Cluster, SentinelTrio, clustered, node_of_a_cluster, watched
from tests.support.waiting import until, until_sync

STABLE = "60000"
"""The ms after which a silent server is replaced: no test here needs that, and servers may stand still."""
GIVES_UP_S = 6.0
"""A replica gives up a failover by hand after 5 s, for example because a node stands still."""
NAMESPACE, META = "faults", "{faults:00}:meta"
LISTS, AGAIN_MS = "redis-list", 100
WRITES: dict[str, Callable[[str], tuple[str, ...]]] = {
    "hash": lambda key: ("HSET", key, "x", "0"),
    "set": lambda key: ("SADD", key, "9"),
    "zset": lambda key: ("ZADD", key, "99999999999999", "x"),
    "stream": lambda key: ("XADD", key, "1-0", "x", "y"),
}


@pytest.fixture(scope="session", params=redis_products(), ids=lambda found: found.name)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with clustered(request.param.program, "--cluster-node-timeout", STABLE) as found:
        yield found


@pytest.fixture(scope="session", params=redis_products(), ids=lambda found: found.name)
def trio(request: pytest.FixtureRequest) -> Iterator[SentinelTrio]:
    with watched(request.param.program, settings=f"sentinel down-after-milliseconds {PRIMARY} {STABLE}\n") as found:
        yield found


@pytest.fixture(params=redis_products(), ids=lambda found: found.name)
def program(request: pytest.FixtureRequest) -> str:
    found = request.param
    assert isinstance(found, Found)
    return found.program


def put(message_id: str, lane: str = "work", address: str = "", rule: Mapping[str, int] | None = None) -> Put:
    return Put(new_op(), Envelope(message_id, lane, payload=b"p", address=address, rule=rule), After(0))


async def opens(url: str) -> None:
    async with RedisStore(url, namespace=NAMESPACE):
        pass


def refuses(url: str, text: str) -> None:
    """Open the store again and again until the error has a text. A server that stands still gives another error."""

    def says_so() -> bool:
        with pytest.raises(StoreUnavailableError) as raised:
            asyncio.run(opens(url))
        return re.search(text, str(raised.value)) is not None

    until_sync(says_so, f"the error is: {text}")


def complete(node: RedisServer) -> list[str]:
    """Make every fixed key of the namespace exist. Return the keys that were missing."""
    keys = {name: META.removesuffix("meta") + name for name in FIXED}
    missing = [name for name, key in keys.items() if node.command("EXISTS", key) == b":0\r\n"]
    for name in missing:
        node.command(*WRITES[KEY_TYPES[name]](keys[name]))
    return [keys[name] for name in missing]


def scanned(store: RedisStore) -> set[str]:
    """Read the table of messages as Spark does, from a thread without an event loop."""
    scan = Scan(table="messages", columns=("id",))
    batches = [columns for part in store.scan_parts(scan) for columns in store.scan_part(scan, part)]
    return {each for columns in batches for each in columns["id"]}


# --- URLs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis+sentinel://s1,s2", "allowed: the name of the primary after the hosts"),
        ("redis+ring://h", "url is redis"),
        ("redis+cluster://h1,,h2", "url is redis"),
        ("redis+cluster://h1:0", "url is redis"),
        ("redis+cluster://h1/x", "url is redis"),
        ("redis+cluster://h1?announce=a:1", "announce in redis"),
        ("redis+cluster://h1?announce=a:1=b:x", "announce in redis"),
        ("redis+cluster://h1?sentinel_password=x", "'sentinel_password'"),
        ("redis+sentinel://s1/p?sentinel_username=u", "sentinel_password in redis"),
    ],
)
def test_a_url_that_is_not_allowed_says_what_is(url: str, text: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        read_url(url)
    assert text in str(raised.value)


def test_the_parts_of_a_url_are_read() -> None:
    given = "rediss+sentinel://u:p%40@s1,[::1]:7,s3/my%20primary/2?sentinel_username=v&sentinel_password=w"
    options = read_url(given + "&announce=10.0.0.1:6379=edge:7001,10.0.0.2:6379=edge:7002")
    topology = options.topology
    assert topology is not None
    assert topology.seeds == (("s1", 26379), ("::1", 7), ("s3", 26379))
    assert (topology.primary, dict(topology.login)) == ("my primary", {"username": "v", "password": "w"})
    assert dict(topology.announce) == {("10.0.0.1", 6379): ("edge", 7001), ("10.0.0.2", 6379): ("edge", 7002)}
    assert (options.connection["db"], options.connection["password"], options.secure) == (2, "p@", True)
    assert not {"w", "p@"} & set(repr(options).replace("'", " ").split())


def test_a_guard_key_shares_the_slot_of_its_key() -> None:
    assert guard_of("{shop:00}:meta") == "{shop:00}:aiodelay:never"
    assert guard_of("orders") == "{orders}:aiodelay:never"
    for key in ("a{b", "{}a", "a}b"):
        with pytest.raises(TargetError):
            guard_of(key)


# --- clusters ---------------------------------------------------------------------------------------------


@pytest.mark.valkey_too
def test_each_namespace_of_a_cluster_is_found_on_its_node(cluster: Cluster) -> None:
    async def play() -> None:
        for namespace in ("a", "b", "c", "d"):
            async with RedisStore(cluster.url, namespace=namespace) as store, store.work("w", ["work"]) as work:
                assert isinstance((await store.apply([put("m")]))[0], Stored)
                (claim,) = (await work.claim({"work": Demand(9)}, request="r", lease_ms=15_000)).claims
                settled = await work.settle([Done("m", claim.record.revision, claim.token)])
                assert list(settled) == [SettleOutcome.SETTLED]

    asyncio.run(play())
    assert len({cluster.owner(f"{{{namespace}:00}}:meta").port for namespace in "abcd"}) > 1


@pytest.mark.valkey_too
def test_lists_of_a_cluster_hash_where_they_hash(cluster: Cluster) -> None:
    async def play() -> None:
        handled: list[bytes] = []
        scheduler = Scheduler(RedisStore(cluster.url, namespace="lists"), namespace="lists")
        topics = scheduler.store.reaches(RedisFanoutSink(cluster.url, namespace="lists"))  # type: ignore[attr-defined]
        assert topics.promise is Promise.EXACTLY_ONCE

        @scheduler.handler(name="work", source="redis-list:list-b")
        async def handle(payload: bytes) -> None:
            handled.append(payload)

        async with scheduler:
            for name in "abc":
                await scheduler.schedule(name.encode(), to=f"redis-list:list-{name}", delay="1ms")
            lists = [f"redis-list:list-{name}" for name in "ac"]
            await until(lambda: handled == [b"b"], "the handler of list-b has run")
            await scheduler.run_until_idle()
            assert await scheduler.store.lengths(lists) == dict.fromkeys(lists, 1)  # type: ignore[attr-defined]

    asyncio.run(play())
    assert len({cluster.owner(f"list-{name}").port for name in "abc"}) > 1


# --- lists in the slot of the namespace -------------------------------------------------------------------


class Lists:
    """A store with a clock of its own, and two lists: `near` is in the slot of the namespace, `far` is not."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.clock = VirtualClock()
        self.store = RedisStore(f"{cluster.url}?journal=9", namespace=namespace, clock=self.clock)
        self.near, self.far = f"near{{{namespace}:00}}", f"far-{namespace}"
        self.sink = RedisListSink(self.store._options, max_length=0)

    async def put(self, key: str, *names: str) -> None:
        for outcome in await self.store.apply([put(name, LISTS, key) for name in names]):
            assert isinstance(outcome, Stored)

    async def claim(self) -> Claimed:
        """Claim messages for lists, in a worker of its own."""
        async with self.store.work(new_op().hex(), [LISTS]) as work:
            return await work.claim({LISTS: Demand(500)}, request=new_op().hex(), lease_ms=15_000)

    async def claimed(self) -> list[str]:
        return [each.record.id for each in (await self.claim()).claims]

    async def length(self, key: str) -> int:
        return (await self.store.lengths([f"{LISTS}:{key}"])).get(f"{LISTS}:{key}", 0)


def on_lists(test: Callable[[Lists], Awaitable[None]]) -> Callable[[Cluster], None]:
    """Run a test inside a loop, with an open store whose namespace has the name of the test."""

    def run(cluster: Cluster) -> None:
        async def play() -> None:
            lists = Lists(cluster, test.__name__)
            async with lists.store:
                await test(lists)

        asyncio.run(play())

    run.__name__ = test.__name__
    return run


def test_reaches_tells_which_lists_are_in_the_slot_of_the_namespace(cluster: Cluster) -> None:
    scheduler = Scheduler(cluster.url, namespace="shop")
    promises = {
        "": Promise.BY_ADDRESS,
        ":orders{shop:00}": Promise.EXACTLY_ONCE,
        ":{shop:00}orders?format=raw": Promise.EXACTLY_ONCE,
        ":orders": Promise.AT_LEAST_ONCE,
        ":orders{shop:01}": Promise.AT_LEAST_ONCE,
        ":a{}{shop:00}": Promise.AT_LEAST_ONCE,
        ":a{b}{shop:00}": Promise.AT_LEAST_ONCE,
    }
    found = {address: scheduler.reaches(f"{LISTS}{address}") for address in promises}
    assert {address: reach.promise for address, reach in found.items()} == promises
    assert "the hash tag {shop:00}; messages for other lists" in found[":orders"].reason
    with pytest.raises(TargetError):
        scheduler.reaches(f"{LISTS}:{{shop:00}}:msg")
    several = Scheduler(f"{cluster.url}?shards=4", namespace="shop")
    assert several.reaches(f"{LISTS}:orders{{shop:00}}").promise is Promise.AT_LEAST_ONCE


@pytest.mark.valkey_too
def test_messages_for_both_kinds_of_lists_arrive_and_only_those_elsewhere_are_claimed(cluster: Cluster) -> None:
    async def play() -> None:
        lists = Lists(cluster, "both")
        store, sink = RedisStore(lists.store._options, namespace="both"), RedisListSink(cluster.url, max_length=3)
        async with Scheduler(store, sinks=[sink]) as scheduler:
            for i in range(3):
                for name, key in (("near", lists.near), ("far", lists.far)):
                    await scheduler.schedule(b"", to=f"{LISTS}:{key}", delay="1ms", id=f"{name}{i}")
            await until(lambda: lists_are(store, lists, near=3, far=3), "all messages are in their lists")
            await scheduler.schedule(b"", to=f"{LISTS}:{lists.near}", every=Every("100ms"), id="near-every")
            (blocked,) = await until(scheduler.blocked, "the list is full")
            assert (blocked.address, blocked.messages) == (lists.near, 1)
            await store.command("DEL", lists.near)
            await until(lambda: lists_are(store, lists, near=3, far=3), "the list is full again")
            entries = await store.journal(limit=500)
            assert {each.event for each in entries if each.id.startswith("near")} == {"stored", "delivered"}
            assert {each.event for each in entries if each.id.startswith("far")} == {"stored", "claimed", "delivered"}
            assert sorted(scheduler.served()) == ["redis-fanout", LISTS, "redis-log"]
            with pytest.raises(UnsupportedByStoreError, match="moves messages by itself"):
                await scheduler.set_limits(LISTS, Limit(concurrency=1))

    asyncio.run(play())


async def lists_are(store: RedisStore, lists: Lists, *, near: int, far: int) -> bool:
    wanted = {f"{LISTS}:{lists.near}": near, f"{LISTS}:{lists.far}": far}
    return await store.lengths(wanted) == wanted


@on_lists
async def test_a_claim_leaves_to_the_transfer_what_the_transfer_moves(lists: Lists) -> None:
    await lists.put(lists.near, *(f"near{i}" for i in range(150)))
    await lists.put(lists.far, "far0", "far1")
    await lists.put(f"{lists.near}?format=raw", "raw")
    await lists.put(f"another-{lists.near}", "another")
    with lists.store.transferring(lists.sink) as moves:
        assert (lists.store.moved_lanes(), lists.store.shared_lanes()) == ([], [LISTS])
        claimed = await lists.claim()
        assert (claimed.claims, claimed.next_due_ms) == ([], lists.clock.now_ms() + AGAIN_MS)  # few of 150 are passed
        await moves.transfer(Demand(120))
        assert await lists.claimed() == ["far0", "far1"]
        moved = await moves.transfer(Demand(500))
        assert (moved.moved, moved.next_due_ms) == (32, lists.clock.now_ms() + 15_000)
        assert (await lists.claim()).next_due_ms == moved.next_due_ms
    assert await lists.length(lists.near) == 151


@on_lists
async def test_a_transfer_leaves_messages_for_lists_elsewhere_to_claims(lists: Lists) -> None:
    await lists.put(lists.far, *(f"far{i:03}" for i in range(40)))
    await lists.put(lists.near, "near")
    with lists.store.transferring(lists.sink) as moves:
        moved = await moves.transfer(Demand(500))
        assert (moved.moved, moved.next_due_ms) == (1, lists.clock.now_ms())
        moved = await moves.transfer(Demand(500))
        assert (moved.moved, moved.next_due_ms) == (0, lists.clock.now_ms() + AGAIN_MS)
        await lists.put(lists.near, "another")
        assert (await moves.transfer(Demand(500))).moved == 1
        await lists.store.apply([put("series", LISTS, lists.near, rule={"e": 60_000})])
        moved = await moves.transfer(Demand(500))
        (series,) = moved.series
        assert moved.next_due_ms == lists.clock.now_ms()
        await moves.transfer(Demand(500), [Done("series", series.revision, series.due_ms)])
        assert await lists.claimed() == [f"far{i:03}" for i in range(40)]
    assert await lists.length(lists.near) == 3
    assert await lists.length(lists.far) == 0


@on_lists
async def test_messages_that_were_blocked_on_a_single_server_return_to_their_lane(lists: Lists) -> None:
    await lists.put(lists.far, "far")
    command, key = lists.store.command, lists.store.keys.key
    number = (await command("HGET", key("lanes"), LISTS)).decode()
    (member,) = await command("ZRANGE", key(f"due:{number}"), 0, -1)
    await command("ZREM", key(f"due:{number}"), member)
    await command("ZADD", key(f"parked:{number}:{lists.far}"), lists.clock.now_ms(), member)
    await command("SADD", key("parked"), f"{number}:{lists.far}")
    await command("ZADD", key(f"blocked:{number}"), 0, lists.far)
    await command("HSET", key(f"why:{number}"), lists.far, "50 full")
    with lists.store.transferring(lists.sink) as moves:
        assert (await moves.transfer(Demand(500))).changed == {lists.far: ""}
        assert await lists.claimed() == ["far"]
    assert await lists.store.blocked() == []
    assert await command("EXISTS", key("parked")) == 0


@on_lists
async def test_limits_from_an_earlier_version_hold_for_all_lists(lists: Lists) -> None:
    await lists.store.set_limits(LISTS, lane_limits([Limit(concurrency=1)]), is_declared=False)
    await lists.put(lists.near, "near0", "near1")
    with lists.store.transferring(lists.sink) as moves:
        assert (await moves.transfer(Demand(500))).moved == 0
        assert await lists.claimed() == ["near0"]
        assert await lists.claimed() == []


# --- moves of a slot --------------------------------------------------------------------------------------


@pytest.mark.valkey_too
def test_calls_wait_while_their_slot_moves_and_no_script_ends_half_way(cluster: Cluster) -> None:
    """Every fixed key of the namespace exists: without the guard key, the node would begin the script."""

    async def play() -> None:
        async with RedisStore(f"{cluster.url}?timeout_ms=60000", namespace=NAMESPACE) as store:
            client = store._checked().client
            assert isinstance((await store.apply([put("before")]))[0], Stored)
            owner = cluster.owner(META)
            made = complete(owner)
            target = next(each for each in cluster.primaries if each is not owner)
            cluster.begin_move(META, target)
            client._patience_s = 1.0
            refused = (await store.apply([put("during")]))[0]
            client._patience_s = 60.0
            assert isinstance(refused, Refused), refused
            assert "TRYAGAIN" in refused.detail or "ASK" in refused.detail
            await asyncio.to_thread(refuses, f"{cluster.url}?timeout_ms=300", "TRYAGAIN|ASK")
            for key in made:
                assert owner.command("DEL", key) == b":1\r\n"
            cluster.move_keys(META, owner, target)
            waiting = asyncio.create_task(store.apply([put("after")]))
            await asyncio.to_thread(cluster.end_move, META, owner, target)
            assert isinstance((await waiting)[0], Stored)
            assert {each.record.id for each in await store.search(Query())} == {"before", "after"}
            assert await asyncio.to_thread(scanned, store) == {"before", "after"}

    asyncio.run(play())


@pytest.mark.valkey_too
def test_a_url_for_a_single_server_is_refused_on_a_cluster_and_the_reverse(
    cluster: Cluster, trio: SentinelTrio
) -> None:
    node, single = cluster.nodes[0], trio.servers[0]
    with pytest.raises(StoreMismatchError, match=rf"redis\+cluster://127\.0\.0\.1:{node.port}"):
        asyncio.run(opens(node.url))
    with pytest.raises(StoreMismatchError, match=rf"single server; .*redis://127\.0\.0\.1:{single.port}"):
        asyncio.run(opens(f"redis+cluster://127.0.0.1:{single.port}"))


@pytest.mark.valkey_too
def test_addresses_that_are_unreachable_from_here_are_replaced(program: str) -> None:
    node = node_of_a_cluster(program, "--cluster-announce-ip", "127.0.0.1", "--cluster-announce-port", "1")
    try:
        node.command("CLUSTER", "ADDSLOTS", *map(str, range(16_384)))
        until_sync(lambda: b"cluster_state:ok" in node.command("CLUSTER", "INFO"), "the node serves all slots")
        seed = f"redis+cluster://127.0.0.1:{node.port}"
        refuses(f"{seed}?timeout_ms=1000", r"127\.0\.0\.1:1, which the cluster names .* put announce=")
        asyncio.run(opens(f"{seed}?announce=127.0.0.1:1=127.0.0.1:{node.port}"))
    finally:
        node.stop()


@pytest.mark.valkey_too
def test_a_cluster_without_all_slots_says_so(program: str) -> None:
    node = node_of_a_cluster(program)
    try:
        refuses(f"redis+cluster://127.0.0.1:{node.port}?timeout_ms=300", "no node serves slot .* CLUSTER NODES")
    finally:
        node.stop()


def test_nodes_that_have_left_the_cluster_are_forgotten(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call asks such a node, which is silent, and no connection to it stays open."""
    monkeypatch.setattr(locator, "ASK_S", 600.0)

    async def play(cluster: Cluster) -> None:
        left, seed = cluster.primaries
        replica = cluster.replica_of(left)
        first, second = (
            next(key for key in map(str, range(99)) if cluster.owner(key) is each) for each in (left, seed)
        )
        client = Client(read_url(f"redis+cluster://127.0.0.1:{seed.port}?timeout_ms=30000"))
        await client.command("GET", first)
        assert b"name=aiodelay" in left.command("CLIENT", "LIST")

        asked_s = -math.inf

        def has_taken_over() -> bool:
            nonlocal asked_s
            if time.monotonic() - asked_s > GIVES_UP_S:  # a replica that is asked earlier begins anew
                replica.command("CLUSTER", "FAILOVER")
                asked_s = time.monotonic()
            return cluster.works_without(left, first, replicas=1)

        await until(has_taken_over, "the replica is the primary")
        await client.command("GET", first)
        for each in cluster.nodes:
            if each is not left:
                assert each.command("CLUSTER", "FORGET", cluster.ids[left.port]) == b"+OK\r\n"
        await client.command("GET", second)
        assert b"name=aiodelay" not in left.command("CLIENT", "LIST")
        with stopped(left):
            for _ in cluster.nodes:
                assert client.locator is not None
                slot = slot_of(first)
                client.locator.lost(slot, await client.locator.locate(slot))
                await client.command("GET", first)
        await client.aclose()

    with clustered(program, "--cluster-node-timeout", STABLE, primaries=2) as cluster:
        asyncio.run(play(cluster))


# --- Sentinels --------------------------------------------------------------------------------------------


@pytest.mark.valkey_too
def test_a_wrong_name_of_the_primary_names_the_known_ones(trio: SentinelTrio) -> None:
    with pytest.raises(StoreMismatchError, match=f"'nobody', which .* does not know; allowed: {PRIMARY}"):
        asyncio.run(opens(trio.url.replace(f"/{PRIMARY}", "/nobody")))


@pytest.mark.valkey_too
def test_servers_that_are_no_sentinels_are_refused_and_the_reverse(trio: SentinelTrio) -> None:
    with pytest.raises(StoreMismatchError, match="is no Sentinel"):
        asyncio.run(opens(f"redis+sentinel://127.0.0.1:{trio.servers[0].port}/{PRIMARY}"))
    with pytest.raises(StoreMismatchError, match=r"redis\+sentinel:// with the name of the primary"):
        asyncio.run(opens(trio.sentinels[0].url))


@pytest.mark.valkey_too
def test_a_missing_majority_is_a_warning(trio: SentinelTrio, caplog: pytest.LogCaptureFixture) -> None:
    alive = trio.sentinels[0].port
    with caplog.at_level(logging.WARNING, "aiodelay.redis"):
        asyncio.run(opens(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{alive},127.0.0.1:2/{PRIMARY}?timeout_ms=60000"))
    assert "2 of 3 Sentinels do not answer" in caplog.text
    url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:2/{PRIMARY}?timeout_ms=300"
    refuses(url, r"no Sentinel answers: 127\.0\.0\.1:1")


def test_a_call_that_outlives_its_client_leaves_no_connection(trio: SentinelTrio) -> None:
    async def play() -> None:
        asked, is_closed = asyncio.Event(), asyncio.Event()

        async def look(number: int, data: bytes, is_answer: bool) -> None:
            if b"subscribe" in data.lower():
                asked.set()
                await is_closed.wait()

        async with proxied(trio.sentinels[0].port) as front:
            front.look = look
            client = Client(read_url(f"redis+sentinel://127.0.0.1:{front.port}/{PRIMARY}?{trio.announce}"))
            call = asyncio.create_task(client.command("TIME"))
            await asked.wait()
            await client.aclose()
            is_closed.set()
            await asyncio.wait([call])
            call.exception()
            servers = (trio.sentinels[0], trio.servers[0])
            await until(
                lambda: all(b"name=aiodelay" not in each.command("CLIENT", "LIST") for each in servers),
                "no connection is left",
            )

    asyncio.run(play())


@pytest.mark.valkey_too
def test_a_primary_that_takes_writes_while_it_is_cut_off_is_a_warning(
    trio: SentinelTrio, caplog: pytest.LogCaptureFixture
) -> None:
    asyncio.run(opens(trio.url))
    assert "min-replicas-to-write is 0" in caplog.text
    caplog.clear()
    setting = ("CONFIG", "SET", "min-replicas-to-write")
    trio.servers[0].command(*setting, "1")
    try:
        asyncio.run(opens(trio.url))
    finally:
        trio.servers[0].command(*setting, "0")
    assert not caplog.text

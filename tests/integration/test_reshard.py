"""`aiodelay reshard`: nothing is lost, nothing is doubled, and a move that was killed goes on."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from redis import Redis

from aiodelay.backends.redis.connection.options import read_url
from aiodelay.backends.redis.records.keys import keys_of
from aiodelay.backends.redis.records.shards import shard_of
from aiodelay.backends.redis.sharded import moving
from aiodelay.backends.redis.sharded import reshard as resharding
from aiodelay.backends.redis.sharded.move_client import MoveClient
from aiodelay.backends.redis.sharded.reshard import reshard
from aiodelay.core import features
from aiodelay.core.ids import new_id, new_op
from aiodelay.core.values import (
    LEASE_MS,
    After,
    Again,
    Claim,
    Conflict,
    Dead,
    Demand,
    Done,
    Envelope,
    LaneLimits,
    Late,
    Limit,
    Put,
    Query,
    SettleOutcome,
    SourcePosition,
    Stored,
)
from aiodelay.errors import (
    ConfigurationError,
    StoreMismatchError,
    StoreTooNewError,
    StoreUnavailableError,
    UnsupportedByStoreError,
)
from aiodelay.redis import ShardedStore
from aiodelay.testing.clock import VirtualClock
from tests.support.cli import Cli
from tests.support.servers import Found, redis_programs, redis_servers, start

LANES = ("orders", "mails", "bills")
HOUR = After(3_600_000)


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def url(request: pytest.FixtureRequest, shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(request.param)


@pytest.fixture
def namespace() -> str:
    return uuid4().hex


def _put(message_id: str, lane: str, due: After = HOUR, **fields: Any) -> Put:  # noqa: ANN401 - fields of a put
    own = {"conflict", "late"} & fields.keys()
    envelope = Envelope(message_id, lane, **{name: each for name, each in fields.items() if name not in own})
    return Put(new_op(), envelope, due, **{name: fields[name] for name in own})


async def _fill(store: ShardedStore) -> list[Claim]:
    """Store messages in all states. Return the claims of those in flight."""
    async with store.work("w", LANES) as work:
        due = [_put(f"due {i}", LANES[i % 3], After(0)) for i in range(30)]
        assert all(isinstance(each, Stored) for each in await store.apply(due))
        claimed = await work.claim({lane: Demand(100) for lane in LANES}, request=new_id(), lease_ms=LEASE_MS)
        claims = {each.record.id: each for each in claimed.claims}
        assert len(claims) == 30
        ends: list[Any] = []
        for i in range(24):
            claim = claims.pop(f"due {i}")
            head = (claim.record.id, claim.record.revision, claim.token)
            kinds = [Done(*head), Dead(*head, "rejected", 1, "why"), Again(*head, claimed.now_ms + 9_999, 1, "once")]
            ends.append(kinds[i % 3])
        assert set(await work.settle(ends)) == {SettleOutcome.SETTLED}
    await store.pause("bills")
    await store.pause("mails", "there")
    await store.apply([], source=SourcePosition("a file", 0, 7))
    puts = [_put(f"m{i}", LANES[i % 3], address="there" if i % 2 else "", late=Late.drop("2h")) for i in range(60)]
    puts += [_put(f"s{i}", "orders", rule={"e": 3_600_000}) for i in range(10)]
    puts += [_put(f"v{i}", "orders", conflict=Conflict.newer(i), version=i) for i in range(1, 10)]
    assert all(isinstance(each, Stored) for each in await store.apply(puts))
    return list(claims.values())


async def _picture(store: ShardedStore) -> object:
    counts = await store.counts()
    return (
        sorted(await store.search(Query(limit=1000)), key=lambda each: each.record.id),
        sorted(await store.dead_letters(limit=1000), key=lambda each: each.key),
        [each.record.id for each in await store.series()],
        list(await store.paused()),
        [await store.position(each) for each in ("a file", "no file")],
        {lane: (each.scheduled, each.overdue, each.in_flight, each.held, each.dead) for lane, each in counts.items()},
    )


async def _reshard(url: str, namespace: str, shards: int) -> None:
    await reshard(url, namespace, shards, lambda _examined, _of: None)


def _data(url: str, namespace: str) -> dict[bytes, object]:
    """Return the values of all keys of a namespace."""
    with Redis.from_url(url) as client:
        read: dict[bytes, Callable[[bytes], object]] = {
            b"hash": client.hgetall,
            b"set": client.smembers,
            b"stream": client.xrange,
            b"string": client.get,
            b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
        }
        return {each: read[client.type(each)](each) for each in client.keys(f"{{{namespace}:*")}


@pytest.mark.parametrize(("former", "later"), [(1, 4), (4, 1), (4, 3), (2, 5)])
def test_s2_s6_a_move_keeps_everything(url: str, namespace: str, former: int, later: int) -> None:
    async def play() -> None:
        clock = VirtualClock()
        async with ShardedStore(f"{url}?shards={former}", namespace=namespace, clock=clock) as store:
            claims = await _fill(store)
            before = await _picture(store)
        await _reshard(url, namespace, later)
        async with ShardedStore(url, namespace=namespace, clock=clock) as store:
            assert len(store.shards) == later
            assert await store.vanished() == ""
            assert await _picture(store) == before
            for message_id in ("m1", "s2", "v3", "due 25"):
                assert await store.shards[shard_of(message_id, later)].get(message_id) is not None
            async with store.work("w", LANES) as work:
                ends = [Done(each.record.id, each.record.revision, each.token) for each in claims]
                assert set(await work.settle(ends)) == {SettleOutcome.SETTLED}
            await _deliver_the_rest(store, clock)
        with Redis.from_url(url) as client:
            keys = [each for each in client.keys(f"{{{namespace}:*") if b":req:" not in each]  # these expire
            unused = [each for each in keys if int(each[len(namespace) + 2 : len(namespace) + 4]) >= later]
            assert len(keys) > len(unused) == max(former - later, 0)
            schema, mover = client.hmget(keys_of(namespace).key("meta"), "schema", "mover")
            assert all(client.hgetall(each) == {b"schema": schema, b"mover": mover} for each in unused)

    asyncio.run(play())


async def _deliver_the_rest(store: ShardedStore, clock: VirtualClock) -> None:
    await store.resume("bills")
    await store.resume("mails", "there")
    clock.move(3_600_000)
    delivered: list[str] = []
    async with store.work("w", LANES) as work:
        while claims := (
            await work.claim({lane: Demand(500) for lane in LANES}, request=new_id(), lease_ms=LEASE_MS)
        ).claims:
            delivered += [each.record.id for each in claims]
            await work.settle([Done(each.record.id, each.record.revision, each.token) for each in claims])
    retried = [f"due {i}" for i in range(24) if i % 3 == 2]
    assert sorted(delivered) == sorted(
        [*retried, *(f"m{i}" for i in range(60)), *(f"s{i}" for i in range(10)), *(f"v{i}" for i in range(1, 10))]
    )
    assert list(await store.search(Query(limit=10))) == []


def test_s6_repeated_commands_and_old_versions_are_known_after_a_move(url: str, namespace: str) -> None:
    async def play() -> None:
        clock = VirtualClock()
        puts = [_put(f"p{i}", "orders", After(0), conflict=Conflict.newer(5), version=5) for i in range(20)]
        async with ShardedStore(url, namespace=namespace, clock=clock) as store, store.work("w", LANES) as work:
            first = await store.apply(puts)
            claims = (await work.claim({"orders": Demand(100)}, request=new_id(), lease_ms=LEASE_MS)).claims
            await work.settle([Done(each.record.id, each.record.revision, each.token) for each in claims])
        await _reshard(url, namespace, 4)
        async with ShardedStore(url, namespace=namespace, clock=clock) as store:
            assert await store.apply(puts) == first
            again = [_put(f"p{i}", "orders", conflict=Conflict.newer(5), version=5) for i in range(20)]
            assert {getattr(each, "reason", "") for each in await store.apply(again)} == {"outdated"}

    asyncio.run(play())


def test_s2_a_move_that_is_killed_anywhere_goes_on(url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The move fails after each number of commands in turn, and is run again."""
    monkeypatch.setattr(moving, "AT_ONCE", 7)

    async def play() -> None:
        clock = VirtualClock()
        async with ShardedStore(f"{url}?shards=2", namespace=namespace, clock=clock) as store:
            await _fill(store)
            before = await _picture(store)
        for shards, step in ((3, 13), (2, 17)):
            with monkeypatch.context() as patch:
                for cut in range(5, 10_000, step):
                    if await _cut_off(patch, url, namespace, shards, cut):
                        break
                    assert await _opens(url, namespace) == (cut == 5), "the first commands only ask"
                assert cut > 50
            async with ShardedStore(url, namespace=namespace, clock=clock) as store:
                assert len(store.shards) == shards
                assert await _picture(store) == before
                assert await store.vanished() == ""

    asyncio.run(play())


def test_s2_s6_a_write_that_arrives_after_another_mover_has_ended_the_move_changes_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mover may stand still between its look at the lock and a write. The test delays some of its writes in turn."""
    monkeypatch.setattr(moving, "AT_ONCE", 7)
    monkeypatch.setattr(resharding, "LOCK_MS", 300)
    monkeypatch.setattr(resharding, "AGAIN_S", 0.01)

    async def play(late: int) -> bool:
        namespace, clock = uuid4().hex, VirtualClock()
        async with ShardedStore(f"{url}?shards=2", namespace=namespace, clock=clock) as store:
            claims = await _fill(store)
        with monkeypatch.context() as patch:
            held, arrives = _delayed(patch, late)
            mover = asyncio.create_task(_reshard(url, namespace, 3))
            await asyncio.wait([mover, asyncio.ensure_future(held.wait())], return_when=asyncio.FIRST_COMPLETED)
            if mover.done():
                await mover
                return False
            await _reshard(url, namespace, 3)
            async with ShardedStore(url, namespace=namespace, clock=clock) as store:
                async with store.work("w", LANES) as work:
                    ends = [Done(each.record.id, each.record.revision, each.token) for each in claims]
                    assert set(await work.settle(ends)) == {SettleOutcome.SETTLED}
                await _deliver_the_rest(store, clock)
            before = _data(url, namespace)
            arrives.set()
            with pytest.raises(StoreUnavailableError, match="another `aiodelay reshard` has ended the move"):
                await mover
            assert _data(url, namespace) == before
            return True

    assert asyncio.run(play(0))
    assert next(late for late in range(15, 10_000, 15) if not asyncio.run(play(late))) > 50


def test_a_write_may_have_more_arguments_than_a_script_passes_on(url: str, namespace: str) -> None:
    names = [f"address {i}" for i in range(9_000)]
    keys = keys_of(namespace)

    async def keeps_lock() -> None:
        pass

    async def play() -> None:
        client = MoveClient(read_url(url), keeps_lock)
        await client.take_over(keys)
        await client.write("SADD", keys.key("holds"), *names)
        await client.write("ZADD", keys.key("late"), *(part for i, name in enumerate(names) for part in (i, name)))
        await client.aclose()

    asyncio.run(play())
    with Redis.from_url(url) as client:
        assert client.smembers(keys.key("holds")) == {each.encode() for each in names}
        assert client.zrange(keys.key("late"), 0, -1) == [each.encode() for each in names]


def _delayed(patch: pytest.MonkeyPatch, late: int) -> tuple[asyncio.Event, asyncio.Event]:
    """Hold a write of the next mover up, after the mover's look at the lock.

    Returns:
        An event that is set once the write is held up, and an event that lets it go on.
    """
    from aiodelay.backends.redis.connection.client import Client  # noqa: PLC0415 - patched here

    held, arrives, calls, movers = asyncio.Event(), asyncio.Event(), count(), list[MoveClient]()
    write, exchange = MoveClient.write, Client._exchange
    slow = ContextVar("slow", default=False)

    async def counted(self: MoveClient, *arguments: Any) -> Any:  # noqa: ANN401 - passed on
        movers.append(self)
        if self is movers[0] and next(calls) == late:
            slow.set(True)
        return await write(self, *arguments)

    async def delayed(self: Client, commands: list[bytes], *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - passed on
        if slow.get() and b":reshard\r\n" not in commands[0]:  # not a look at the lock
            slow.set(False)
            held.set()
            await arrives.wait()
        return await exchange(self, commands, *arguments, **named)

    patch.setattr(MoveClient, "write", counted)
    patch.setattr(Client, "_exchange", delayed)
    return held, arrives


def test_s2_items_that_came_in_flight_move_with_their_message(url: str, namespace: str) -> None:
    ids = [f"m{i}" for i in range(9)]

    async def play() -> None:
        async with ShardedStore(url, namespace=namespace) as store:
            await store.apply([_put(each, "orders", After(0), payload=b"1") for each in ids])
            async with store.work("w", LANES) as work:
                claimed = await work.claim({"orders": Demand(100)}, request=new_id(), lease_ms=LEASE_MS)
            append = Conflict.append()
            await store.apply([_put(each, "orders", payload=b"2", conflict=append) for each in ids])
        await _reshard(url, namespace, 3)
        async with ShardedStore(url, namespace=namespace) as store, store.work("w", LANES) as work:
            ends = [Done(each.record.id, each.record.revision, each.token) for each in claimed.claims]
            assert await work.settle(ends) == [SettleOutcome.SETTLED] * len(ids)
            following = await store.search(Query(limit=100))
            assert sorted((each.record.id, each.record.envelope.payload) for each in following) == [
                (each, b"2") for each in ids
            ]

    asyncio.run(play())


@pytest.mark.parametrize("later", [1, 3])
def test_s2_all_new_shards_get_the_features_of_all_former_shards(url: str, namespace: str, later: int) -> None:
    """Only the shard of an appended item has the feature `append`. Without it, a settlement would delete the item."""
    ids = [each for each in map(str, range(20)) if shard_of(each, 2) == 1]

    async def play() -> None:
        async with ShardedStore(f"{url}?shards=2", namespace=namespace) as store, store.work("w", LANES) as work:
            await store.switch_on(["limits"])
            await store.apply([_put(each, "orders", After(0), payload=b"1") for each in ids])
            claims = (await work.claim({"orders": Demand(100)}, request=new_id(), lease_ms=LEASE_MS)).claims
            append = Conflict.append()
            await store.apply([_put(each, "orders", payload=b"2", conflict=append) for each in ids])
            assert [sorted(await each.features()) for each in store.shards] == [["limits"], ["append", "limits"]]
        await _reshard(url, namespace, later)
        async with ShardedStore(url, namespace=namespace) as store, store.work("w", LANES) as work:
            assert [sorted(await each.features()) for each in store.shards] == [["append", "limits"]] * later
            ends = [Done(each.record.id, each.record.revision, each.token) for each in claims]
            assert await work.settle(ends) == [SettleOutcome.SETTLED] * len(ids)
            left = await store.search(Query(limit=100))
            assert sorted((each.record.id, each.record.envelope.payload) for each in left) == sorted(
                (each, b"2") for each in ids
            )

    asyncio.run(play())


async def _opens(url: str, namespace: str) -> bool:
    try:
        async with ShardedStore(url, namespace=namespace):
            return True
    except StoreUnavailableError as error:
        if "is being moved" not in str(error):
            raise
        return False


async def _cut_off(patch: pytest.MonkeyPatch, url: str, namespace: str, shards: int, commands: int) -> bool:
    """Move, and fail after some writes. Return True if the move has ended before."""
    from aiodelay.backends.redis.connection.client import Client  # noqa: PLC0415 - patched here

    left = [commands]

    class CutError(Exception):
        pass

    def cut(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(self: Client, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - passed on
            if arguments[0] not in ("DEL", "GET") and not self._fixed:
                left[0] -= 1
                if left[0] < 0:
                    raise CutError
            return call(self, *arguments, **named)

        return counted

    with patch.context() as own:
        own.setattr(Client, "command", cut(Client.command))
        own.setattr(Client, "run_on", cut(Client.run_on))
        try:
            await _reshard(url, namespace, shards)
        except CutError:
            return False
    return True


STOPS_MIDWAY = """
import sys, time
from aiodelay.cli import main
write = sys.stderr.write
def write_and_stop(text):
    if "examined" not in text:
        return write(text)
    write(f"{text}\\n")
    sys.stderr.flush()
    time.sleep(600)
sys.stderr.write = write_and_stop
main()
"""
"""A program that stands still once it has told of its progress, so that no test comes too late to kill it."""


def test_a_move_killed_by_a_signal_goes_on(url: str, namespace: str, tmp_path: Path) -> None:
    async def store_many() -> None:
        async with ShardedStore(url, namespace=namespace) as store:
            for start in range(0, 6_000, 500):
                await store.apply([_put(f"m{i}", LANES[i % 3]) for i in range(start, start + 500)])

    async def count() -> tuple[int, int]:
        async with ShardedStore(url, namespace=namespace) as store:
            assert await store.vanished() == ""
            return len(store.shards), sum(each.scheduled for each in (await store.counts()).values())

    asyncio.run(store_many())
    arguments = ["reshard", url, "--shards", "3", "--yes", "--namespace", namespace]
    program = [sys.executable, "-c", STOPS_MIDWAY, *arguments]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as victim:
        assert victim.stderr is not None
        for line in victim.stderr:
            if "examined" in line:
                break
        victim.send_signal(signal.SIGKILL)
    assert victim.returncode == -signal.SIGKILL
    with pytest.raises(StoreUnavailableError, match="is being moved"):
        asyncio.run(count())
    ran = Cli(url, tmp_path)(*arguments)
    assert ran.code == 0
    assert ran.out.startswith("moved 6000 messages and dead letters from 1 shard to 3\nthe processes of the namespace ")
    assert "examined 6000 of 6000 messages" in ran.err
    assert asyncio.run(count()) == (3, 6_000)
    assert Cli(url, tmp_path)(*arguments).out == "the namespace already has 3 shards\n"


@pytest.mark.parametrize("found", redis_programs()[:1], ids=lambda found: found.name)
def test_s2_a_server_that_starts_again_within_a_scan_leaves_nothing_behind(
    found: Found, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cursor of the scan means nothing to the new process. No call is under way meanwhile, so none fails."""
    ids = [f"m{i}" for i in range(1_000)]
    server = start(found.program, "--appendonly", "yes", "--appendfsync", "always")
    monkeypatch.setattr(moving, "AT_ONCE", 50)
    monkeypatch.setattr(resharding, "AGAIN_S", 0.01)
    keep_lock, calls = resharding._Reshard._keep_lock, count()

    async def restarted(self: Any) -> None:  # noqa: ANN401 - passed on
        if next(calls) == 30:
            server.kill()
            server.start()
            await asyncio.sleep(0.05)  # the event loop takes note of the connections that have ended
        await keep_lock(self)

    monkeypatch.setattr(resharding._Reshard, "_keep_lock", restarted)

    async def play() -> None:
        async with ShardedStore(server.url, namespace=namespace) as store:
            await store.apply([_put(each, "orders") for each in ids[:500]])
            await store.apply([_put(each, "orders") for each in ids[500:]])
        await _reshard(server.url, namespace, 4)
        assert next(calls) > 30
        async with ShardedStore(server.url, namespace=namespace) as store:
            for shard, each in enumerate(store.shards):
                own = [each for each in ids if shard_of(each, 4) == shard]
                assert sorted(found.record.id for found in await each.search(Query(limit=1_000))) == sorted(own)

    try:
        asyncio.run(play())
    finally:
        server.stop()


def test_a_move_refuses_what_it_cannot_do(url: str, namespace: str) -> None:
    async def play() -> None:
        with pytest.raises(StoreMismatchError, match="new"):
            await _reshard(url, namespace, 2)
        async with ShardedStore(url, namespace=namespace) as store:
            for shards in (0, 65):
                with pytest.raises(ConfigurationError, match="1 to 64"):
                    await _reshard(url, namespace, shards)
            limits = LaneLimits(whole=Limit(concurrency=1))
            await store.set_limits("orders", limits, is_declared=False)
            with pytest.raises(UnsupportedByStoreError, match="a limit of a lane"):
                await _reshard(url, namespace, 2)
            await store.set_limits("orders", LaneLimits(), is_declared=False)
        await _reshard(url, namespace, 2)

    asyncio.run(play())


def test_v1_a_move_refuses_a_feature_that_this_version_does_not_know(
    url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of a newer version may switch the feature on before the move, or until the shards are frozen."""
    freeze = resharding._Reshard._freeze

    async def switch_on() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(features, "KNOWN", features.KNOWN | {"future"})
            async with ShardedStore(url, namespace=namespace) as store:
                await store.shards[1].switch_on(["future"])

    async def late(self: Any, plan: Any) -> None:  # noqa: ANN401 - passed on
        await switch_on()
        await freeze(self, plan)

    async def play() -> None:
        async with ShardedStore(f"{url}?shards=2", namespace=namespace) as store:
            await store.apply([_put(f"m{i}", "orders") for i in range(9)])
        with monkeypatch.context() as patch:
            patch.setattr(resharding._Reshard, "_freeze", late)
            with pytest.raises(StoreTooNewError, match=r"future \(switched on by aiodelay"):
                await _reshard(url, namespace, 3)
        before = _data(url, namespace)
        with pytest.raises(StoreTooNewError, match=r"future \(switched on by aiodelay"):
            await _reshard(url, namespace, 3)
        assert _data(url, namespace) == before
        async with ShardedStore(url, namespace=namespace) as store:
            assert len(store.shards) == 2

    asyncio.run(play())


def test_v1_a_move_that_a_newer_version_began_waits_for_that_version(
    url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        async with ShardedStore(f"{url}?shards=2", namespace=namespace) as store:
            await store.apply([_put(f"m{i}", "orders") for i in range(9)])
            with monkeypatch.context() as patch:
                patch.setattr(features, "KNOWN", features.KNOWN | {"future"})
                await store.shards[1].switch_on(["future"])
                with monkeypatch.context() as stopped:
                    stopped.setattr(resharding, "carry_positions", _stop)
                    with pytest.raises(KeyboardInterrupt):
                        await _reshard(url, namespace, 3)
            with pytest.raises(StoreTooNewError, match=r"future \(switched on by aiodelay"):
                await _reshard(url, namespace, 3)
            assert not await _opens(url, namespace)

    asyncio.run(play())


async def _stop(*_: object) -> None:
    raise KeyboardInterrupt

"""Intakes into several shards: each shard keeps its own positions, and nothing is lost or stored twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import pytest
from redis import Redis

from aiodelay.backends.redis.records.keys import Keys
from aiodelay.backends.redis.records.positions import ShardPosition, carried, current
from aiodelay.backends.redis.records.shards import shard_of
from aiodelay.backends.redis.sharded.reshard import reshard
from aiodelay.core.values import (
    After,
    Command,
    Conflict,
    Envelope,
    Outcome,
    Put,
    Query,
    Refused,
    SourcePosition,
    Stored,
    Unknown,
)
from aiodelay.errors import ConfigurationError
from aiodelay.redis import RedisStore, ShardedStore
from tests.support.servers import Found, redis_servers
from tests.support.waiting import until

SHARDS = 4
SOURCE = "kafka:t/id/0"
HOUR = After(3_600_000)
REPLACE = Conflict.replace()


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def url(request: pytest.FixtureRequest, shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(request.param)


@pytest.fixture
def namespace() -> str:
    return uuid4().hex


class KilledError(Exception):
    """The process of a reader was killed."""


class Stream:
    """A stream of records that ask for messages. Some have the id of an earlier record, and join its message."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def grow(self, rng: random.Random, n: int) -> None:
        self.ids += [f"r{len(self.ids) + i}" if rng.random() < 0.7 else f"same{rng.randrange(9)}" for i in range(n)]

    def puts(self, first: int, position: int) -> list[Put]:
        return [_put(self.ids[n], b"%d" % n, Conflict.append()) for n in range(first, position)]


def _put(message_id: str, payload: bytes = b"0", conflict: Conflict = REPLACE) -> Put:
    return Put(bytes(8), Envelope(message_id, "orders", payload=payload), HOUR, conflict)


def _batch(first: int, position: int) -> SourcePosition:
    return SourcePosition(SOURCE, first, position, tuple(range(first + 1, position + 1)))


class Reader:
    """Reads a stream as an intake does. Its calls to single shards can fail."""

    def __init__(self, store: ShardedStore, stream: Stream) -> None:
        self.store, self.stream, self.position = store, stream, -1
        self.fails: Callable[[int], str] = lambda _shard: ""
        for shard, each in enumerate(store.shards):
            _replace(each, self._failing(shard, each.apply_part))

    def _failing(self, shard: int, apply_part: Callable[..., Any]) -> Callable[..., Any]:
        async def failing(commands: Sequence[Command], **move: Any) -> Any:  # noqa: ANN401 - passed on
            fails = self.fails(shard)
            if fails == "refused":
                return [], Refused("unavailable", "down")
            if fails == "killed before":
                raise KilledError
            answer = await apply_part(commands, **move)
            if fails == "killed after":
                raise KilledError
            return answer if not fails else ([], Unknown("the answer was lost"))

        return failing

    async def take(self, most: int) -> Sequence[Outcome]:
        """Take a batch in. If it fails, the next call begins at the stored position."""
        if self.position < 0:
            self.position = await self.store.position(SOURCE) or 0
        first, self.position = self.position, -1
        position = min(first + most, len(self.stream.ids))
        outcomes = await self.store.apply(self.stream.puts(first, position), source=_batch(first, position))
        if all(isinstance(each, Stored) for each in outcomes):
            self.position = position
        return outcomes


def _replace(store: RedisStore, apply_part: Callable[..., Any]) -> None:
    store.apply_part = apply_part  # type: ignore[method-assign]


async def _check_once(store: ShardedStore, stream: Stream, first: int = 0) -> None:
    """Check that each record from `first` on was stored once, and records of the same id in order."""
    assert await store.position(SOURCE) == len(stream.ids)
    stored: dict[str, list[int]] = {}
    for n in range(first, len(stream.ids)):
        stored.setdefault(stream.ids[n], []).append(n)
    assert await _stored(store) == stored
    assert await store.vanished() == ""


async def _until_position(shards: Sequence[RedisStore], position: int) -> None:
    async def are_there() -> bool:
        return {await each.position(SOURCE) for each in shards} == {position}

    await until(are_there, f"the shards are at {position}")


async def _stored(store: ShardedStore) -> dict[str, list[int]]:
    """Return the numbers of the records that have joined each message, in order."""
    found = await store.search(Query(limit=1_000))
    return {each.record.id: [*map(int, each.record.envelope.payload.split(b"\n"))] for each in found}


# --- nothing is lost, and nothing is stored twice ---------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_s2_s6_two_readers_that_fail_anywhere_store_each_record_once(url: str, namespace: str, seed: int) -> None:
    """Between the steps, the namespace moves to other numbers of shards, also to one. Then its shards often differ."""
    rng, stream = random.Random(seed), Stream()

    def fails(_shard: int) -> str:
        return rng.choice(["refused", "lost", "killed before", "killed after"]) if rng.random() < 0.15 else ""

    async def play() -> None:
        shards = SHARDS
        for _ in range(6):
            stream.grow(rng, 120)
            async with (
                ShardedStore(f"{url}?shards={shards}", namespace=namespace) as one,
                ShardedStore(url, namespace=namespace) as other,
            ):
                readers = [Reader(one, stream), Reader(other, stream)]
                for each in readers:
                    each.fails = fails
                for _ in range(12):
                    chosen = [rng.choice(readers)] if rng.random() < 0.5 else readers
                    await asyncio.gather(*(each.take(rng.randint(1, 15)) for each in chosen), return_exceptions=True)
                readers[0].fails = lambda _shard: rng.choice(["", "killed before"])
                await asyncio.gather(*(readers[0].take(9) for _ in range(2)), return_exceptions=True)
            shards = rng.choice([1, 2, 3, 5, SHARDS])
            await reshard(url, namespace, shards, lambda _examined, _of: None)
        async with ShardedStore(url, namespace=namespace) as store:
            reader = Reader(store, stream)
            while reader.position < len(stream.ids):
                await reader.take(50)
            await _check_once(store, stream)

    asyncio.run(play())


def test_s6_a_shard_that_is_ahead_skips_what_it_has(url: str, namespace: str) -> None:
    """The next reader takes other batches than the one that was killed. Some end before the positions of shards."""
    stream = Stream()
    stream.grow(random.Random(1), 60)

    async def play() -> None:
        async with ShardedStore(f"{url}?shards={SHARDS}", namespace=namespace) as store:
            killed = Reader(store, stream)
            await killed.take(0)  # all shards get a position
            killed.fails = lambda shard: "killed before" if shard > 1 else ""
            with pytest.raises(KilledError):
                await killed.take(40)
        async with ShardedStore(url, namespace=namespace) as store:
            assert await store.position(SOURCE) == 0
            assert [await each.position(SOURCE) for each in store.shards] == [40, 40, 0, 0]
            reader = Reader(store, stream)
            for most in (7, 26, 20, 7):
                assert all(isinstance(each, Stored) for each in await reader.take(most))
            await _check_once(store, stream)

    asyncio.run(play())


def test_s6_an_outdated_reader_is_refused_by_each_shard(url: str, namespace: str) -> None:
    """It stands still between two shards, while another reader stores the rest of its batch."""
    stream = Stream()
    stream.grow(random.Random(2), 60)

    async def play() -> None:
        async with (
            ShardedStore(f"{url}?shards={SHARDS}", namespace=namespace) as one,
            ShardedStore(url, namespace=namespace) as two,
        ):
            outdated, other = Reader(one, stream), Reader(two, stream)
            await outdated.take(10)
            goes_on, apply_part = asyncio.Event(), one.shards[3].apply_part

            async def stands_still(commands: Sequence[Command], **move: Any) -> Any:  # noqa: ANN401 - passed on
                await goes_on.wait()
                return await apply_part(commands, **move)

            _replace(one.shards[3], stands_still)
            async with asyncio.TaskGroup() as tasks:
                standing = tasks.create_task(outdated.take(20))
                await _until_position(two.shards[:3], 30)
                await other.take(15)
                assert [await each.position(SOURCE) for each in two.shards] == [30, 30, 30, 25]
                goes_on.set()
                (why,) = set(await standing)
                assert isinstance(why, Unknown)
                assert why.detail == "other shards have their part; shard 3 refuses its part: passed"
            await other.take(60)
            assert set(await outdated.take(60)) == set()
            await _check_once(two, stream)

    asyncio.run(play())


def test_s2_two_readers_that_begin_at_different_positions_agree(url: str, namespace: str) -> None:
    stream = Stream()
    stream.grow(random.Random(3), 40)

    async def begin(store: ShardedStore, first: int) -> Sequence[Outcome]:
        return await store.apply(stream.puts(first, 40), source=_batch(first, 40))

    async def play() -> None:
        for n in range(10):
            other = f"{namespace}-{n}"
            async with (
                ShardedStore(f"{url}?shards={SHARDS}", namespace=other) as one,
                ShardedStore(url, namespace=other) as two,
            ):
                answers = await asyncio.gather(begin(one, 0), begin(two, 10))
                stored = [all(isinstance(each, Stored) for each in outcomes) for outcomes in answers]
                assert sorted(stored) == [False, True]
                await _check_once(one, stream, 10 * stored[1])

    asyncio.run(play())


@pytest.mark.parametrize("shard", [0, 2])
def test_a_reader_that_was_killed_as_it_began_leaves_one_begin(url: str, namespace: str, shard: int) -> None:
    """If shard 0 has the begin, the next reader goes on there. Else no shard has a begin."""
    stream = Stream()
    stream.grow(random.Random(4), 40)

    async def play() -> None:
        async with ShardedStore(f"{url}?shards={SHARDS}", namespace=namespace) as store:
            killed = Reader(store, stream)
            killed.position, killed.fails = 5, lambda each: "killed before" if each == shard else ""
            with pytest.raises(KilledError):
                await killed.take(10)
        async with ShardedStore(url, namespace=namespace) as store:
            begins = [await each.position(SOURCE) for each in store.shards]
            assert begins == ([5, 5, None, 5] if shard else [None] * SHARDS)
            assert await store.position(SOURCE) == (5 if shard else None)
            reader = Reader(store, stream)
            reader.position = first = 5 if shard else 8
            await reader.take(40)
            await _check_once(store, stream, first)

    asyncio.run(play())


def test_the_answers_of_shards_that_were_ahead_are_given_once_all_have_the_batch(url: str, namespace: str) -> None:
    """An intake writes refused requests to its dead topic, so it must learn of each."""
    first = next(f"m{i}" for i in range(100) if shard_of(f"m{i}", SHARDS) == 0)
    last = next(f"m{i}" for i in range(100) if shard_of(f"m{i}", SHARDS) == 3)
    puts = [_put(each, conflict=Conflict.error()) for each in (first, last)]

    async def play() -> None:
        async with ShardedStore(f"{url}?shards={SHARDS}", namespace=namespace) as store:
            await store.apply([_put(first)])
            reader = Reader(store, Stream())
            await store.apply([], source=SourcePosition(SOURCE, 0, 0))
            reader.fails = lambda shard: "refused" if shard == 3 else ""
            batch = SourcePosition(SOURCE, 0, 2, (1, 2))
            assert (
                await store.apply(puts, source=batch)
                == [Unknown("other shards have their part; shard 3 refuses its part: unavailable down")] * 2
            )
            assert await store.apply(puts, source=batch) == [Refused("unavailable", "down")] * 2
            reader.fails = lambda _shard: ""
            refused, stored = await store.apply(puts, source=batch)
            assert (refused, isinstance(stored, Stored)) == (Refused("duplicate"), True)

    asyncio.run(play())


def test_s2_a_store_that_takes_no_new_lane_keeps_the_position(url: str, namespace: str) -> None:
    """If one shard took no new lane and moved its position, its messages would be lost."""
    stream = Stream()
    stream.grow(random.Random(6), 40)
    lanes = Keys(namespace, 3).key("lanes")

    async def play() -> None:
        async with ShardedStore(f"{url}?shards={SHARDS}", namespace=namespace) as store:
            with Redis.from_url(url) as server:
                reader = Reader(store, stream)
                assert await reader.take(0) == []
                server.eval("for n = 1, 65535 do redis.call('HSET', KEYS[1], n, n) end", 1, lanes)
                assert {type(each) for each in await reader.take(20)} == {Unknown}
                (refused,) = set(await reader.take(20))
                assert isinstance(refused, Refused)
                assert (refused.reason, await store.position(SOURCE)) == ("unavailable", 0)
                server.delete(lanes)
                await reader.take(20)
            await reader.take(20)
            await _check_once(store, stream)

    asyncio.run(play())


# --- a source that has lost its end -----------------------------------------------------------------------


def test_s2_reading_goes_back_in_all_shards_also_if_the_reader_is_killed_meanwhile(url: str, namespace: str) -> None:
    stream, rng = Stream(), random.Random(5)
    stream.grow(rng, 40)

    async def play() -> None:
        async with ShardedStore(f"{url}?shards={SHARDS}", namespace=namespace) as store:
            reader = Reader(store, stream)
            await reader.take(40)
            reader.fails = lambda shard: "killed before" if shard > 1 else ""
            with pytest.raises(KilledError):
                await store.apply([], source=SourcePosition(SOURCE, 40, 25))
        del stream.ids[25:]
        stream.ids += [f"new{i}" for i in range(30)]
        async with ShardedStore(url, namespace=namespace) as store:
            assert await store.position(SOURCE) == 25
            reader = Reader(store, stream)
            for _ in range(6):
                await reader.take(5)
            stored = await _stored(store)
            assert [stored[f"new{i}"] for i in range(30)] == [[25 + i] for i in range(30)]
            assert await store.vanished() == ""

    asyncio.run(play())


# --- calls without positions, and wrong ones --------------------------------------------------------------


def test_a_batch_without_the_positions_of_its_commands_is_not_guessed(url: str, namespace: str) -> None:
    stream = Stream()
    stream.grow(random.Random(6), 40)

    async def play() -> None:
        async with ShardedStore(f"{url}?shards={SHARDS}", namespace=namespace) as store:
            for message in ("no more", "no less"):
                with pytest.raises(ConfigurationError, match=r"source\.positions .*1 positions.*2, one for each"):
                    await store.apply([_put(message)] * 2, source=SourcePosition(SOURCE, 0, 2, (1,)))
            reader = Reader(store, stream)
            reader.fails = lambda shard: "refused" if shard == 2 else ""
            await store.shards[2].apply([], source=SourcePosition(SOURCE, 0, 0))
            await reader.take(20)
            reader.fails = lambda _shard: ""
            whole = SourcePosition(SOURCE, 0, 30)
            (refused,) = set(await store.apply(stream.puts(0, 30), source=whole))
            assert isinstance(refused, Refused)
            assert "source.positions does not say which" in refused.detail

    asyncio.run(play())


# --- positions as text ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "position",
    [ShardPosition(0), ShardPosition(7, 2, 5), ShardPosition(7, 1, 7, ((9, 7), (7, 8, 9))), ShardPosition(12)],
)
def test_a_position_is_read_as_it_was_written(position: ShardPosition) -> None:
    assert ShardPosition.of(position.text) == position


def test_a_position_of_one_shard_is_its_digits() -> None:
    assert (ShardPosition(120).text, ShardPosition(7, 1, 5, ((9, 7),)).text) == ("120", "7 cut=1@5 moved=9,7")


def test_a_move_keeps_which_messages_the_former_shards_have() -> None:
    former = [ShardPosition(9), ShardPosition(5, moved=((6, 7, 8),)), ShardPosition(9)]
    moved = carried(former)
    assert moved == ShardPosition(5, moved=((9, 7, 9),))  # of two moves from 3 shards, the larger positions
    ids = [next(f"m{i}" for i in range(100) if shard_of(f"m{i}", 3) == shard) for shard in range(3)]
    assert [moved.has(each, 8) for each in ids] == [True, False, True]
    assert moved.at(9) == ShardPosition(9)
    assert carried([ShardPosition(5), ShardPosition(5)]) == ShardPosition(5)
    assert carried([moved, *former[1:]]) == moved  # a move that was killed half-way is repeated


def test_a_shard_without_a_position_has_that_of_the_others() -> None:
    assert current([None, None]) == []
    assert current([ShardPosition(5), None]) == [ShardPosition(5)] * 2
    assert current([ShardPosition(9, moved=((9, 8),)), ShardPosition(4, 1, 3)]) == [
        ShardPosition(3, 1, 3),
        ShardPosition(4, 1, 3),
    ]


@pytest.mark.parametrize(("shards", "back"), [(1, b"3"), (2, b"3 cut=1@3")])
def test_what_a_client_sees_in_redis(url: str, namespace: str, shards: int, back: bytes) -> None:
    """With one shard, an older version of aiodelay can read the positions."""

    def has(position: bytes) -> None:
        with Redis.from_url(url) as client:
            for shard in range(shards):
                assert client.hgetall(f"{{{namespace}:0{shard}}}:src") == {SOURCE.encode(): position}
                assert client.hget(f"{{{namespace}:0{shard}}}:meta", "sources") == b"1"

    async def play() -> None:
        async with ShardedStore(f"{url}?shards={shards}", namespace=namespace) as store:
            await store.apply([_put("a")], source=SourcePosition(SOURCE, 0, 5))
            has(b"5")
            await store.apply([], source=SourcePosition(SOURCE, 5, 3))
            has(back)

    asyncio.run(play())

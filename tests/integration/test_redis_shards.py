"""A namespace of several shards: its layout, what claims cost and how fair they are, and what it refuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
from msgspec.structs import replace
from redis import Redis

from aiodelay import Limit, Scheduler
from aiodelay.backends.redis.records.shards import ShardLayout, shard_of
from aiodelay.backends.redis.sharded.work import ShardedWork
from aiodelay.backends.redis.store import transfer
from aiodelay.core.ids import new_id, new_op
from aiodelay.core.transitions import SUSPECT_LAPSES, occurrence_id
from aiodelay.core.values import (
    LEASE_MS,
    MAX_CLAIM_MESSAGES,
    After,
    Command,
    Demand,
    Done,
    Envelope,
    Lane,
    Promise,
    Put,
    Refused,
    SettleOutcome,
    Stored,
)
from aiodelay.errors import (
    ConfigurationError,
    StoreMismatchError,
    StoreUnavailableError,
    UnsupportedByStoreError,
)
from aiodelay.ports import Work
from aiodelay.redis import RedisFanoutSink, RedisListSink, RedisLog, RedisStore, ShardedStore
from aiodelay.testing.clock import VirtualClock
from tests.support.servers import Found, redis_servers
from tests.support.waiting import PATIENCE_S

LANE = "orders"
SHARDS = 4


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def url(request: pytest.FixtureRequest, shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(request.param)


@dataclass
class Order:
    number: int


@pytest.fixture
def namespace() -> str:
    return uuid4().hex


@asynccontextmanager
async def opened(url: str, namespace: str) -> AsyncIterator[tuple[ShardedStore, Work]]:
    async with ShardedStore(f"{url}?shards={SHARDS}", namespace=namespace) as store, store.work("w", [LANE]) as work:
        yield store, work


def ids_of(shard: int, number: int) -> list[str]:
    """Return ids that a shard stores."""
    names = (f"m{i}" for i in range(1_000_000))
    return [next(each for each in names if shard_of(each, SHARDS) == shard) for _ in range(number)]


async def put(store: ShardedStore, ids: Sequence[str], lane: str = LANE, address: str = "") -> None:
    puts = [Put(new_op(), Envelope(each, lane, address=address), After(0)) for each in ids]
    assert all(isinstance(each, Stored) for each in await store.apply(puts))


async def claim(work: Work, messages: int = 100) -> list[str]:
    claimed = await work.claim({LANE: Demand(messages)}, request=new_id(), lease_ms=LEASE_MS)
    return [each.record.id for each in claimed.claims]


# --- the layout -------------------------------------------------------------------------------------------


def test_ids_are_spread_evenly_and_a_series_has_its_occurrences_with_it() -> None:
    counts = [0] * 8
    for _ in range(8_000):
        counts[shard_of(new_id(), 8)] += 1
    assert min(counts) > 850
    for series in ("s", new_id()):
        assert shard_of(occurrence_id(series, 1_893_456_000_000), 8) == shard_of(series, 8)


def test_the_shard_of_an_id_never_changes() -> None:
    """Ids that are stored have their shard for ever."""
    assert [shard_of(each, 8) for each in ("a", "order-17", "0190f0a1b2c37d4e8f5061728394a5b6")] == [3, 5, 1]


@pytest.mark.parametrize("schema", ["", "2", "1:x:4", "1:2", "1:2:1", "1:2:3:4", "2:1:4"])
def test_an_unknown_layout_is_not_guessed(schema: str) -> None:
    assert ShardLayout.of(schema) is None


def test_the_number_of_shards_lives_in_the_namespace(
    url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        async with ShardedStore(f"{url}?shards={SHARDS}", namespace=namespace) as store:
            await put(store, [f"m{i}" for i in range(40)])
        for query, warns in (("", False), ("?shards=4", False), ("?shards=7", True), ("?shards=1", True)):
            caplog.clear()
            async with ShardedStore(url + query, namespace=namespace) as store:
                assert len(store.shards) == SHARDS
                assert sum(each.scheduled + each.overdue for each in (await store.counts()).values()) == 40
            assert warns == ("counts only for a new namespace" in caplog.text)

    with caplog.at_level(logging.WARNING):
        asyncio.run(play())


def test_two_processes_that_create_a_namespace_agree(url: str) -> None:
    async def shards(query: str, namespace: str) -> int:
        async with ShardedStore(url + query, namespace=namespace) as store:
            return len(store.shards)

    async def play() -> None:
        for _ in range(10):
            namespace = uuid4().hex
            found = await asyncio.gather(*(shards(each, namespace) for each in ("?shards=4", "", "?shards=2", "")))
            assert len(set(found)) == 1

    asyncio.run(play())


def test_one_shard_has_the_keys_and_the_commands_that_it_always_had(url: str, namespace: str) -> None:
    async def play() -> None:
        async with ShardedStore(f"{url}?shards=1", namespace=namespace) as store:
            assert [len(each.keys.fixed) for each in store.shards] == [14]
            await put(store, ["a"])
            async with store.work("w", [LANE]) as work:
                assert await claim(work) == ["a"]
        async with RedisStore(url, namespace=namespace) as store:
            assert await store.get("a") is not None
        with Redis.from_url(url) as client:
            assert client.hmget(f"{{{namespace}:00}}:meta", "schema", "shards") == [b"1", b"1"]

    asyncio.run(play())


@pytest.mark.parametrize(
    "value", ["0", "65", "-1", "four", "4.0", ""], ids=["none", "many", "negative", "text", "fraction", "empty"]
)
def test_a_wrong_number_of_shards_is_refused(value: str) -> None:
    with pytest.raises(ConfigurationError, match=r"shards.* 1 to 64"):
        ShardedStore(f"redis://localhost?shards={value}")


def test_the_store_of_one_shard_refuses_several(url: str, namespace: str) -> None:
    async def play() -> None:
        async with opened(url, namespace):
            pass
        with pytest.raises(StoreMismatchError, match=r"schema 1:1:4, 4 shards"):
            await RedisStore(url, namespace=namespace).__aenter__()

    asyncio.run(play())


# --- the epoch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("former", [1, SHARDS])
def test_v1_a_process_of_another_epoch_changes_nothing(url: str, namespace: str, former: int) -> None:
    """Commands, claims, settlements and housekeeping: all scripts compare the layout. The process waits for another."""

    async def play() -> None:
        async with (
            ShardedStore(f"{url}?shards={former}", namespace=namespace) as store,
            store.work("w", [LANE]) as work,
        ):
            store.follower.wait_s = 0.1
            await put(store, ["claimed"])
            (held,) = (await work.claim({LANE: Demand(1)}, request=new_id(), lease_ms=LEASE_MS)).claims
            before = _contents(url, namespace)
            _set_layout(url, namespace, ShardLayout(1, 9, is_moving=True).schema)
            (outcome,) = await store.apply([Put(new_op(), Envelope("new", LANE), After(0))])
            assert isinstance(outcome, Refused)
            assert "is being moved" in outcome.detail
            for call in (
                lambda: work.claim({LANE: Demand(1)}, request=new_id(), lease_ms=LEASE_MS),
                lambda: work.settle([Done("claimed", held.record.revision, held.token)]),
                lambda: work.tidy([LANE], limit=10),
                lambda: store.pause(LANE),
                store.counts,
            ):
                with pytest.raises(StoreUnavailableError, match=r"is being moved"):
                    await call()
            assert work.status().phase == "loading"
            _set_layout(url, namespace, ShardLayout(former).schema)
            assert _contents(url, namespace) == before

    asyncio.run(play())


def test_a_namespace_that_is_being_moved_does_not_open(url: str, namespace: str) -> None:
    async def play() -> None:
        for query in ("", "?shards=4"):
            with pytest.raises(StoreUnavailableError, match=r"is being moved.*run it again"):
                await ShardedStore(url + query, namespace=namespace).__aenter__()

    _set_layout(url, namespace, ShardLayout(1, 3, is_moving=True).schema)
    asyncio.run(play())


def _set_layout(url: str, namespace: str, schema: str) -> None:
    with Redis.from_url(url) as client:
        for shard in range(SHARDS):
            if shard == 0 or client.exists(f"{{{namespace}:0{shard}}}:meta"):
                client.hset(f"{{{namespace}:0{shard}}}:meta", "schema", schema)


def _contents(url: str, namespace: str) -> dict[str, Any]:
    with Redis.from_url(url) as client:
        keys = [each for each in client.keys(f"{{{namespace}:*") if not each.endswith((b":workers", b":pulses"))]
        return {each.decode(): client.dump(each) for each in sorted(keys)}


# --- claims -----------------------------------------------------------------------------------------------


@pytest.fixture
def _no_safety_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a shard be asked only if something may be due, and only wake-ups end a wait."""
    monkeypatch.setattr(RedisStore, "traits", replace(RedisStore.traits, safety_poll_ms=3_600_000))
    monkeypatch.setattr(transfer, "SAFETY_POLL_S", 3_600.0)


class Calls:
    """Counts the claims that reach the server."""

    def __init__(self, store: ShardedStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shards: list[int] = []
        for shard, each in enumerate(store.shards):
            monkeypatch.setattr(each, "run", self._counted(shard, each.run))

    def _counted(self, shard: int, run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(script: str, arguments: Any) -> Any:  # noqa: ANN401 - passed on
            if script == "claim":
                self.shards.append(shard)
            return run(script, arguments)

        return counted

    def taken(self) -> list[int]:
        taken, self.shards = sorted(self.shards), []
        return taken


@pytest.mark.usefixtures("_no_safety_poll")
def test_a_claim_takes_one_round_trip_to_each_shard_and_only_where_something_is_due(
    url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        async with opened(url, namespace) as (store, work):
            calls = Calls(store, monkeypatch)
            await put(store, [each for shard in range(SHARDS) for each in ids_of(shard, 100)])
            assert len(await claim(work, 160)) == 160
            assert calls.taken() == [0, 1, 2, 3]
            asked = []
            for _ in range(SHARDS):  # a shard that surely has more is asked alone
                assert len(await claim(work, 50)) == 50
                asked += calls.taken()
            assert sorted(asked) == [0, 1, 2, 3]
            assert len(await claim(work, 500)) == 40
            assert await claim(work) == []
            calls.taken()
            assert await claim(work) == []
            assert calls.taken() == []  # nothing is due anywhere
            await put(store, ["one"])
            assert await claim(work) == ["one"]
            assert set(calls.taken()) == {shard_of("one", SHARDS)}

    asyncio.run(play())


@pytest.mark.usefixtures("_no_safety_poll")
def test_a_claim_from_empty_lanes_asks_no_shard_because_of_a_lane_with_more(
    url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def claimed(work: Work, **messages: int) -> int:
        demand = {lane: Demand(each) for lane, each in messages.items()}
        return len((await work.claim(demand, request=new_id(), lease_ms=LEASE_MS)).claims)

    async def play() -> None:
        async with opened(url, namespace) as (store, work):
            calls = Calls(store, monkeypatch)
            await put(store, [each for shard in range(SHARDS) for each in ids_of(shard, 50)])
            await put(store, ["other"], lane="other")
            assert await claimed(work, orders=SHARDS, other=SHARDS) == SHARDS + 1
            calls.taken()
            assert await claimed(work, orders=0, other=100) == 0
            assert calls.taken() == []
            assert await claimed(work, orders=20, other=100) == 20
            assert len(calls.taken()) == 1
            await put(store, ["later"], lane="other")
            assert await claimed(work, orders=0, other=100) == 1
            assert set(calls.taken()) == {shard_of("later", SHARDS)}

    asyncio.run(play())


def test_waiting_callers_share_calls_to_all_shards(url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, apply = list[RedisStore](), RedisStore.apply

    def counted(store: RedisStore, commands: Sequence[Command]) -> Any:  # noqa: ANN401 - passed on
        asked.append(store)
        return apply(store, commands)

    monkeypatch.setattr(RedisStore, "apply", counted)

    async def play() -> None:
        async with opened(url, namespace) as (store, _), Scheduler(store, dispatch=False) as scheduler:
            await asyncio.gather(*(scheduler.schedule(b"m", to="handler:orders", delay="1h") for _ in range(3_000)))
            assert [asked.count(each) for each in store.shards] == [2] * SHARDS
            assert (await store.counts())[LANE].scheduled == 3_000

    asyncio.run(play())


def test_l3_claims_serve_the_shards_in_turn(url: str, namespace: str) -> None:
    async def play() -> None:
        async with opened(url, namespace) as (store, work):
            await put(store, [each for shard in range(SHARDS) for each in ids_of(shard, 50)])
            taken = [shard_of((await claim(work, 1))[0], SHARDS) for _ in range(3 * SHARDS)]
            assert [taken.count(shard) for shard in range(SHARDS)] == [3] * SHARDS
            claimed = await work.claim({LANE: Demand(1_000)}, request=new_id(), lease_ms=LEASE_MS)
            assert len(claimed.claims) == 4 * 50 - 3 * SHARDS <= MAX_CLAIM_MESSAGES

    asyncio.run(play())


def test_l5_a_shard_that_fails_does_not_stop_the_others(
    url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        async with opened(url, namespace) as (store, work):
            await put(store, [each for shard in range(SHARDS) for each in ids_of(shard, 5)])
            due = f"{{{namespace}:02}}:due:1"
            with Redis.from_url(url) as client:
                client.rename(due, due + ":kept")
                client.set(due, "no sorted set")
                assert len(await claim(work)) == 15
                assert await claim(work) == []
                client.rename(due + ":kept", due)
            for _ in range(100):
                if len(found := await claim(work)) == 5:
                    break
                await asyncio.sleep(0.05)
            assert sorted(found) == sorted(ids_of(2, 5))

    asyncio.run(play())
    assert "shard 2 does not answer" in caplog.text


def test_l2_after_a_shard_that_does_not_answer_all_others_are_asked_at_once(
    url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, ask = list[list[int]](), ShardedWork._ask

    async def noted(work: ShardedWork, parts: Mapping[int, Mapping[Lane, Demand]], *rest: Any) -> None:  # noqa: ANN401
        rounds.append(sorted(parts))
        await ask(work, parts, *rest)

    async def unavailable(*_: object) -> None:
        raise StoreUnavailableError("a shard", "no answer in time")

    async def play() -> None:
        async with opened(url, namespace) as (store, work):
            await put(store, [each for shard in range(SHARDS) for each in ids_of(shard, 50)])
            assert len(await claim(work, SHARDS)) == SHARDS  # now the worker knows that all shards have more
            monkeypatch.setattr(store.shards[1], "run", unavailable)
            monkeypatch.setattr(ShardedWork, "_ask", noted)
            assert len(await claim(work, 100)) == 100
            assert rounds == [[1], [0, 2, 3]]

    asyncio.run(play())


def test_l5_suspects_are_tried_although_another_lane_of_their_shard_has_a_message_soon(
    url: str, namespace: str
) -> None:
    async def play() -> None:
        clock, demand = VirtualClock(), {LANE: Demand(9), "mails": Demand(9)}
        async with (
            ShardedStore(f"{url}?shards={SHARDS}", namespace=namespace, clock=clock) as store,
            store.work("w", list(demand)) as work,
        ):
            suspect, later = ids_of(0, 2)
            await put(store, [suspect])
            for _ in range(SUSPECT_LAPSES):
                assert await claim(work) == [suspect]
                clock.move(LEASE_MS)
            await store.apply([Put(new_op(), Envelope(later, "mails"), After(500))])
            claimed = await work.claim(demand, request=new_id(), lease_ms=LEASE_MS)
            assert [(each.record.id, each.record.lapses) for each in claimed.claims] == [(suspect, SUSPECT_LAPSES)]

    asyncio.run(play())


@pytest.mark.usefixtures("_no_safety_poll")
def test_l2_a_put_of_another_process_ends_a_wait(url: str, namespace: str) -> None:
    async def play() -> None:
        async with opened(url, namespace) as (_, work), ShardedStore(url, namespace=namespace) as other:
            for shard in range(SHARDS):
                work.clear()
                assert await claim(work) == []
                (message_id,) = ids_of(shard, 1)
                async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
                    waiting = tasks.create_task(work.wait(until_ms=None))
                    await asyncio.sleep(0)
                    await put(other, [message_id])
                    await waiting
                assert await claim(work) == [message_id]

    asyncio.run(play())


def test_b1_a_claim_whose_answer_was_lost_is_repeated(
    url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        async with opened(url, namespace) as (store, work):
            await put(store, [each for shard in range(SHARDS) for each in ids_of(shard, 5)])
            run, lost = store.shards[1].run, [True]

            async def loses(script: str, arguments: Any) -> Any:  # noqa: ANN401 - passed on
                answer = await run(script, arguments)
                if script == "claim" and lost:
                    lost.clear()
                    raise StoreUnavailableError("redis", "the answer was lost")
                return answer

            monkeypatch.setattr(store.shards[1], "run", loses)
            assert len(await claim(work)) == 15
            monkeypatch.setattr("aiodelay.backends.redis.sharded.work.AGAIN_MS", 0)
            for _ in range(100):
                if found := await claim(work):
                    break
                await asyncio.sleep(0.02)
            assert sorted(found) == sorted(ids_of(1, 5))

    asyncio.run(play())


# --- what several shards refuse ---------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [Limit(rate="10/s"), Limit("number", concurrency=1)], ids=["whole", "key"])
def test_limits_are_refused_in_words(url: str, namespace: str, limit: Limit) -> None:
    async def play() -> None:
        async with opened(url, namespace):
            pass
        scheduler = Scheduler(url, namespace=namespace)

        @scheduler.handler(limit=limit)
        async def limited(event: Order) -> None:
            raise AssertionError

        with pytest.raises(
            UnsupportedByStoreError, match=r"a limit of lane .* 4 shards.*1 shard \(`aiodelay reshard`\)"
        ):
            await scheduler.__aenter__()

    asyncio.run(play())


@pytest.mark.usefixtures("_no_safety_poll")
def test_lists_are_reached_exactly_once_and_topics_and_logs_at_least_once(url: str, namespace: str) -> None:
    async def play() -> None:
        async with ShardedStore(f"{url}?shards={SHARDS}", namespace=namespace) as store:
            sink = RedisListSink(url)
            assert store.reaches(sink).promise is Promise.EXACTLY_ONCE
            for other in (RedisFanoutSink(url, namespace=namespace), RedisLog(url, namespace=namespace)):
                reach = store.reaches(other)
                assert reach.promise is Promise.AT_LEAST_ONCE
                assert "first of 4 shards" in reach.reason
            await put(store, [f"m{i}" for i in range(50)], sink.name, namespace)
            with store.transferring(sink) as moving:
                moved = [(await moving.transfer(Demand(20))).moved for _ in range(4)]
                assert (sum(moved), max(moved) <= 20) == (50, True)
                assert (await moving.transfer(Demand(20))).next_due_ms is None
                await put(store, ["late"], sink.name, namespace)
                async with asyncio.timeout(PATIENCE_S):
                    await moving.wait(until_ms=None)
                assert (await moving.transfer(Demand(20))).moved == 1
            with Redis.from_url(url) as client:
                assert client.llen(namespace) == 51
            assert dict(await store.lengths([f"{sink.name}:{namespace}"])) == {f"{sink.name}:{namespace}": 51}

    asyncio.run(play())


def test_a_settlement_of_many_shards_answers_in_order(url: str, namespace: str) -> None:
    async def play() -> None:
        async with opened(url, namespace) as (store, work):
            await put(store, [f"m{i}" for i in range(30)])
            claims = (await work.claim({LANE: Demand(30)}, request=new_id(), lease_ms=LEASE_MS)).claims
            ends = [Done(each.record.id, each.record.revision, each.token + (i % 2)) for i, each in enumerate(claims)]
            outcomes = await work.settle(ends)
            assert list(outcomes) == [SettleOutcome.SETTLED, SettleOutcome.GONE] * 15

    asyncio.run(play())

"""`aiodelay reshard` beside running processes: they wait, follow, and keep the claims that they had."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from msgspec.structs import replace
from redis import Redis

from aiodelay import Context, Scheduler
from aiodelay.backends.redis.records.keys import member_of
from aiodelay.backends.redis.records.shards import ShardLayout, shard_of
from aiodelay.backends.redis.sharded import life_signs
from aiodelay.backends.redis.sharded import reshard as resharding
from aiodelay.backends.redis.sharded.following_pulse import FollowingPulse
from aiodelay.backends.redis.sharded.move_client import MoveClient
from aiodelay.backends.redis.sharded.reshard import reshard
from aiodelay.core.ids import new_id, new_op
from aiodelay.core.table_scan import Scan
from aiodelay.core.transitions import token_counter, token_deadline_ms, token_for
from aiodelay.core.values import (
    LEASE_MS,
    After,
    Cancel,
    Claim,
    Conflict,
    Dead,
    Demand,
    Done,
    Envelope,
    JournalEntry,
    LaneLimits,
    Limit,
    Outcome,
    Promise,
    Put,
    Query,
    Refused,
    Renewal,
    RenewOutcome,
    SettleOutcome,
    SourcePosition,
    Stored,
)
from aiodelay.errors import StoreUnavailableError, UnsupportedByStoreError
from aiodelay.ports import Pulsing, Work
from aiodelay.redis import RedisFanout, RedisListSink, RedisStore, ShardedStore
from aiodelay.testing.clock import VirtualClock
from tests.support.servers import Found, redis_servers
from tests.support.slow_stores import let_pulses_stand_still
from tests.support.waiting import PATIENCE_S, until

LANE = "orders"
SHORT_MS = 200
NOW = After(0)


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def url(request: pytest.FixtureRequest, shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(request.param)


@pytest.fixture
def namespace() -> str:
    return uuid4().hex


@pytest.fixture
def _no_safety_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only wake-ups end a wait."""
    monkeypatch.setattr(RedisStore, "traits", replace(RedisStore.traits, safety_poll_ms=10 * 60_000))


@pytest.fixture
def _time_of_pulses_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    let_pulses_stand_still(monkeypatch)


@asynccontextmanager
async def opened(url: str, namespace: str, worker: str = "w") -> AsyncIterator[tuple[ShardedStore, Work]]:
    async with ShardedStore(url, namespace=namespace) as store, store.work(worker, [LANE]) as work:
        yield store, work


async def move(url: str, namespace: str, shards: int) -> None:
    await reshard(url, namespace, shards, lambda _examined, _of: None)


async def stop_midway(
    url: str, namespace: str, shards: int, monkeypatch: pytest.MonkeyPatch, *, began_ms: int = 0
) -> None:
    """Begin a move, and stop it once the messages are frozen.

    Args:
        began_ms: The time at which the move begins, however late this process comes to it; 0 = the present time.
    """

    async def stopped(*_: object) -> int:
        raise KeyboardInterrupt

    async def at_once(*_: object) -> int:
        return began_ms

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        if began_ms:
            patch.setattr(MoveClient, "now_ms", at_once)
        patch.setattr(resharding._Reshard, "_messages", stopped)
        await move(url, namespace, shards)


async def put(store: ShardedStore, ids: Sequence[str], due: After = NOW) -> Sequence[Outcome]:
    return await store.apply([Put(new_op(), Envelope(each, LANE), due) for each in ids])


async def claim(work: Work, lease_ms: int = LEASE_MS) -> Sequence[Claim]:
    return (await work.claim({LANE: Demand(500)}, request=new_id(), lease_ms=lease_ms)).claims


def ends(claims: Sequence[Claim]) -> list[Done]:
    return [Done(each.record.id, each.record.revision, each.token) for each in claims]


def ids_of(claims: Sequence[Claim]) -> list[str]:
    return sorted(each.record.id for each in claims)


def claimed_ms(claims: Sequence[Claim]) -> int:
    """Return the time of a claim with short leases."""
    return min(token_deadline_ms(each.token) for each in claims) - SHORT_MS


async def until_over(store: ShardedStore, claims: Sequence[Claim]) -> None:
    """Wait until the leases of some claims are over by the server's clock."""
    over_ms = max(token_deadline_ms(each.token) for each in claims)
    while True:
        seconds, micros = await store.shards[0].command("TIME")
        if int(seconds) * 1000 + int(micros) // 1000 > over_ms:
            return
        await asyncio.sleep(0.02)


# --- processes follow -------------------------------------------------------------------------------------


def test_s2_s6_open_stores_follow_and_claims_are_settled_with_the_same_tokens(url: str, namespace: str) -> None:
    ids = [f"m{i}" for i in range(40)]

    async def play() -> None:
        async with (
            opened(url, namespace, "a") as (first, one),
            opened(url, namespace, "b") as (second, other),
            ShardedStore(url, namespace=namespace) as third,
            ShardedStore(url, namespace=namespace) as fourth,
        ):
            for shards in (4, 2, 1):
                await put(first, [*ids, "dead"])
                claims = await claim(one)
                assert ids_of(claims) == sorted([*ids, "dead"])
                await move(url, namespace, shards)
                assert await claim(other) == []
                letters = [Dead(each.id, each.revision, each.token, "rejected", 1, "why") for each in ends(claims[:1])]
                assert set(await one.settle([*letters, *ends(claims[1:])])) == {SettleOutcome.SETTLED}
                assert (len(first.shards), len(second.shards)) == (shards, shards)
                assert [each.record.id for each in await third.dead_letters()] == [claims[0].record.id]
                assert await third.purge([(await third.dead_letters())[0].key]) == 1
                assert list(await second.search(Query(limit=10))) == []
                later = [f"later {i}" for i in range(20)]
                assert all(isinstance(each, Stored) for each in await put(fourth, later, After(3_600_000)))
                assert await first.get("later 7") is not None
                cancelled = await first.apply([Cancel(new_op(), each) for each in later])
                assert {each.answer for each in cancelled if isinstance(each, Stored)} == {"cancelled"}

    asyncio.run(play())


def test_a_journal_is_read_from_the_new_shards(url: str, namespace: str) -> None:
    """No script reads it, so no script compares the layout."""

    async def play() -> None:
        async with (
            ShardedStore(f"{url}?journal=100", namespace=namespace) as writer,
            ShardedStore(f"{url}?journal=100", namespace=namespace) as reader,
        ):
            await move(url, namespace, 4)
            await put(writer, ids := [f"m{i}" for i in range(20)])
            assert sorted(each.id for each in await reader.journal()) == sorted(ids)

    asyncio.run(play())


def test_the_journal_of_a_message_has_its_entries_from_before_a_move_in_order(url: str, namespace: str) -> None:
    """The earlier entries stay in the former shards, where they have other numbers."""
    ids = [f"m{i}" for i in range(8)]
    events = ["stored", "claimed", "delivered"]

    async def play() -> None:
        async with opened(f"{url}?journal=100", namespace) as (store, work):
            for moves, shards in enumerate((4, 3), start=1):
                await put(store, ids)
                assert set(await work.settle(ends(await claim(work)))) == {SettleOutcome.SETTLED}
                await move(url, namespace, shards)
                kept = [each for each in ids if shards == 4 or shard_of(each, 4) != 3]  # shard 3 has ended
                for each in kept:
                    whole = await store.journal(message_id=each)
                    assert [entry.event for entry in whole] == events * moves
                    pages, after = list[JournalEntry](), 0
                    while page := await store.journal(message_id=each, after=after, limit=2):
                        pages += page
                        after = page[-1].number
                    assert pages == whole
            assert await store.journal(message_id=ids[0], after=10**9) == []

    asyncio.run(play())


def test_a_scan_of_a_table_does_not_hide_messages_that_have_moved(url: str, namespace: str) -> None:
    async def play() -> None:
        async with ShardedStore(url, namespace=namespace) as store:
            await put(store, [f"m{i}" for i in range(20)])
            scan = Scan(table="messages", columns=("id",))
            parts = store.scan_parts(scan)
            assert sum(len(rows["id"]) for part in parts for rows in store.scan_part(scan, part)) == 20
            await move(url, namespace, 4)
            for part in parts:
                with pytest.raises(StoreUnavailableError, match="read the table again"):
                    list(store.scan_part(scan, part))

    asyncio.run(play())


@pytest.mark.usefixtures("_no_safety_poll")
def test_l2_a_put_of_another_process_ends_a_wait_after_the_move(url: str, namespace: str) -> None:
    async def play() -> None:
        async with opened(url, namespace) as (_, work), ShardedStore(url, namespace=namespace) as other:
            await move(url, namespace, 3)
            work.clear()
            assert await claim(work) == []
            for i in range(6):
                async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
                    waiting = tasks.create_task(work.wait(until_ms=None))
                    await asyncio.sleep(0)
                    await put(other, [f"m{i}"])
                    await waiting
                work.clear()
                assert ids_of(await claim(work)) == [f"m{i}"]

    asyncio.run(play())


def test_commands_under_way_are_carried_out_once(url: str, namespace: str) -> None:
    ids = [f"m{i}" for i in range(300)]

    async def play() -> None:
        async with ShardedStore(url, namespace=namespace) as store:
            puts = [Put(new_op(), Envelope(each, LANE), After(3_600_000)) for each in ids]

            async def schedule() -> list[Outcome]:
                done: list[Outcome] = []
                for each in puts:
                    (outcome,) = await store.apply([each])
                    while not isinstance(outcome, Stored):
                        (outcome,) = await store.apply([each])
                    done.append(outcome)
                return done

            async with asyncio.TaskGroup() as tasks:
                scheduling = tasks.create_task(schedule())
                for shards in (4, 2, 1):
                    await move(url, namespace, shards)
            assert {each.answer for each in scheduling.result() if isinstance(each, Stored)} == {"stored"}
            found = await store.search(Query(limit=1_000))
            assert sorted(each.record.id for each in found) == sorted(ids)

    asyncio.run(play())


@pytest.mark.usefixtures("_no_safety_poll")
def test_a_transfer_into_a_list_follows(url: str, namespace: str) -> None:
    async def play() -> None:
        async with ShardedStore(url, namespace=namespace) as store:
            sink = RedisListSink(url)
            with store.transferring(sink) as moving:
                for shards in (3, 4):
                    await store.apply(
                        [Put(new_op(), Envelope(f"m{i}", sink.name, address=namespace), After(0)) for i in range(30)]
                    )
                    assert (await moving.transfer(Demand(10))).moved == 10
                    await move(url, namespace, shards)
                    assert (await moving.transfer(Demand(100))).moved == 20
                    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
                        waiting = tasks.create_task(moving.wait(until_ms=None))
                        await move(url, namespace, shards - 1)
                        await store.apply([Put(new_op(), Envelope("late", sink.name, address=namespace), After(0))])
                        await waiting
                    assert (await moving.transfer(Demand(10))).moved == 1
            with Redis.from_url(url) as client:
                assert client.llen(namespace) == 2 * 31

    asyncio.run(play())


def test_a_transfer_into_a_topic_becomes_sends(url: str, namespace: str) -> None:
    """Topics are in the first shard. With several shards, the process claims and sends their messages."""

    async def play() -> None:
        async with Scheduler(url, namespace=namespace) as scheduler, RedisFanout(url, namespace=namespace) as fanout:
            await fanout.register("news", "reader")

            async def have_arrived(messages: int) -> bool:
                return (await fanout.consumers("news"))[0].waiting == messages

            for n, shards in enumerate((1, 3, 1), start=1):
                await move(url, namespace, shards)
                for i in range(5):
                    await scheduler.schedule(b"news", to="redis-fanout:news", delay="0s", id=f"{shards} {i}")
                await until(partial(have_arrived, 5 * n), "all messages are in the topic")
            assert scheduler.reaches("redis-fanout").promise is Promise.EXACTLY_ONCE

    asyncio.run(play())


def test_b1_a_handler_runs_across_moves_and_settles_once(url: str, namespace: str) -> None:
    ids = [f"m{i}" for i in range(12)]

    async def play() -> None:
        ran: list[str] = []
        all_run, may_end = asyncio.Event(), asyncio.Event()

        async def handle(_payload: bytes, context: Context) -> None:
            ran.append(context.id)
            if len(ran) == len(ids):
                all_run.set()
            await may_end.wait()

        async with AsyncExitStack() as stack:
            schedulers = [Scheduler(url, namespace=namespace, lanes=[LANE]) for _ in range(2)]
            for each in schedulers:
                each.add_handler(handle, name=LANE, concurrency=10)
                await stack.enter_async_context(each)
            for name in ids:
                await schedulers[0].schedule(b"", to=f"handler:{LANE}", delay="0s", id=name)
            await all_run.wait()
            for shards in (3, 1):
                await move(url, namespace, shards)
                for each in schedulers:
                    assert (await each.counts())[LANE].in_flight == len(ids)
            may_end.set()
            await schedulers[0].run_until_idle()
            assert sorted(ran) == sorted(ids)

    asyncio.run(play())


# --- while a move does not go on --------------------------------------------------------------------------


def test_calls_wait_and_then_say_what_to_do(
    url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        async with opened(url, namespace) as (store, work):
            store.follower.wait_s = 0.5
            await put(store, ["claimed"])
            claims = await claim(work)
            await stop_midway(url, namespace, 4, monkeypatch)
            for call in (
                lambda: claim(work),
                lambda: work.settle(ends(claims)),
                lambda: work.tidy([LANE], limit=10),
                lambda: store.get("claimed"),
                store.counts,
            ):
                with pytest.raises(StoreUnavailableError, match=r"is being moved.*run it again"):
                    await call()
            (outcome,) = await put(store, ["new"])
            assert isinstance(outcome, Refused)
            assert (outcome.reason, "run it again" in outcome.detail) == ("unavailable", True)
            assert (work.status().phase, "is being moved" in work.status().why) == ("loading", True)
            assert caplog.text.count("is being moved") == 1
            await move(url, namespace, 4)
            assert await work.settle(ends(claims)) == [SettleOutcome.SETTLED]
            assert work.status().phase == "ready"
            assert "has 4 shards now; going on" in caplog.text

    asyncio.run(play())


def test_data_that_need_one_shard_end_a_move_that_has_just_begun(
    url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may set a limit after the first look for limits, and before the shards are frozen."""

    async def play() -> None:
        async with opened(url, namespace) as (store, work):
            await put(store, ["m"])
            freeze = resharding._Reshard._freeze

            async def late_limit(self: Any, plan: Any) -> None:  # noqa: ANN401 - passed on
                limits = LaneLimits(whole=Limit(concurrency=1))
                await store.set_limits(LANE, limits, is_declared=False)
                await freeze(self, plan)

            with monkeypatch.context() as patch:
                patch.setattr(resharding._Reshard, "_freeze", late_limit)
                with pytest.raises(UnsupportedByStoreError, match="a limit of a lane"):
                    await move(url, namespace, 3)
            assert ids_of(await claim(work)) == ["m"]
            await store.set_limits(LANE, LaneLimits(), is_declared=False)
            await move(url, namespace, 3)
            assert await store.get("m") is not None

    asyncio.run(play())


def test_s2_a_process_that_has_slept_through_the_move_writes_into_no_shard(url: str, namespace: str) -> None:
    async def play() -> None:
        layout = ShardLayout(4)
        async with ShardedStore(f"{url}?shards=4", namespace=namespace) as store:
            await put(store, ["m"])
            sleepers = [RedisStore(url, namespace=layout.keys(namespace, shard)) for shard in range(4)]
            for each in sleepers:
                await each.__aenter__()
            await move(url, namespace, 2)
            for shard, each in enumerate(sleepers):
                names = (f"n{i}" for i in range(1_000))
                late = next(name for name in names if shard_of(name, 4) == shard)
                (outcome,) = await each.apply([Put(new_op(), Envelope(late, LANE), After(0))])
                assert isinstance(outcome, Refused)
                assert "has 2 shards now" in outcome.detail
                await each.__aexit__()
            assert [each.record.id for each in await store.search(Query(limit=10))] == ["m"]

    asyncio.run(play())


# --- leases and pulses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("former", "later"), [(1, 3), (3, 1)])
def test_s7_leases_that_end_during_a_move_are_spared_after_it(
    url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, former: int, later: int
) -> None:
    ids = [f"m{i}" for i in range(9)]

    async def play() -> None:
        async with (
            opened(f"{url}?shards={former}", namespace, "a") as (store, one),
            opened(url, namespace, "b") as (_, other),
        ):
            await put(store, ids)
            claims = await claim(one, SHORT_MS)
            await stop_midway(url, namespace, later, monkeypatch, began_ms=claimed_ms(claims))
            await until_over(store, claims)
            await move(url, namespace, later)
            claimed = await other.claim({LANE: Demand(10)}, request=new_id(), lease_ms=LEASE_MS)
            assert claimed.claims == []
            assert claimed.next_due_ms is not None
            assert claimed.next_due_ms > claimed.now_ms, "the loop would ask again and again"
            assert (await other.tidy([LANE], limit=100)).lapsed == 0
            renewals = []
            for each in claims:
                to = token_for(store.now_ms() + LEASE_MS, token_counter(each.token))
                renewals.append(Renewal(each.record.id, each.record.revision, each.token, to, False))
            assert await one.renew(renewals[:5]) == [RenewOutcome.RENEWED] * 5
            renewed = [Done(each.id, each.revision, each.to) for each in renewals[:5]]
            assert set(await one.settle([*renewed, *ends(claims[5:])])) == {SettleOutcome.SETTLED}

    asyncio.run(play())


def test_s7_a_move_that_follows_at_once_spares_the_same_leases(
    url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes have had no time to renew the leases that ended during the first move."""
    ids = [f"m{i}" for i in range(9)]

    async def play() -> None:
        async with opened(url, namespace, "a") as (store, one), opened(url, namespace, "b") as (_, other):
            await put(store, ids)
            claims = await claim(one, SHORT_MS)
            await stop_midway(url, namespace, 2, monkeypatch, began_ms=claimed_ms(claims))
            await until_over(store, claims)
            for shards in (2, 3, 1):
                await move(url, namespace, shards)
            assert await claim(other) == []
            assert (await other.tidy([LANE], limit=100)).lapsed == 0
            assert set(await one.settle(ends(claims))) == {SettleOutcome.SETTLED}

    asyncio.run(play())


def test_l1_a_later_move_spares_no_leases_that_the_former_move_spares_no_longer(
    url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life_signs, "SPARED_MS", 0)

    async def play() -> None:
        async with opened(url, namespace, "a") as (store, one), opened(url, namespace, "b") as (_, other):
            await put(store, ["m"])
            claims = await claim(one, SHORT_MS)
            await move(url, namespace, 2)
            await until_over(store, claims)
            monkeypatch.setattr(life_signs, "SPARED_MS", 30_000)
            await move(url, namespace, 3)
            assert ids_of(await claim(other)) == ["m"]

    asyncio.run(play())


def test_l1_spared_leases_end_a_little_later(url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life_signs, "SPARED_MS", 300)

    async def play() -> None:
        async with opened(url, namespace, "a") as (store, one):
            await put(store, ["m"])
            await claim(one, SHORT_MS)
        async with opened(url, namespace, "b") as (store, other):
            await move(url, namespace, 2)
            spared_until_ms = store.now_ms() + life_signs.SPARED_MS
            async with asyncio.timeout(PATIENCE_S):
                while not (claims := await claim(other)):
                    other.clear()
                    await other.wait(until_ms=store.now_ms() + 100)
            assert ids_of(claims) == ["m"]
            await asyncio.sleep((spared_until_ms - store.now_ms()) / 1000 + 0.05)  # the lease may have ended before
            await other.tidy([LANE], limit=10)
            with Redis.from_url(url) as client:
                assert [client.hget(f"{{{namespace}:0{shard}}}:meta", "spared") for shard in range(2)] == [None] * 2

    asyncio.run(play())


@pytest.mark.usefixtures("_time_of_pulses_stands_still")
def test_b2_a_move_ends_all_incarnations(url: str, namespace: str) -> None:
    """A process that follows late must not be declared dead because its former number stands still."""

    async def play() -> None:
        async with opened(url, namespace) as (store, work):
            assert isinstance(work, Pulsing)
            assert work.pulse is not None
            await put(store, [f"m{i}" for i in range(9)])
            await asyncio.to_thread(work.pulse.step, [])
            tokens = [each.token for each in await claim(work)]
            await asyncio.to_thread(work.pulse.step, tokens)
            with Redis.from_url(url) as client:
                assert client.hlen(f"{{{namespace}:00}}:pulses") == 1
                await move(url, namespace, 3)
                assert client.keys(f"{{{namespace}:*:pulses") == client.keys(f"{{{namespace}:*:held:*") == []
            await asyncio.to_thread(work.pulse.leave)

    asyncio.run(play())


@pytest.mark.usefixtures("_time_of_pulses_stands_still")
def test_b1_the_pulse_follows_while_the_event_loop_is_blocked(url: str, namespace: str) -> None:
    """The thread renews leases of a blocked process. Only the thread runs after the move."""

    async def play() -> None:
        async with opened(url, namespace) as (store, work):
            assert isinstance(work, Pulsing)
            pulse = work.pulse
            assert pulse is not None
            await put(store, [f"m{i}" for i in range(9)])
            await asyncio.to_thread(pulse.step, [])
            claims = await claim(work)
            tokens = [each.token for each in claims]
            await move(url, namespace, 3)
            refused = await asyncio.to_thread(pulse.step, tokens)
            assert (refused.is_refused, refused.wait_ms, pulse.may_begin()) == (False, 0, True)
            resumed = await asyncio.to_thread(pulse.step, tokens)
            assert (resumed.is_refused, resumed.has_resumed) == (False, True)
            renewals = [
                Renewal(each.record.id, each.record.revision, each.token, each.token + 4096, False) for each in claims
            ]
            assert await asyncio.to_thread(pulse.renew, renewals) == [RenewOutcome.RENEWED] * 9
            with Redis.from_url(url) as client:
                assert len(client.keys(f"{{{namespace}:*:pulses")) > 1
            await asyncio.to_thread(pulse.leave)

    asyncio.run(play())


@pytest.mark.usefixtures("_time_of_pulses_stands_still")
def test_b2_runs_may_begin_while_a_move_takes_long(url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server refuses the pulse, and everybody else's: nobody can be declared dead."""

    async def play() -> None:
        async with opened(url, namespace) as (store, work):
            assert isinstance(work, Pulsing)
            pulse = work.pulse
            assert isinstance(pulse, FollowingPulse)
            clock = VirtualClock()
            (shard,) = pulse.shards_of(store.follower.present.layout)
            monkeypatch.setattr(shard, "_clock", clock)
            await put(store, ["m"])
            await asyncio.to_thread(pulse.step, [])
            tokens = [each.token for each in await claim(work)]
            await asyncio.to_thread(pulse.step, tokens)
            await stop_midway(url, namespace, 3, monkeypatch)
            for _ in range(5):
                clock.move(2_000)
                assert pulse.may_begin()
                assert not (await asyncio.to_thread(pulse.step, tokens)).is_refused
            clock.move(3_000)
            assert not pulse.may_begin(), "this process has stood still"
            await asyncio.to_thread(pulse.leave)

    asyncio.run(play())


@pytest.mark.usefixtures("_time_of_pulses_stands_still")
def test_b2_a_process_that_may_be_declared_dead_stays_refused(
    url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still before the move, and others may have its messages. The new layout must not let it go on."""

    async def play() -> None:
        async with opened(url, namespace) as (store, work):
            assert isinstance(work, Pulsing)
            pulse = work.pulse
            assert pulse is not None
            await put(store, ["m"])
            await asyncio.to_thread(pulse.step, [])
            tokens = [each.token for each in await claim(work)]
            await asyncio.to_thread(pulse.step, tokens)
            monkeypatch.setattr("aiodelay.core.pulse.may_begin", lambda life, _now_ms: not life.is_registered)
            await move(url, namespace, 3)
            assert await store.get("m") is not None
            assert await claim(work) == []  # The work is in the new shards, and so is the pulse at its next step.
            assert (await asyncio.to_thread(pulse.step, tokens)).is_refused
            pulse.restart()
            assert not (await asyncio.to_thread(pulse.step, tokens)).is_refused
            await asyncio.to_thread(pulse.leave)

    asyncio.run(play())


def test_l5_a_suspect_in_a_trial_is_not_taken_from_its_process(
    url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of the trial must not look as if it were from before a failover."""

    async def play() -> None:
        async with opened(url, namespace, "a") as (store, one), opened(url, namespace, "b") as (_, other):
            await put(store, [suspect_id := next(each for each in "abcdefgh" if shard_of(each, 2) == 1)])
            for _ in range(2):
                claims = await claim(one, SHORT_MS)
                await until_over(store, claims)
            (suspect,) = await claim(one, SHORT_MS)
            assert suspect.record.lapses == 2
            with Redis.from_url(url) as client:
                trials, member = f"{{{namespace}:00}}:trials", member_of(suspect_id)
                kind, _, _, worker = client.hget(trials, member).split(b" ", 3)
                client.hset(trials, member, b" ".join((kind, b"%d" % LEASE_MS, b"1", worker)))
            monkeypatch.setattr(life_signs, "SPARED_MS", 0)
            await until_over(store, [suspect])
            await move(url, namespace, 2)
            assert (await other.tidy([LANE], limit=10)).lapsed == 0
            assert await one.settle(ends([suspect])) == [SettleOutcome.SETTLED]

    asyncio.run(play())


def test_the_stores_of_the_former_shards_are_closed(url: str, namespace: str) -> None:
    """They are closed once nobody uses them."""

    async def play() -> None:
        async with opened(url, namespace) as (store, work):
            former = store.follower.present
            async with former:
                await move(url, namespace, 2)
                await claim(work)
                assert former.over.is_set()
                assert former.shards[0]._opened is not None, "an answer may still be on its way"
            assert former.shards[0]._opened is None

    asyncio.run(play())


# --- intakes ----------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_an_intake_stores_each_message_once_while_the_namespace_moves(url: str, namespace: str) -> None:
    async with ShardedStore(url, namespace=namespace) as store:
        is_last = False

        async def read() -> int:
            at = 0
            while True:
                is_over = is_last
                envelopes = [Envelope(f"m{i}", LANE) for i in range(at, at + 10)]
                puts = [Put(new_op(), each, After(3_600_000), Conflict.error()) for each in envelopes]
                source = SourcePosition("a topic", at, at + 10, tuple(range(at + 1, at + 11)))
                outcomes = await store.apply(puts, source=source)
                assert not any(isinstance(each, Refused) and each.reason == "duplicate" for each in outcomes), "twice"
                if all(isinstance(each, Stored) for each in outcomes):
                    at += 10
                    if is_over:
                        return at
                else:
                    with suppress(StoreUnavailableError):
                        at = await store.position("a topic") or 0

        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(read())
            for shards in (3, 2):
                before = await store.position("a topic") or 0
                await until(partial(has_passed, store, before), "the intake has read more")
                await move(url, namespace, shards)
            is_last = True
        read_to = reader.result()
        assert await store.position("a topic") == read_to
        assert (await store.counts())[LANE].scheduled == read_to


async def has_passed(store: ShardedStore, position: int) -> bool:
    """Say whether the intake has stored a message behind this position."""
    return (await store.position("a topic") or 0) > position

"""Limits on Redis: how many commands they cost, and what mends their queues and counts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.records.keys import member_of
from aiodelay.core.ids import new_op
from aiodelay.core.values import (
    NO_LIMITS,
    After,
    Cancel,
    Claim,
    Demand,
    Done,
    Envelope,
    Limit,
    LimitedKey,
    Put,
    Reschedule,
    lane_limits,
)
from aiodelay.core.version import __version__
from aiodelay.ports import Work
from aiodelay.redis import RedisStore
from aiodelay.testing.clock import VirtualClock
from tests.support.servers import Found, redis_servers

LANE, OTHER, LEASE_MS, HOUR_MS = "work", "other", 15_000, 3_600_000
FEW = 5
"""Commands that a call needs now and then, such as those that forget old answers."""
TWO = lane_limits([Limit("customer", 2)])
Play = Callable[["Stage"], Awaitable[None]]


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def url(request: pytest.FixtureRequest, shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(request.param)


class Counting(RedisStore):
    """Counts its scripts by name, and may stop after some."""

    def __init__(self, url: str, namespace: str, clock: VirtualClock) -> None:
        super().__init__(url, namespace=namespace, clock=clock)
        self.tag, self.scripts = f"{{{namespace}:00}}:", Counter[str]()
        self.most: int | None = None

    async def run(self, script: str, arguments: Sequence[Arg], *, durable: bool = False) -> Any:  # noqa: ANN401 - as in the store
        if self.scripts[script] == self.most:
            raise asyncio.CancelledError
        self.scripts[script] += 1
        return await super().run(script, arguments, durable=durable)


class Stage:
    """An open store with one worker, in virtual time."""

    def __init__(self, store: Counting, work: Work, clock: VirtualClock) -> None:
        self.store, self.work, self.clock, self.requests = store, work, clock, 0

    async def put(self, names: Iterable[str], lane: str = LANE, delay_ms: int = 0, address: str = "") -> None:
        """Store messages. The text before the last letter of a name is its key."""
        envelopes = [Envelope(name, lane, address=address, key=name[:-1].encode()) for name in names]
        await self.store.apply([Put(new_op(), envelope, After(delay_ms)) for envelope in envelopes])

    async def claim(self, messages: int = 500, lane: str = LANE) -> list[Claim]:
        self.requests += 1
        demand = {lane: Demand(messages)}
        return list((await self.work.claim(demand, request=f"{self.requests}", lease_ms=LEASE_MS)).claims)

    async def end(self, claims: Iterable[Claim]) -> None:
        await self.work.settle([Done(each.record.id, each.record.revision, each.token) for each in claims])

    async def drained(self) -> list[str]:
        """Claim and end messages until no message can be claimed. Each claim keeps within two for each key."""
        ids: list[str] = []
        for _ in range(1000):
            claims = await self.claim()
            assert max(Counter(each.record.envelope.key for each in claims).values(), default=0) <= 2
            if not claims and not await self.key("HGET", "limits", "step:1"):
                break
            ids += [each.record.id for each in claims]
            await self.end(claims)
        return ids

    async def agrees(self) -> bool:
        """Return whether the queues and counts of the lane agree with its messages."""
        waiting = await self.key("ZCARD", "due:1"), await self.key("ZCARD", "queues:1")
        in_flight = await self.key("ZCARD", "leased:1"), await self.key("HLEN", "inflight:1")
        counts = (*in_flight, await self.key("ZCARD", "running:1"))
        return waiting[0] == waiting[1] and len(set(counts)) == 1

    async def tidy(self, times: int = 8) -> None:
        for _ in range(times):
            await self.work.tidy([LANE], limit=1000)

    async def key(self, command: str, name: str, *rest: Arg) -> Any:  # noqa: ANN401 - what the command returns
        return await self.store.command(command, self.store.tag + name, *rest)

    @asynccontextmanager
    async def without_knowing(self) -> AsyncIterator[None]:
        """Let the scripts behave as those of a version that knows no limits."""
        limited = await self.key("HGET", "meta", "limited")
        await self.key("HDEL", "meta", "limited")
        yield
        await self.key("HSET", "meta", "limited", limited)

    async def commands_of(self, call: Callable[[], Awaitable[Any]]) -> int:
        """Return how many commands the server runs for a call, without those of the listener for wake-ups."""

        async def count() -> int:
            stats = await self.store.command("INFO", "commandstats")
            text = stats if isinstance(stats, str) else bytes(stats).decode()
            lines = [line for line in text.splitlines() if "calls=" in line and not line.startswith("cmdstat_xread:")]
            return sum(int(line.split("calls=")[1].split(",")[0]) for line in lines)

        before = await count()
        await call()
        return await count() - before


def on_stage(url: str, play: Play) -> None:
    async def run() -> None:
        clock = VirtualClock()
        async with Counting(url, uuid4().hex, clock) as store:
            async with store.work("one", [LANE, OTHER]) as work:
                await play(Stage(store, work, clock))
            store.glance.found_damaged()
            assert await store.vanished() == ""

    asyncio.run(run())


def keys_of(count: int) -> list[str]:
    return [f"k{i}x" for i in range(count)]


def test_more_keys_cost_no_more_commands(url: str) -> None:
    async def play(stage: Stage) -> None:
        await stage.store.set_limits(LANE, TWO, is_declared=False)
        costs = []
        for count in (20, 3_000):
            await stage.put(keys_of(count), delay_ms=HOUR_MS)
            await stage.put([f"full{letter}" for letter in "abcdefgh"])
            running = await stage.claim()
            cost = [await stage.commands_of(lambda: stage.put(["oney", "twoy"]))]
            claims: list[Claim] = []

            async def claim(found: list[Claim] = claims) -> None:
                found += await stage.claim()

            cost.append(await stage.commands_of(claim))
            assert len(claims) == 2
            cost.append(await stage.commands_of(partial(stage.end, claims)))
            costs.append(cost)
            while running:
                await stage.end(running)
                running = await stage.claim()
        few, many = costs
        assert all(more <= less + FEW for less, more in zip(few, many, strict=True)), costs

    on_stage(url, play)


def test_a_lane_without_limits_costs_no_more_beside_a_lane_with_limits(url: str) -> None:
    async def play(stage: Stage) -> None:
        async def round_of() -> None:
            await stage.put(["ax", "bx"], lane=OTHER)
            await stage.end(await stage.claim(lane=OTHER))

        await round_of()
        before = await stage.commands_of(round_of)
        await stage.store.set_limits(LANE, TWO, is_declared=False)
        await stage.put(["ax"])
        await stage.claim()
        await round_of()
        assert await stage.commands_of(round_of) <= before

    on_stage(url, play)


def test_limits_of_a_lane_with_many_messages_are_set_in_steps(url: str) -> None:
    async def play(stage: Stage) -> None:
        names = [f"{key}{letter}" for key in range(400) for letter in "abc"]
        await stage.put(names)
        running = await stage.claim(3)
        await stage.store.set_limits(LANE, TWO, is_declared=False)
        assert stage.store.scripts["set_limits"] >= len(names) / 500
        assert len(await stage.claim()) + 3 <= 2 * 400
        await stage.end(running)

    on_stage(url, play)


def test_a_process_that_ends_while_it_sets_limits_leaves_the_rest_to_others(url: str) -> None:
    async def play(stage: Stage) -> None:
        names = [f"{key}{letter}" for key in range(300) for letter in "abc"]
        await stage.put(names)
        stage.store.most = 3
        with pytest.raises(asyncio.CancelledError):
            await stage.store.set_limits(LANE, TWO, is_declared=False)
        stage.store.most = None
        assert sorted(await stage.drained()) == sorted(names)

    on_stage(url, play)


@pytest.mark.parametrize("damaged", ["running:1", "inflight:1", "queues:1", "turns:1", "superseded:keys"])
def test_tidying_mends_queues_and_counts(url: str, damaged: str) -> None:
    async def play(stage: Stage) -> None:
        await stage.store.set_limits(LANE, TWO, is_declared=False)
        await stage.put(["aa", "ab", "ac", "ba"])
        claims = await stage.claim()
        await stage.put(["aa"])  # The claim on the message before counts too.
        assert len(claims) == 3
        await stage.key("DEL", damaged)
        await stage.tidy()
        assert await stage.claim() == []
        await stage.end(claims)
        found = await stage.claim()
        assert sorted(each.record.id for each in found) == ["aa", "ac"]
        assert await stage.store.limited_keys(LANE) == [LimitedKey(LANE, b"a", 2, 0, "")]

    on_stage(url, play)


def test_messages_of_versions_without_limits_are_found(url: str) -> None:
    async def play(stage: Stage) -> None:
        await stage.store.set_limits(LANE, TWO, is_declared=False)
        await stage.put(["aa", "ab", "ac", "ba", "bb"])
        claims = await stage.claim()
        async with stage.without_knowing():
            await stage.put(["ca", "ad"])
            await stage.store.apply([Reschedule(new_op(), "ac", After(1000))])
            await stage.end(claims[:1])
        await stage.tidy()
        await stage.end(claims[1:])
        assert sorted(await stage.drained()) == ["ad", "ca"]
        stage.clock.move(1000)
        assert await stage.drained() == ["ac"]
        assert await stage.store.limited_keys(LANE) == []

    on_stage(url, play)


def test_a_clock_that_steps_back_keeps_no_due_message_waiting(url: str) -> None:
    async def play(stage: Stage) -> None:
        await stage.store.set_limits(LANE, TWO, is_declared=False)
        await stage.put(["aa", "ab", "ac"])
        stage.clock.move(HOUR_MS)
        claims = await stage.claim()
        await stage.end(claims)
        stage.clock.step(timedelta(milliseconds=-HOUR_MS + 1000))
        assert [each.record.id for each in await stage.claim()] == ["ac"]

    on_stage(url, play)


def test_many_keys_get_new_tickets_in_steps_after_the_clock_has_stepped_back(url: str) -> None:
    async def play(stage: Stage) -> None:
        await stage.store.set_limits(LANE, lane_limits([Limit("customer", 9)]), is_declared=False)
        names = [f"{key}{letter}" for key in range(1_000) for letter in "ab"]
        await stage.put(names)
        stage.clock.move(2 * HOUR_MS)
        first = [each for _ in range(10) for each in await stage.claim(100)]
        stage.clock.step(timedelta(milliseconds=-HOUR_MS))
        await stage.put(["cc"], delay_ms=1)
        assert [each.record.id for each in first] == names[::2]
        rest = [each for _ in range(8) for each in await stage.claim(500)]
        assert sorted(each.record.id for each in rest) == sorted(names[1::2])
        stage.clock.move(1)
        assert [each.record.id for each in await stage.claim()] == ["cc"]
        assert await stage.key("HGET", "limits", "step:1") is None

    on_stage(url, play)


def test_claims_note_their_time_twice_a_second_at_most(url: str) -> None:
    async def play(stage: Stage) -> None:
        await stage.store.set_limits(LANE, TWO, is_declared=False)
        await stage.put(keys_of(9))
        begun, noted = stage.clock.now_ms(), []
        for _ in range(9):
            await stage.end(await stage.claim(1))
            noted.append(int(await stage.key("HGET", "limits", "claimed:1")) - begun)
            stage.clock.move(200)
        assert noted == [0, 0, 0, 600, 600, 600, 1200, 1200, 1200]

    on_stage(url, play)


def test_limits_that_end_leave_no_keys(url: str) -> None:
    async def play(stage: Stage) -> None:
        rate = lane_limits([Limit("customer", 2, "5/min"), Limit(rate="50/min")])
        await stage.store.set_limits(LANE, rate, is_declared=False)
        await stage.put(["aa", "ab", "ac"])
        claims = await stage.claim()
        await stage.put(["aa"])
        await stage.store.set_limits(LANE, NO_LIMITS, is_declared=False)
        tag = stage.store.tag
        left = {bytes(key).decode().removeprefix(tag) for key in await stage.store.command("KEYS", f"{tag}*")}
        assert not left & {"queues:1", "turns:1", "inflight:1", "running:1", "marks:1", "superseded:keys"}
        assert sorted(each.record.id for each in await stage.claim()) == ["aa", "ac"]
        await stage.end(claims)

    on_stage(url, play)


def test_marks_that_count_nothing_are_forgotten(url: str) -> None:
    async def play(stage: Stage) -> None:
        await stage.store.set_limits(LANE, lane_limits([Limit("customer", rate="5/s")]), is_declared=False)
        await stage.put(keys_of(150))
        await stage.end(await stage.claim())
        assert await stage.key("HLEN", "marks:1") == 150
        stage.clock.move(2000)
        await stage.tidy(1)
        assert await stage.key("HLEN", "marks:1") == 0

    on_stage(url, play)


def test_a_lane_whose_limits_older_versions_wrote_as_an_array_has_none(url: str) -> None:
    async def play(stage: Stage) -> None:
        await stage.put(["aa", "ab", "ac"])
        await stage.key("HSET", "limits", 1, b"\x90")
        assert await stage.store.limits() == {}
        await stage.store.set_limits(LANE, TWO, is_declared=False)
        assert await stage.store.limits() == {LANE: TWO}
        assert len(await stage.claim()) == 2

    on_stage(url, play)


@pytest.mark.parametrize("limit", [Limit("customer", 1), Limit(concurrency=1)], ids=["of a key", "of the lane"])
def test_room_that_messages_wait_for_is_told_to_all(url: str, monkeypatch: pytest.MonkeyPatch, limit: Limit) -> None:
    async def play(stage: Stage) -> None:
        woken: list[None] = []
        monkeypatch.setattr(stage.store.waiters, "wake", lambda: woken.append(None))
        await stage.store.set_limits(LANE, lane_limits([limit]), is_declared=False)
        await stage.put(["aa", "ab"])

        async def settled() -> tuple[bool, bool, bool]:
            """Claim and settle a message. Return whether this process, others and idle processes look again."""
            claims = await stage.claim()
            woken.clear()
            hint = await stage.key("XREVRANGE", "wake", "+", "-", "COUNT", 1)
            marks = list((await stage.store.glance.look())[1])
            await stage.end(claims)
            hint_now = await stage.key("XREVRANGE", "wake", "+", "-", "COUNT", 1)
            return bool(woken), hint_now != hint, list((await stage.store.glance.look())[1]) != marks

        first, second = await settled(), await settled()
        assert first == (True, True, True)
        assert second == (False, False, False), "no message waits any more"

    on_stage(url, play)


def test_the_limit_of_a_lane_holds_for_all_keys_of_one_claim(url: str) -> None:
    async def play(stage: Stage) -> None:
        await stage.store.set_limits(LANE, lane_limits([Limit(concurrency=3), Limit("customer", 2)]), is_declared=False)
        await stage.put(["aa", "ab", "ba", "bb"])
        assert [each.record.id for each in await stage.claim()] == ["aa", "ba", "ab"]

    on_stage(url, play)


def test_the_first_limits_switch_their_feature_on(url: str) -> None:
    async def play(stage: Stage) -> None:
        await stage.store.set_limits(LANE, NO_LIMITS, is_declared=True)
        assert await stage.store.features() == {}
        await stage.store.set_limits(LANE, TWO, is_declared=True)
        assert await stage.store.features() == {"limits": __version__}

    on_stage(url, play)


def test_nothing_is_claimed_before_all_messages_in_flight_are_counted(url: str) -> None:
    async def play(stage: Stage) -> None:
        await stage.put(["aa", "ab", "ac", "ad"])
        claims = await stage.claim(2)
        stage.store.most = 1
        with pytest.raises(asyncio.CancelledError):
            await stage.store.set_limits(LANE, TWO, is_declared=False)
        stage.store.most = None
        await stage.put(["ae"])
        assert [await stage.claim() for _ in range(10)] == [[]] * 10
        await stage.end(claims)
        assert len(await stage.claim()) == 2

    on_stage(url, play)


def test_a_message_that_is_replaced_before_it_is_counted_counts_under_its_own_key(url: str) -> None:
    async def play(stage: Stage) -> None:
        await stage.put(["aa"])
        claims = await stage.claim()
        stage.store.most = 1
        with pytest.raises(asyncio.CancelledError):
            await stage.store.set_limits(LANE, lane_limits([Limit("customer", 1)]), is_declared=False)
        stage.store.most = None
        await stage.store.apply([Put(new_op(), Envelope("aa", LANE, key=b"b"), After(HOUR_MS))])
        await stage.put(["ab", "ba"])
        assert sorted([each.record.id for _ in range(10) for each in await stage.claim()]) == ["ba"]
        await stage.end(claims)
        assert [each.record.id for each in await stage.claim()] == ["ab"]
        await stage.tidy(1)
        assert await stage.store.limited_keys(LANE) == [
            LimitedKey(LANE, b"a", 1, 0, ""),
            LimitedKey(LANE, b"b", 1, 0, ""),
        ]

    on_stage(url, play)


@pytest.mark.parametrize("written", [b"", b"a", b"customer"])
def test_a_replaced_message_that_an_older_version_counted_holds_up_nothing(url: str, written: bytes) -> None:
    async def play(stage: Stage) -> None:
        await stage.store.set_limits(LANE, lane_limits([Limit("customer", 1)]), is_declared=False)
        await stage.put(["aa"])
        claims = await stage.claim()
        await stage.put(["aa"])
        [name] = await stage.key("HKEYS", "superseded:keys")
        await stage.key("HSET", "superseded:keys", name, b"\0\1" + written)
        await stage.end(claims)
        await stage.tidy()
        assert [each.record.id for each in await stage.claim()] == ["aa"]

    on_stage(url, play)


@pytest.mark.parametrize("has_crashed", [False, True])
def test_messages_of_a_paused_address_leave_the_queues_and_return(url: str, has_crashed: bool) -> None:
    async def play(stage: Stage) -> None:
        await stage.store.set_limits(LANE, TWO, is_declared=False)
        await stage.put(["aa", "ab", "ac"], address="x")
        await stage.store.pause(LANE, "x")
        await stage.tidy(1)
        assert await stage.agrees()
        assert await stage.claim() == []
        if has_crashed:
            await stage.key("SREM", "holds", "1:x")
            await stage.key("HSET", "meta", "holds", 0)
            await stage.tidy(1)
        else:
            await stage.store.resume(LANE, "x")
        assert await stage.agrees()
        assert len(await stage.claim()) == 2

    on_stage(url, play)


def test_a_claim_whose_message_is_gone_gives_its_room_back(url: str) -> None:
    async def play(stage: Stage) -> None:
        await stage.store.set_limits(LANE, lane_limits([Limit("customer", 1)]), is_declared=False)
        await stage.put(["aa", "ab"])
        await stage.claim()
        await stage.key("HDEL", "msg", member_of("aa"))
        stage.clock.move(LEASE_MS)
        assert [each.record.id for each in await stage.claim()] == ["ab"]

    on_stage(url, play)


def test_a_claim_removes_what_older_versions_have_left_in_a_queue(url: str) -> None:
    async def play(stage: Stage) -> None:
        await stage.store.set_limits(LANE, TWO, is_declared=False)
        await stage.put(["aa", "ab"])
        async with stage.without_knowing():
            await stage.store.apply([Cancel(new_op(), "aa")])
        assert [each.record.id for each in await stage.claim()] == ["ab"]
        assert await stage.agrees()

    on_stage(url, play)


def test_a_message_that_has_to_wait_wakes_nobody(url: str) -> None:
    async def play(stage: Stage) -> None:
        await stage.store.set_limits(LANE, lane_limits([Limit("customer", 1)]), is_declared=False)
        await stage.put(["aa"])
        await stage.claim()
        hint = await stage.key("XREVRANGE", "wake", "+", "-", "COUNT", 1)
        await stage.put(["ab"])
        assert await stage.key("XREVRANGE", "wake", "+", "-", "COUNT", 1) == hint
        await stage.put(["ba"])
        assert await stage.key("XREVRANGE", "wake", "+", "-", "COUNT", 1) != hint

    on_stage(url, play)

"""B1, B2, L5 on Redis: which claims return when a process is declared dead, and what that process may still do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest
from redis.asyncio import Connection

from aiodelay.backends.redis.store.work import RedisWork
from aiodelay.core import pulse
from aiodelay.core.ids import new_id, new_op
from aiodelay.core.transitions import token_counter, token_for
from aiodelay.core.values import After, Claim, Demand, Done, Envelope, Put, Renewal, RenewOutcome, SettleOutcome
from aiodelay.engine.delivery.settling import without_running
from aiodelay.redis import RedisStore
from tests.support.servers import Found, redis_servers
from tests.support.slow_stores import let_pulses_stand_still

LANE = "work"
LEASE_MS = 15_000
SHORT_MS = 1_000
AT_ONCE = 60


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def url(request: pytest.FixtureRequest, shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(request.param)


@pytest.fixture(autouse=True)
def _time_of_pulses_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    let_pulses_stand_still(monkeypatch)


class Stage:
    """A store with one worker, whose thread the test plays."""

    def __init__(self, store: RedisStore, work: RedisWork) -> None:
        self.store, self.work = store, work

    async def step(self, *tokens: int) -> bool:
        """Take a step of the worker's pulse. Return whether its incarnation was refused."""
        return (await asyncio.to_thread(self.work.pulse.step, tokens)).is_refused

    async def put(self, n: int) -> None:
        await self.store.apply([Put(new_op(), Envelope(f"m{i}", LANE), After(0)) for i in range(n)])

    async def claim(self, n: int = 500) -> Sequence[Claim]:
        return (await self.work.claim({LANE: Demand(n)}, request=new_id(), lease_ms=LEASE_MS)).claims

    async def renew(self, claim: Claim) -> tuple[RenewOutcome, int]:
        record, to = claim.record, token_for(self.store.now_ms() + LEASE_MS, token_counter(claim.token))
        [outcome] = await self.work.renew([Renewal(record.id, record.revision, claim.token, to, False)])
        return outcome, to

    async def settle(self, claim: Claim) -> SettleOutcome:
        [outcome] = await self.work.settle([Done(claim.record.id, claim.record.revision, claim.token)])
        return outcome

    async def numbers(self) -> dict[str, int]:
        found = await self.store.command("HGETALL", self.store._keys.key("pulses"))
        return {name.decode(): int(number) for name, number in zip(found[::2], found[1::2], strict=True)}

    async def bury(self) -> int:
        """Declare the only incarnation dead. Return how many messages the store has returned."""
        [(name, number)] = (await self.numbers()).items()
        returned, is_left = 0, 1
        while is_left:
            count, is_left = await self.store.run("bury", [name, number, AT_ONCE])
            returned += count
        return returned


@asynccontextmanager
async def stage(url: str) -> AsyncIterator[Stage]:
    patient = f"{url}{'&' if '?' in url else '?'}timeout_ms=60000"
    async with RedisStore(patient, namespace=f"pulse-{uuid4().hex}") as store, store.work("w", [LANE]) as work:
        assert isinstance(work, RedisWork)
        there = Stage(store, work)
        try:
            await there.step()
            yield there
        finally:
            await asyncio.to_thread(work.pulse.leave)


def test_b2_the_claims_of_a_dead_process_return_as_lapsed_and_it_may_do_nothing_with_them(url: str) -> None:
    async def play() -> None:
        async with stage(url) as there:
            await there.put(130)
            claims = [*await there.claim(100), *await there.claim()]
            assert not await there.step(*(each.token for each in claims))
            assert await there.bury() == 130
            assert await there.numbers() == {}
            outcome, _ = await there.renew(claims[0])
            assert outcome is RenewOutcome.LOST
            assert await there.settle(claims[1]) is SettleOutcome.GONE
            assert await there.claim() == [], "the incarnation is over"
            assert not there.work.pulse.may_begin(), "the claim's answer said so"
            there.work.pulse.restart()
            again = await there.claim()
            assert len(again) == 130
            assert {each.record.lapses for each in again} == {1}

    asyncio.run(play())


def test_b2_renewed_claims_return_too_and_settled_claims_do_not(url: str) -> None:
    async def play() -> None:
        async with stage(url) as there:
            await there.put(3)
            first, second, third = await there.claim()
            outcome, to = await there.renew(first)
            assert outcome is RenewOutcome.RENEWED
            assert await there.settle(second) is SettleOutcome.SETTLED
            assert not await there.step(to, third.token)
            assert await there.bury() == 2

    asyncio.run(play())


def test_l1_a_thread_renews_leases_and_ends_claims_with_the_connection_of_the_pulse(url: str) -> None:
    async def play() -> None:
        async with stage(url) as there:
            await there.put(200)
            claims = await there.claim()
            ends_ms = there.store.now_ms() + 2 * LEASE_MS
            renewals = [
                Renewal(each.record.id, each.record.revision, each.token, token_for(ends_ms, token_counter(each.token)))
                for each in claims
            ]
            for _ in range(2):  # a repetition answers the same
                outcomes = await asyncio.to_thread(there.work.pulse.renew, renewals)
                assert outcomes == [RenewOutcome.RENEWED] * 200
            old = [Done(each.id, each.revision, each.token) for each in renewals]
            assert set(await asyncio.to_thread(there.work.pulse.settle, old)) == {SettleOutcome.GONE}
            done = [Done(each.id, each.revision, each.to) for each in renewals[:150]]
            assert set(await asyncio.to_thread(there.work.pulse.settle, done)) == {SettleOutcome.SETTLED}
            assert set(await asyncio.to_thread(there.work.pulse.settle, done)) == {SettleOutcome.GONE}
            assert not await there.step(renewals[-1].to)
            assert await there.bury() == 50, "the store has recorded the renewed claims under the incarnation"

    asyncio.run(play())


def test_s7_a_claim_whose_answer_waited_for_a_blocked_loop_is_over_by_the_time_of_its_process(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Connection.send_packed_command

    async def send_and_block(connection: Connection, command: Sequence[bytes], *, check_health: bool) -> None:
        await send(connection, command, check_health=check_health)
        time.sleep(2 * SHORT_MS / 1000)  # noqa: ASYNC251 - the fault

    async def play() -> None:
        async with stage(url) as there:
            await there.put(1)
            with monkeypatch.context() as blocked:
                blocked.setattr(Connection, "send_packed_command", send_and_block)
                [claim] = (await there.work.claim({LANE: Demand(1)}, request=new_id(), lease_ms=SHORT_MS)).claims
            settlement = without_running(claim.record, claim.token, there.store.now_ms())
            assert settlement is not None, "no run begins"

    asyncio.run(play())


def test_b1_a_process_is_not_declared_dead_once_its_number_has_changed(url: str) -> None:
    async def play() -> None:
        async with stage(url) as there:
            await there.put(1)
            [claim] = await there.claim()
            [(name, number)] = (await there.numbers()).items()
            assert not await there.step(claim.token)
            assert await there.store.run("bury", [name, number, AT_ONCE]) == [0, 0]
            assert await there.settle(claim) is SettleOutcome.SETTLED

    asyncio.run(play())


def test_l5_only_the_rules_of_trials_judge_a_suspect_in_a_trial(url: str) -> None:
    async def play() -> None:
        async with stage(url) as there:
            await there.put(1)
            for lapses in range(2):
                [claim] = await there.claim()
                assert claim.record.lapses == lapses
                assert await there.bury() == 1
                assert await there.step(claim.token)
                there.work.pulse.restart()
            [suspect] = await there.claim()
            assert suspect.record.lapses == 2
            assert await there.bury() == 0
            assert await there.settle(suspect) is SettleOutcome.SETTLED

    asyncio.run(play())


def test_b1_a_token_that_two_processes_hold_in_a_lane_returns_nothing(url: str) -> None:
    async def play() -> None:
        async with stage(url) as there:
            await there.put(1)
            [claim] = await there.claim()
            keys = there.store._keys
            [(name, number)] = (await there.numbers()).items()
            await there.store.command("HSET", keys.key("pulses"), "other", number)
            [mark] = await there.store.command("ZRANGE", keys.key(f"held:{name}"), 0, -1)
            await there.store.command("ZADD", keys.key("held:other"), claim.token, mark)
            assert await there.store.run("bury", [name, number, AT_ONCE]) == [0, 0]
            assert await there.settle(claim) is SettleOutcome.SETTLED

    asyncio.run(play())


def test_b1_a_number_that_was_written_again_revives_no_incarnation(url: str) -> None:
    async def play() -> None:
        async with stage(url) as there:
            await there.put(1)
            [claim] = await there.claim()
            assert not await there.step(claim.token)
            [(name, number)] = (await there.numbers()).items()
            later = number + pulse.DEATH_MS  # a new number is the time
            await there.store.command("HSET", there.store._keys.key("pulses"), name, later)
            assert await there.step(claim.token)

    asyncio.run(play())


def test_l1_the_claims_of_a_worker_without_a_thread_end_by_their_leases(url: str) -> None:
    async def play() -> None:
        namespace = f"pulse-{uuid4().hex}"
        async with RedisStore(url, namespace=namespace) as store, store.work("w", [LANE]) as work:
            assert isinstance(work, RedisWork)
            there = Stage(store, work)
            await there.put(1)
            [claim] = await there.claim()
            assert await there.numbers() == {}
            assert work.pulse.may_begin()
            assert await there.settle(claim) is SettleOutcome.SETTLED

    asyncio.run(play())


def test_b2_a_worker_that_holds_nothing_has_no_number(url: str) -> None:
    async def play() -> None:
        async with stage(url) as there:
            await there.put(1)
            [claim] = await there.claim()
            assert await there.settle(claim) is SettleOutcome.SETTLED
            assert len(await there.numbers()) == 1
            for _ in range(2):
                assert not await there.step()
            assert await there.numbers() == {}
            held = await there.store.command("KEYS", there.store._keys.key("held:*"))
            assert held == []

    asyncio.run(play())


def test_b2_a_process_asks_nothing_while_nobody_holds_claims_and_its_first_claim_has_a_pulse(url: str) -> None:
    async def play() -> None:
        async with stage(url) as there:
            await there.put(1)
            step = await asyncio.to_thread(there.work.pulse.step, ())
            assert step.wait_ms == pulse.QUIET_MS
            waiting = asyncio.create_task(asyncio.to_thread(there.work.pulse.wait, pulse.QUIET_MS))
            [claim] = await there.claim()
            async with asyncio.timeout(pulse.QUIET_MS / 2000):
                await waiting
            assert len(await there.numbers()) == 1
            step = await asyncio.to_thread(there.work.pulse.step, (claim.token,))
            assert step.wait_ms <= pulse.PULSE_MS
            assert not step.has_resumed, "the claim has named the incarnation"

    asyncio.run(play())


def test_b2_a_process_that_holds_nothing_watches_the_others(url: str) -> None:
    async def play() -> None:
        async with stage(url) as there, there.store.work("other", [LANE]) as other:
            assert isinstance(other, RedisWork)
            await there.put(1)
            await there.claim()
            assert (await asyncio.to_thread(other.pulse.step, ())).wait_ms <= pulse.PULSE_MS
            await asyncio.to_thread(other.pulse.leave)

    asyncio.run(play())

"""L5: suspects taken from lists, topics and logs, on a clock that the test moves.

The rules are those of a store: `aiodelay.testing.conformance.trials` has them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import wraps
from itertools import count
from uuid import uuid4

import pytest
from msgspec.structs import replace

from aiodelay.backends.redis.lists.list_consumer import ListConsumer
from aiodelay.core.transitions import KILLS_TO_DEATH, SILENT_LEASES, SUSPECT_LAPSES, TRIAL_MS, token_counter, token_for
from aiodelay.core.values import (
    LEASE_MS,
    MAX_LAPSES,
    Again,
    Claim,
    Claimed,
    Delivery,
    Demand,
    Done,
    Envelope,
    Renewal,
    RenewOutcome,
    Sent,
    SettleOutcome,
)
from aiodelay.memory import MemoryStore
from aiodelay.ports import Sink, Source
from aiodelay.redis import RedisFanoutSink, RedisFanoutSource, RedisListSink, RedisListSource, RedisLog, RedisStore
from tests.support.servers import Found, redis_servers

LANE = "work"
KINDS = ("list", "fan-out", "fan-out of references", "log")
requests = count(1)


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def server_url(request: pytest.FixtureRequest, shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(request.param)


class Scene:
    """A list, or a consumer of a topic or a log, and processes that take from it."""

    def __init__(self, url: str, kind: str, opened: AsyncExitStack) -> None:
        self._url, self._kind, self._opened = url, kind, opened
        self.name = f"orders-{uuid4().hex}"
        self.namespace = uuid4().hex
        self.letters = MemoryStore()
        self.direct = RedisStore(url, namespace=self.namespace)
        self.now = 1_893_456_000_000
        self._feeds: list[ListConsumer] = []

    async def open(self) -> None:
        self.source: Source
        self.sink: Sink
        if self._kind == "list":
            self.source, self.sink = RedisListSource(self._url), RedisListSink(self._url)
            self.to, self.address = self.name, self.name
        elif self._kind == "log":
            self.source, self.sink = (RedisLog(self._url, namespace=self.namespace) for _ in range(2))
            self.to, self.address = self.name, f"{self.name}?consumer=billing"
        else:
            inline_below = 0 if "references" in self._kind else 500
            self.source = RedisFanoutSource(self._url, namespace=self.namespace)
            self.sink = RedisFanoutSink(self._url, namespace=self.namespace, inline_below=inline_below)
            self.to, self.address = self.name, f"{self.name}?consumer=billing"
        for each in (self.letters, self.direct, self.source, self.sink):
            await self._opened.enter_async_context(each)

    async def process(self, *, options: str = "") -> ListConsumer:
        """Start a process; with the first one, the consumer of a topic is registered."""
        opening = self.source.feed(f"{self.address}{options}", uuid4().hex, self.letters.put_back, self.letters.now_ms)
        feed = await self._opened.enter_async_context(opening)
        assert isinstance(feed, ListConsumer)
        feed._server_ms = self.now
        self._feeds.append(feed)
        await taken(feed, 0)
        return feed

    def move(self, ms: int) -> None:
        self.now += ms
        for feed in self._feeds:
            feed._server_ms = self.now

    async def send(self, *ids: str) -> None:
        envelopes = [Envelope(each, self.sink.name, self.to, payload=b"payload") for each in ids]
        deliveries = [Delivery(each, f"{each.id}/5/1000", 1000, 5, 1, 0) for each in envelopes]
        assert list(await self.sink.send(deliveries)) == [Sent()] * len(ids)

    async def die(self, *, max_lapses: int = MAX_LAPSES) -> list[Claim]:
        """Take all that there is in a process that ends at once, and let its lease end."""
        claims = await take(await self.process(), max_lapses=max_lapses)
        self.move(LEASE_MS)
        return claims

    async def die_alone(self) -> Claim:
        """Take one suspect in a process that ends at once, and let it be silent for long enough."""
        (claim,) = await self.die()
        self.move((SILENT_LEASES - 1) * LEASE_MS)
        return claim

    async def make_suspects(self, *ids: str) -> None:
        await self.process()
        await self.send(*ids)
        for _ in range(SUSPECT_LAPSES):
            assert ids_of(await self.die(max_lapses=SUSPECT_LAPSES - 1)) == list(ids)

    async def keys(self) -> list[bytes]:
        found: list[bytes] = await self.direct.command("KEYS", f"*{self.name}*trials*")
        return found


async def taken(feed: ListConsumer, messages: int = 500, *, max_lapses: int = MAX_LAPSES) -> Claimed:
    demand = {LANE: Demand(messages, max_lapses=max_lapses)}
    return await feed.claim(demand, request=f"r{next(requests)}", lease_ms=LEASE_MS)


async def take(feed: ListConsumer, messages: int = 500, *, max_lapses: int = MAX_LAPSES) -> list[Claim]:
    return list((await taken(feed, messages, max_lapses=max_lapses)).claims)


def ids_of(claims: Sequence[Claim]) -> list[str]:
    return [each.record.id for each in claims]


async def end(feed: ListConsumer, claims: Sequence[Claim]) -> None:
    ends = [Done(each.record.id, each.record.revision, each.token) for each in claims]
    assert list(await feed.settle(ends)) == [SettleOutcome.SETTLED] * len(claims)


async def give_back(feed: ListConsumer, claims: Sequence[Claim]) -> None:
    records = [(each.record, each.token) for each in claims]
    releases = [Again(each.id, each.revision, token, each.due_ms, each.attempt) for each, token in records]
    assert list(await feed.settle(releases)) == [SettleOutcome.SETTLED] * len(claims)


async def renew(feed: ListConsumer, claim: Claim, *, ends_trial: bool = False) -> RenewOutcome:
    to = token_for(feed._now_ms() + LEASE_MS, token_counter(claim.token))
    renewal = Renewal(claim.record.id, claim.record.revision, claim.token, to, ends_trial)
    (outcome,) = await feed.renew([renewal])
    return outcome


def on_each(test: Callable[[Scene], Awaitable[None]]) -> Callable[[str, str], None]:
    @pytest.mark.parametrize("kind", KINDS)
    @wraps(test)
    def run(server_url: str, kind: str) -> None:
        async def play() -> None:
            async with AsyncExitStack() as opened:
                scene = Scene(server_url, kind, opened)
                await scene.open()
                await test(scene)

        asyncio.run(play())

    del run.__wrapped__  # so that pytest fills in what `run` takes
    return run


# --- groups -----------------------------------------------------------------------------------------------


@on_each
async def test_l5_suspects_are_tried_together_and_without_others(scene: Scene) -> None:
    await scene.make_suspects("m0", "m1", "m2")
    await scene.send("new")
    feed = await scene.process()
    tried = await take(feed)
    assert ids_of(tried) == ["m0", "m1", "m2"]
    assert [(each.record.alone, each.record.lapses) for each in tried] == [(False, SUSPECT_LAPSES)] * 3
    new = await take(feed, max_lapses=0)
    assert ids_of(new) == ["new"]
    await end(feed, [*tried, *new])
    assert await scene.keys() == []


@on_each
async def test_l5_what_stands_behind_suspects_is_taken_past_them_in_order(scene: Scene) -> None:
    await scene.make_suspects(*[f"m{i:02}" for i in range(24)])
    await scene.send(*[f"new{i}" for i in range(9)])
    trying, other = await scene.process(), await scene.process()
    assert len(await take(trying, 8)) == 8
    assert ids_of(await take(trying, 3, max_lapses=0)) == ["new0", "new1", "new2"]
    assert ids_of(await take(other, 3)) == ["new3", "new4", "new5"]
    await scene.send("newest")
    assert ids_of(await take(trying, max_lapses=0)) == ["new6", "new7", "new8", "newest"]
    left = await taken(trying, max_lapses=0)
    assert (list(left.claims), (left.next_due_ms or 0) - left.now_ms) == ([], TRIAL_MS)


@on_each
async def test_l5_500_suspects_keep_nobody_waiting_behind_them(scene: Scene) -> None:
    await scene.make_suspects(*[f"m{i:03}" for i in range(500)])
    await scene.send("new")
    feed = await scene.process()
    tried = await take(feed)
    assert ids_of(tried) == [f"m{i:03}" for i in range(500)]
    assert ids_of(await take(feed, max_lapses=0)) == ["new"]
    scene.move(LEASE_MS)
    other = await scene.process()
    await scene.send("newer")
    assert len(await take(other)) == 250
    assert ids_of(await take(await scene.process(), 1)) == ["new"]
    assert ids_of(await take(other, 1, max_lapses=0)) == ["newer"]


@on_each
async def test_l5_one_group_of_suspects_is_tried_at_a_time(scene: Scene) -> None:
    await scene.make_suspects(*[f"m{i}" for i in range(5)])
    trying, other = await scene.process(), await scene.process()
    first, second = await take(trying, 2)
    assert await take(other) == []
    await end(trying, [first])
    assert await renew(trying, second) is RenewOutcome.RENEWED
    assert await take(other) == []
    assert await renew(trying, second, ends_trial=True) is RenewOutcome.RENEWED
    assert ids_of(await take(other)) == ["m2", "m3", "m4"]


@on_each
async def test_l5_suspects_that_were_given_back_are_tried_again(scene: Scene) -> None:
    await scene.make_suspects("m0", "m1")
    feed = await scene.process()
    for _ in range(2):
        claims = await take(feed)
        assert [(each.record.id, each.record.alone) for each in claims] == [("m0", False), ("m1", False)]
        await give_back(feed, claims)
    (alone,) = await take(feed, 1)
    assert alone.record.alone
    await give_back(feed, [alone])
    assert [each.record.alone for each in await take(await scene.process())] == [False] * 2


@on_each
async def test_l5_half_of_a_group_that_ended_its_process_is_tried_next(scene: Scene) -> None:
    await scene.make_suspects(*[f"m{i}" for i in range(7)])
    groups = [await scene.die() for _ in range(3)] + [[await scene.die_alone()] for _ in range(2)]
    assert [ids_of(group) for group in groups] == [[f"m{i}" for i in range(n)] for n in (7, 4, 2, 1, 1)]
    assert {each.record.lapses for group in groups for each in group} == {SUSPECT_LAPSES}
    feed = await scene.process()
    for group in (["m0"], ["m1"], [f"m{i}" for i in range(2, 7)]):  # the first is known, the others are not
        claims = await take(feed)
        assert ids_of(claims) == group
        await end(feed, claims)


@on_each
async def test_l5_the_other_half_of_a_group_holds_the_killer(scene: Scene) -> None:
    await scene.make_suspects(*[f"m{i}" for i in range(8)])
    assert len(await scene.die()) == 8
    feed = await scene.process()
    for group in (["m0", "m1", "m2", "m3"], ["m4", "m5"], ["m6"], ["m7"]):
        claims = await take(feed)
        assert ids_of(claims) == group
        await end(feed, claims)
    assert await scene.keys() == []


@on_each
async def test_l5_a_claim_takes_what_has_lapsed_no_more_often_than_it_asks_for(scene: Scene) -> None:
    await scene.make_suspects("suspect")
    await scene.send("lapsed")
    assert ids_of(await scene.die(max_lapses=1)) == ["lapsed"]
    await scene.send("fresh")
    feed = await scene.process()
    for max_lapses, wanted in enumerate((["fresh"], ["lapsed"], ["suspect"])):
        assert ids_of(await take(feed, max_lapses=max_lapses)) == wanted


# --- one alone --------------------------------------------------------------------------------------------


@on_each
async def test_l5_a_lapse_after_a_trial_is_one_more_and_no_kill(scene: Scene) -> None:
    await scene.make_suspects("m")
    for lapses in range(SUSPECT_LAPSES, 6):
        feed = await scene.process()
        (claim,) = await take(feed)
        assert (claim.record.lapses, claim.record.kills, claim.record.alone) == (lapses, 0, True)
        assert await renew(feed, claim, ends_trial=True) is RenewOutcome.RENEWED
        scene.move(LEASE_MS)


@on_each
async def test_l5_a_message_that_kills_three_times_alone_is_given_up(scene: Scene) -> None:
    await scene.make_suspects("killer", "m")
    await end(feed := await scene.process(), (await take(feed))[1:])
    scene.move(LEASE_MS)
    for kills in range(KILLS_TO_DEATH):
        assert (await scene.die_alone()).record.kills == kills
    assert await take(await scene.process()) == []
    (letter,) = await scene.letters.dead_letters()
    assert (letter.record.id.partition("@")[0], letter.reason) == ("killer", "killed_worker")
    assert await scene.keys() == []


@on_each
async def test_l5_a_suspect_is_left_to_a_process_that_beats(scene: Scene) -> None:
    await scene.make_suspects("m")
    holder, other = await scene.process(), await scene.process()
    (claim,) = await take(holder)
    await scene.send("beside")
    beside = await take(holder, max_lapses=0)
    for number in range(3 * SILENT_LEASES):
        scene.move(LEASE_MS)
        await asyncio.to_thread(holder.beat, ["m"])
        claims = await take(other)
        assert ids_of(claims) == ([] if number else ["beside"])
        await end(other, claims)
    assert await renew(holder, claim) is RenewOutcome.RENEWED
    assert await renew(holder, beside[0]) is RenewOutcome.LOST
    await end(holder, [claim])


@on_each
async def test_l5_a_process_that_is_silent_for_four_leases_has_ended(scene: Scene) -> None:
    await scene.make_suspects("m")
    holder, other = await scene.process(), await scene.process()
    assert len(await take(holder)) == 1
    scene.move(SILENT_LEASES * LEASE_MS - 1)
    await asyncio.to_thread(holder.beat, ["m"])
    scene.move(SILENT_LEASES * LEASE_MS - 1)
    assert await take(other) == []
    scene.move(1)
    (claim,) = await take(other)
    assert (claim.record.kills, claim.record.alone) == (1, True)


@on_each
async def test_l5_a_process_that_lives_and_has_lost_a_suspect_is_charged_no_kill(scene: Scene) -> None:
    await scene.make_suspects("m")
    feed = await scene.process()
    assert len(await take(feed)) == 1
    scene.move(SILENT_LEASES * LEASE_MS)
    (claim,) = await take(feed)
    assert (claim.record.kills, claim.record.alone) == (0, True)


@on_each
async def test_l5_a_suspect_in_doubt_keeps_no_others_waiting(scene: Scene) -> None:
    await scene.make_suspects("a", "b")
    holder, other = await scene.process(), await scene.process()
    assert ids_of(await take(holder, 1)) == ["a"]
    scene.move(LEASE_MS - 1)
    assert await take(other) == []
    scene.move(1)
    assert ids_of(await take(other)) == ["b"]


@on_each
async def test_l5_kills_are_in_doubt_once_another_message_has_become_a_suspect(scene: Scene) -> None:
    await scene.make_suspects("m")
    for kills in (0, 1):
        assert (await scene.die_alone()).record.kills == kills
    await scene.send("beside")
    for _ in range(SUSPECT_LAPSES):
        assert ids_of(await scene.die(max_lapses=1)) == ["beside"]
    feed = await scene.process()
    for wanted in ("beside", "m"):
        claims = await take(feed)
        assert [(each.record.id, each.record.kills, each.record.alone) for each in claims] == [(wanted, 0, True)]
        await end(feed, claims)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_l5_a_consumer_that_takes_all_in_order_waits_for_its_suspects(server_url: str, kind: str) -> None:
    async def play() -> None:
        async with AsyncExitStack() as opened:
            scene = Scene(server_url, kind, opened)
            await scene.open()
            in_order = "&ordered=true"
            await scene.process(options=in_order)
            await scene.send("suspect", "new")
            for _ in range(SUSPECT_LAPSES):
                assert ids_of(await take(await scene.process(options=in_order))) == ["suspect"]
                scene.move(LEASE_MS)
            feed = await scene.process(options=in_order)
            waiting = await taken(feed, max_lapses=0)
            assert (list(waiting.claims), (waiting.next_due_ms or 0) - waiting.now_ms) == ([], TRIAL_MS)
            for each in ("suspect", "new"):
                claims = await take(feed)
                assert ids_of(claims) == [each]
                await end(feed, claims)

    asyncio.run(play())


@on_each
async def test_l5_what_a_take_has_taken_is_told_again_without_the_mark_of_a_trial(scene: Scene) -> None:
    await scene.make_suspects("m0", "m1")
    feed = await scene.process()
    first = await take(feed)
    feed._next, feed._shall_repeat = feed._next - 2, True  # as after an answer that was lost
    repeated = await take(feed)
    assert [replace(each.record, last_error=None) for each in repeated] == [each.record for each in first]
    await end(feed, repeated)

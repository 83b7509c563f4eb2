"""Fan-out topics, call by call: who gets a message, what is kept and freed, retention, order, retries."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import wraps
from itertools import count
from typing import Any
from uuid import uuid4

import pytest

from aiodelay.backends.redis.lists.list_consumer import ListConsumer
from aiodelay.core.ids import new_op
from aiodelay.core.transitions import SILENT_LEASES
from aiodelay.core.values import (
    After,
    Again,
    Claim,
    Claimed,
    Dead,
    Delivery,
    Demand,
    Done,
    Envelope,
    NotTaken,
    Put,
    Sent,
    Settlement,
    SettleOutcome,
)
from aiodelay.errors import ConfigurationError, TargetError
from aiodelay.memory import MemoryStore
from aiodelay.ports import Feed
from aiodelay.redis import Consumer, RedisFanout, RedisFanoutSink, RedisFanoutSource, RedisStore
from aiodelay.testing.clock import VirtualClock
from tests.integration.test_redis_list_bounds import called_by_scripts
from tests.support.servers import Found, redis_servers
from tests.support.waiting import until

LANE, TOPIC = "order.placed", "orders"
SHORT_MS = 60
RETRY_MS = 1_000
requests = count(1)


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def server_url(request: pytest.FixtureRequest, shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(request.param)


class TakersTime:
    """The time by which feeds take, and by which their store keeps retries. Only the test lets it pass."""

    def __init__(self) -> None:
        self.clock = VirtualClock(start=datetime.now(UTC))
        self._feeds: list[ListConsumer] = []

    def rule(self, feed: Feed) -> None:
        """Let the scripts of a feed use this time instead of the server's."""
        assert isinstance(feed, ListConsumer)
        feed._server_ms = self.clock.now_ms()
        self._feeds.append(feed)

    def lapse(self, leases: int = 1) -> None:
        """Let short leases end."""
        self._pass(leases * SHORT_MS)

    def until_retry(self) -> None:
        """Let retries become due."""
        self._pass(RETRY_MS)

    def _pass(self, ms: int) -> None:
        self.clock.move(ms)
        for feed in self._feeds:
            feed._server_ms = self.clock.now_ms()


class Scene:
    """A topic in a namespace of its own, who publishes to it, and who takes from it."""

    def __init__(self, url: str, opened: AsyncExitStack) -> None:
        self.url, self._opened = url, opened
        self.namespace = uuid4().hex
        self.time = TakersTime()
        self.letters = MemoryStore(clock=self.time.clock)
        self.direct = RedisStore(url, namespace=self.namespace)
        self.fanout = RedisFanout(url, namespace=self.namespace)
        self.source = RedisFanoutSource(url, namespace=self.namespace)

    async def open(self) -> None:
        for each in (self.letters, self.direct, self.fanout, self.source):
            await self._opened.enter_async_context(each)

    async def sink(self, **settings: Any) -> RedisFanoutSink:  # noqa: ANN401
        return await self._opened.enter_async_context(RedisFanoutSink(self.url, namespace=self.namespace, **settings))

    async def feed(self, consumer: str, options: str = "") -> Feed:
        opening = self.source.feed(
            f"{TOPIC}?consumer={consumer}{options}", uuid4().hex, self.letters.put_back, self.letters.now_ms
        )
        feed = await self._opened.enter_async_context(opening)
        self.time.rule(feed)
        await claim(feed, 0)
        return feed

    async def publish(self, *ids: str, to: str = TOPIC, payload: bytes = b"payload", **settings: Any) -> None:  # noqa: ANN401
        sink = await self.sink(**settings)
        assert await sink.send([delivery(each, to, payload) for each in ids]) == [Sent()] * len(ids)

    async def transfer(self, *ids: str, to: str = TOPIC, payload: bytes = b"payload", **settings: Any) -> int:  # noqa: ANN401
        envelopes = [Envelope(each, "redis-fanout", to, payload=payload) for each in ids]
        await self.direct.apply([Put(new_op(), each, After(0)) for each in envelopes])
        sink, moved = RedisFanoutSink(self.url, namespace=self.namespace, **settings), 0
        with self.direct.transferring(sink) as moves:
            while (transferred := await moves.transfer(Demand(500))).moved:
                moved += transferred.moved
        return moved

    async def kept(self) -> int:
        """Return how many contents are kept; their counts of consumers are as many."""
        length: int = await self.direct.command("HLEN", self.key("content"))
        assert await self.direct.command("HLEN", self.key("left")) == length
        return length

    def key(self, name: str) -> str:
        return f"{{{self.namespace}:00}}:fanout:{TOPIC}:{name}"

    async def consumer(self, name: str) -> Consumer:
        return {each.name: each for each in await self.fanout.consumers(TOPIC)}[name]

    async def leftovers(self) -> set[str]:
        """Return the names of the topic's keys, save those that stay."""
        keys: list[bytes] = await self.direct.command("KEYS", f"{self.key('')[:-1]}*")
        names = {key.decode().partition(f"fanout:{TOPIC}")[2] for key in keys}
        return {name for name in names if not name.endswith(":state") and name[:5] != ":seen"} - {":consumers", ":meta"}


def on_topic(test: Callable[[Scene], Awaitable[None]]) -> Callable[[str], None]:
    @wraps(test)
    def run(server_url: str) -> None:
        async def play() -> None:
            async with AsyncExitStack() as opened:
                scene = Scene(server_url, opened)
                await scene.open()
                await test(scene)
            assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

        asyncio.run(play())

    del run.__wrapped__  # so that pytest fills in what `run` takes
    return run


def delivery(message_id: str, to: str = TOPIC, payload: bytes = b"payload") -> Delivery:
    return Delivery(Envelope(message_id, "redis-fanout", to, payload=payload), f"{message_id}/5/1000", 1000, 5, 1, 0)


async def claimed(feed: Feed, messages: int = 500, *, lease_ms: int = 15_000) -> Claimed:
    return await feed.claim({LANE: Demand(messages)}, request=f"r{next(requests)}", lease_ms=lease_ms)


async def claim(feed: Feed, messages: int = 500, *, lease_ms: int = 15_000) -> list[Claim]:
    return list((await claimed(feed, messages, lease_ms=lease_ms)).claims)


def ids(claims: list[Claim]) -> list[str]:
    return [each.record.id for each in claims]


def done(each: Claim) -> Done:
    return Done(each.record.id, each.record.revision, each.token)


def again(feed_now_ms: int, each: Claim, error: str | None = "e", *, in_ms: int = 0) -> Again:
    attempt = each.record.attempt + 1
    return Again(each.record.id, each.record.revision, each.token, feed_now_ms + in_ms, attempt, error)


def release(each: Claim) -> Again:
    record = each.record
    return Again(record.id, record.revision, each.token, record.due_ms, record.attempt)


async def settle(feed: Feed, *settlements: Settlement) -> None:
    assert list(await feed.settle(settlements)) == [SettleOutcome.SETTLED] * len(settlements)


async def handle_all(feed: Feed) -> list[str]:
    """Take and settle until there is nothing; return the ids."""
    found: list[str] = []
    while claims := await claim(feed) or await claim(feed):  # the first may have met what is given up
        found += ids(claims)
        await settle(feed, *map(done, claims))
    return found


MANY = [f"m{i}" for i in range(40)]


# --- publishing and taking --------------------------------------------------------------------------------


@pytest.mark.parametrize("inline_below", [0, 500])
@pytest.mark.parametrize("way", ["publish", "transfer"])
def test_every_consumer_gets_all_in_order_and_what_all_have_settled_is_freed(
    server_url: str, way: str, inline_below: int
) -> None:
    @on_topic
    async def play(scene: Scene) -> None:
        feeds = [await scene.feed(name) for name in ("billing", "shipping", "mail")]
        await getattr(scene, way)(*MANY, inline_below=inline_below)
        assert await scene.kept() == (0 if inline_below else len(MANY))
        for feed in feeds:
            assert await scene.kept() == (0 if inline_below else len(MANY))
            assert await handle_all(feed) == MANY
        assert await scene.leftovers() == set()

    play(server_url)


@pytest.mark.parametrize("way", ["publish", "transfer"])
def test_one_consumer_can_be_addressed(server_url: str, way: str) -> None:
    @on_topic
    async def play(scene: Scene) -> None:
        billing, shipping = await scene.feed("billing"), await scene.feed("shipping")
        await getattr(scene, way)("all")
        await getattr(scene, way)("one", to=f"{TOPIC}@billing")
        late = await scene.feed("late", "&from=oldest")
        assert [await handle_all(each) for each in (billing, shipping, late)] == [["all", "one"], ["all"], ["all"]]
        assert await scene.leftovers() == set()

    play(server_url)


@on_topic
async def test_a_consumer_is_seen_when_it_asks_and_noted_every_ten_seconds_at_most(scene: Scene) -> None:
    await scene.fanout.register(TOPIC, "billing")
    assert (await scene.consumer("billing")).seen_ms is None
    feed = await scene.feed("billing")
    first = (await scene.consumer("billing")).seen_ms
    assert first is not None
    assert first == scene.letters.now_ms()
    state = scene.key("")[:-1] + "@billing:state"
    for ago_ms, is_noted in ((9_999, False), (10_000, True), (-9_999, False), (-10_000, True)):
        before = first - ago_ms
        await scene.direct.command("HSET", state, "seen", before)
        await claim(feed, 0)
        assert ((await scene.consumer("billing")).seen_ms != before) == is_noted, ago_ms


@on_topic
async def test_a_consumer_that_is_away_gets_everything_when_it_is_back(scene: Scene) -> None:
    await scene.fanout.register(TOPIC, "away")
    present = await scene.feed("present")
    for i in range(0, 40, 8):
        await scene.publish(*MANY[i : i + 8])
        assert await handle_all(present) == MANY[i : i + 8]
    assert (await scene.consumer("away")).waiting == 40
    assert await scene.kept() == 40
    assert await handle_all(await scene.feed("away")) == MANY
    assert await scene.leftovers() == set()


@on_topic
async def test_s2_what_nobody_is_registered_for_waits(scene: Scene) -> None:
    sink = await scene.sink()
    for to in (TOPIC, f"{TOPIC}@billing"):
        assert await sink.send([delivery("m", to)]) == [NotTaken("no such consumer is registered")]
        assert await scene.transfer(f"to-{to}", to=to) == 0
    assert {each.reason for each in await scene.direct.blocked()} == {"no such consumer is registered"}
    feed = await scene.feed("billing")
    moved = 0
    while moved < 2:  # each goes on when its own wait ends
        moved += await until(scene.transfer, "what waited goes on")
    assert sorted(await handle_all(feed)) == ["to-orders", "to-orders@billing"]


@on_topic
async def test_a_message_published_again_under_its_delivery_id_is_given_to_nobody_twice(scene: Scene) -> None:
    feeds = [await scene.feed(name) for name in ("billing", "shipping")]
    sink = await scene.sink()
    batch = [delivery(each) for each in MANY]
    assert await sink.send(batch[:20]) == [Sent()] * 20
    assert await sink.send([*batch, batch[30]]) == [Sent()] * 41
    for feed in feeds:
        assert await handle_all(feed) == MANY


@on_topic
async def test_s7_instances_of_a_consumer_share_and_what_one_dies_with_returns(scene: Scene) -> None:
    dead_one, other = await scene.feed("billing"), await scene.feed("billing")
    await scene.publish(*MANY)
    taken = await claim(dead_one, 10, lease_ms=SHORT_MS)
    assert ids(await claim(other, 5)) == MANY[10:15]
    scene.time.lapse()
    claims = await claim(other)
    assert ids(claims) == MANY[:10] + MANY[15:]
    assert [each.record.lapses for each in claims] == [1] * 10 + [0] * 25
    assert list(await dead_one.settle([done(taken[0])])) == [SettleOutcome.GONE]


@pytest.mark.parametrize("inline_below", [0, 500])
def test_l5_killers_are_given_up_by_the_consumer_whose_processes_they_end_only(
    server_url: str, inline_below: int
) -> None:
    @on_topic
    async def play(scene: Scene) -> None:
        feed, other = await scene.feed("billing"), await scene.feed("shipping")
        await scene.publish("bad", "good", inline_below=inline_below)
        for wanted in (2, 2, 2, 1, 1, 1):
            taker = await scene.feed("billing")
            claims = await claim(taker, lease_ms=SHORT_MS)
            assert claims[0].record.id == "bad"
            assert (len(claims), claims[0].record.alone) == (wanted, wanted == 1)
            scene.time.lapse(SILENT_LEASES if wanted == 1 else 1)
        assert await handle_all(feed) == ["good"]
        assert await handle_all(other) == ["bad", "good"]
        (letter,) = await scene.letters.dead_letters()
        assert (letter.record.id, letter.reason) == ("bad@redis-fanout:orders@billing", "killed_worker")
        assert await scene.leftovers() == set()

    play(server_url)


# --- retries ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inline_below", [0, 500])
def test_retries_come_back_to_that_consumer_only_and_whole(server_url: str, inline_below: int) -> None:
    @on_topic
    async def play(scene: Scene) -> None:
        billing, shipping = await scene.feed("billing"), await scene.feed("shipping")
        await scene.publish("a", "b", payload=b"\x00" * 50, inline_below=inline_below)
        first, second = await claim(billing)
        await settle(billing, again(scene.letters.now_ms(), first, "no answer", in_ms=RETRY_MS), done(second))
        assert await handle_all(shipping) == ["a", "b"]
        waiting = await claimed(billing)
        assert list(waiting.claims) == []
        assert waiting.next_due_ms is not None
        assert 0 < waiting.next_due_ms - waiting.now_ms <= RETRY_MS
        assert (await scene.consumer("billing")).retrying == 1
        scene.time.until_retry()
        (retry,) = await claim(await scene.feed("billing"))
        record = retry.record
        assert (record.id, record.revision, record.due_ms, record.attempt) == ("a", 5, 1000, 1)
        assert (record.first_error, record.last_error) == ("no answer", "no answer")
        assert record.envelope.payload == b"\x00" * 50
        assert await claim(shipping) == []

    play(server_url)


@on_topic
async def test_the_same_message_is_given_up_by_each_consumer_for_itself(scene: Scene) -> None:
    for name in ("billing", "shipping"):
        await scene.fanout.register(TOPIC, name)
    await scene.publish("m")
    for name in ("billing", "shipping"):
        feed = await scene.feed(name)
        (one,) = await claim(feed)
        await settle(feed, Dead("m", one.record.revision, one.token, "rejected", 1, "why"))
    letters = {each.record.id: each.record for each in await scene.letters.dead_letters()}
    assert sorted(letters) == ["m@redis-fanout:orders@billing", "m@redis-fanout:orders@shipping"]
    envelope = letters["m@redis-fanout:orders@billing"].envelope
    assert (envelope.lane, envelope.address, envelope.payload) == ("redis-fanout", "orders@billing", b"payload")
    assert await scene.leftovers() == set()


@on_topic
async def test_what_is_given_back_unrun_stands_where_it_stood(scene: Scene) -> None:
    feed = await scene.feed("billing")
    await scene.publish(*MANY[:5])
    claims = await claim(feed, 3)
    await settle(feed, release(claims[2]), release(claims[0]), release(claims[1]))
    assert await handle_all(feed) == MANY[:5]


# --- order ------------------------------------------------------------------------------------------------


@on_topic
async def test_s9_an_ordered_consumer_has_one_message_in_flight_also_over_retries(scene: Scene) -> None:
    one, two = await scene.feed("billing", "&ordered=true"), await scene.feed("billing", "&ordered=true")
    await scene.publish("a", "b", "c")
    (first,) = await claim(one)
    withheld = await claimed(two)
    assert (list(withheld.claims), first.record.id) == ([], "a")
    assert withheld.next_due_ms is not None
    assert withheld.next_due_ms - withheld.now_ms <= 1_000, "its instances are told by nobody"
    assert await claim(one) == []
    await settle(one, again(scene.letters.now_ms(), first, in_ms=RETRY_MS))
    assert await claim(two) == await claim(one) == []
    scene.time.until_retry()
    (retry,) = await claim(two)
    assert (retry.record.id, retry.record.attempt) == ("a", 1)
    await settle(two, done(retry))
    assert [*await handle_all(one), *await handle_all(two)] == ["b", "c"]


@pytest.mark.valkey_too
@on_topic
async def test_l2_an_ordered_consumer_goes_on_when_what_was_in_flight_has_ended(scene: Scene) -> None:
    feed = await scene.feed("billing", "&ordered=true")
    await scene.publish("a", "b")
    (first,) = await claim(feed)
    feed.clear()
    assert await claim(feed) == []
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        waiter = tasks.create_task(feed.wait(until_ms=None))
        await asyncio.sleep(0.05)  # it must wait, and not come back at once
        assert not waiter.done(), "it would look again and again"
        await settle(feed, done(first))
    assert ids(await claim(feed)) == ["b"]


# --- from the oldest, and the end of a consumer -----------------------------------------------------------


@on_topic
async def test_a_consumer_begins_with_now_or_with_the_oldest_that_is_kept(scene: Scene) -> None:
    first = await scene.feed("first")
    many = [f"n{i}" for i in range(2500)]
    for i in range(0, 2500, 500):
        await scene.publish(*many[i : i + 500])
    await settle(first, *map(done, await claim(first, 100)))
    assert await scene.fanout.register(TOPIC, "now")
    assert not await scene.fanout.register(TOPIC, "now")
    assert await scene.fanout.register(TOPIC, "oldest", start="oldest")
    await scene.publish("later")
    assert await handle_all(await scene.feed("now")) == ["later"]
    assert await handle_all(await scene.feed("oldest")) == [*many[100:], "later"]
    assert await scene.kept() == 2401
    assert await handle_all(first) == [*many[100:], "later"]
    assert await scene.leftovers() == set()


@on_topic
async def test_a_registration_that_was_cut_short_is_completed_by_who_takes(scene: Scene) -> None:
    await scene.fanout.register(TOPIC, "first")
    many = [f"n{i}" for i in range(2500)]
    for i in range(0, 2500, 500):
        await scene.publish(*many[i : i + 500])
    feed = await scene.feed("oldest", "&from=oldest")
    key = scene.key("content").replace(":content", "@oldest:")
    await scene.direct.command("DEL", f"{key}refs")
    await scene.direct.command("HSET", f"{key}state", "fill", 2500)
    assert await claim(feed) == await claim(feed) == []
    assert await handle_all(feed) == many


@on_topic
async def test_a_consumer_that_leaves_frees_what_it_alone_had_not_settled(scene: Scene) -> None:
    leaving, staying = await scene.feed("leaving"), await scene.feed("staying")
    many = [f"n{i}" for i in range(2500)]
    for i in range(0, 2500, 500):
        await scene.publish(*many[i : i + 500])
    taken = await claim(leaving, 100)
    await settle(leaving, *[again(scene.letters.now_ms(), each, in_ms=60_000) for each in taken[:10]])
    assert await handle_all(staying) == many
    assert await scene.kept() == 2490
    assert await scene.fanout.unregister(TOPIC, "leaving")
    assert not await scene.fanout.unregister(TOPIC, "leaving")
    assert await scene.kept() == 0
    assert await scene.leftovers() == set()
    assert list(await leaving.settle([done(taken[20])])) == [SettleOutcome.GONE]
    await scene.publish("after")
    assert await claim(leaving) == []
    assert await handle_all(staying) == ["after"]


@on_topic
async def test_publishing_goes_on_with_a_departure_that_was_cut_short(scene: Scene) -> None:
    leaving = await scene.feed("leaving")
    await scene.fanout.register(TOPIC, "staying")
    many = [f"n{i}" for i in range(2500)]
    for i in range(0, 2500, 500):
        await scene.publish(*many[i : i + 500])
    keys = [scene.key("content"), scene.key("").replace(f"{TOPIC}:", "topics")]
    assert await scene.direct._checked().client.run_on("unregister", keys, ["", "leaving"]) == b"more"
    assert await claim(leaving) == []
    staying = await scene.feed("staying")
    assert await handle_all(staying) == many
    assert await scene.kept() > 0
    for i in range(3):
        await scene.publish(f"after{i}")
    assert await handle_all(staying) == ["after0", "after1", "after2"]
    assert await scene.kept() == 0
    assert await scene.leftovers() == set()


# --- retention --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inline_below", [0, 500])
@pytest.mark.parametrize("way", ["publish", "transfer"])
def test_what_an_absent_consumer_missed_is_counted_and_told_to_it(
    server_url: str, way: str, inline_below: int, caplog: pytest.LogCaptureFixture
) -> None:
    @on_topic
    async def play(scene: Scene) -> None:
        await scene.fanout.register(TOPIC, "away")
        present = await scene.feed("present")
        for i in range(0, 40, 4):
            await getattr(scene, way)(*MANY[i : i + 4], max_messages=10, inline_below=inline_below)
            assert await handle_all(present) == MANY[i : i + 4]
        assert (await scene.consumer("present")).missed == 0
        caplog.clear()
        feed = await scene.feed("away")
        claims = await claim(feed)
        assert ids(claims) == MANY[30:]
        assert [each.missed for each in claims] == [30] + [0] * 9
        assert [each.levelno for each in caplog.records] == [logging.WARNING]
        assert "missed 30 messages" in caplog.text
        assert (await scene.consumer("away")).missed == 30
        await settle(feed, *map(done, claims))
        assert await scene.leftovers() == set()
        await scene.publish("next")
        again_told = await claim(await scene.feed("away"))
        assert [(each.record.id, each.missed) for each in again_told] == [("next", 0)]
        await scene.fanout.unregister(TOPIC, "away")
        assert await claim(feed) == []
        assert await scene.direct.command("KEYS", scene.key("").replace(":orders:", ":orders@away:*")) == []

    play(server_url)


@pytest.mark.parametrize("missed", [8, 30])
def test_a_consumer_that_is_registered_again_is_told_what_it_missed_since(server_url: str, missed: int) -> None:
    @on_topic
    async def play(scene: Scene) -> None:
        feed = await scene.feed("billing")
        await scene.publish(*MANY[:15], max_messages=5)
        assert (await claim(feed))[0].missed == 10
        await scene.fanout.unregister(TOPIC, "billing")
        await scene.fanout.register(TOPIC, "billing")
        await scene.publish(*(f"new{i}" for i in range(missed + 5)), max_messages=5)
        claims = await claim(feed)
        assert [each.missed for each in claims] == [missed, 0, 0, 0, 0]
        await settle(feed, *map(done, claims))
        assert await claim(feed) == []
        await scene.publish("next")
        assert [each.missed for each in await claim(await scene.feed("billing"))] == [0]

    play(server_url)


@pytest.mark.parametrize("inline_below", [0, 500])
def test_what_is_too_old_is_dropped_when_the_next_is_published(server_url: str, inline_below: int) -> None:
    @on_topic
    async def play(scene: Scene) -> None:
        await scene.fanout.register(TOPIC, "away")
        settings: dict[str, Any] = {"max_age": "50ms", "inline_below": inline_below}
        await scene.publish("a", "b", **settings)
        await asyncio.sleep(0.1)  # older than 50 ms by the server's clock
        assert (await scene.consumer("away")).waiting == 2
        await scene.publish("c", **settings)
        (one,) = await claim(await scene.feed("away"))
        assert (one.record.id, one.missed) == ("c", 2)

    play(server_url)


@on_topic
async def test_what_is_dropped_while_it_is_handled_is_settled_all_the_same(scene: Scene) -> None:
    feed = await scene.feed("billing")
    await scene.publish("a", "b")
    first, second = await claim(feed)
    await scene.publish("c", "d", max_messages=1)
    await settle(feed, done(first), again(scene.letters.now_ms(), second))
    assert await handle_all(feed) == ["b", "d"]
    assert (await scene.consumer("billing")).missed == 1
    assert await scene.leftovers() == set()


@on_topic
async def test_many_absent_consumers_keep_no_more_than_they_may(scene: Scene) -> None:
    names = [f"away{i}" for i in range(30)]
    for name in names:
        await scene.fanout.register(TOPIC, name)
    for i in range(60):
        await scene.publish(*[f"m{i}-{j}" for j in range(20)], max_messages=20)
    waiting = [each.waiting for each in await scene.fanout.consumers(TOPIC)]
    assert max(waiting) <= 20 + 20 * len(names) / 8 + 20
    assert await scene.kept() == 20
    for name in names:
        handled = len(await handle_all(await scene.feed(name)))
        assert (handled, (await scene.consumer(name)).missed) == (20, 1180)
    assert await scene.leftovers() == set()


# --- many, and what cannot be -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["publish", "transfer"])
def test_a_thousand_consumers_are_served_a_bounded_number_at_a_time(server_url: str, way: str) -> None:
    @on_topic
    async def play(scene: Scene) -> None:
        names = [f"c{i}" for i in range(1000)]
        for i in range(0, 1000, 50):  # each call has a time limit, and waits for a connection meanwhile
            await asyncio.gather(*[scene.fanout.register(TOPIC, name) for name in names[i : i + 50]])
        await getattr(scene, way)(*MANY)
        assert [each.waiting for each in await scene.fanout.consumers(TOPIC)] == [len(MANY)] * 1000
        (topic,) = await scene.fanout.topics()
        assert (topic.consumers, topic.published, topic.kept) == (1000, len(MANY), len(MANY))
        assert await handle_all(await scene.feed("c500")) == MANY

    play(server_url)


@on_topic
async def test_large_contents_are_taken_without_reading_those_behind_them(scene: Scene) -> None:
    feed = await scene.feed("billing")
    for i in range(4):
        await scene.publish(*[f"m{i}-{j}" for j in range(3)], payload=bytes(600_000))
    read = await called_by_scripts(scene.url, "HMGET", lambda: claimed(feed))
    indexes = [index for key, *found in read if key == scene.key("content") for index in found]
    assert 1 <= len(indexes) <= 2


@pytest.mark.valkey_too
@on_topic
async def test_no_script_gives_out_more_than_a_bounded_number_of_references(scene: Scene) -> None:
    await scene.direct.command("SADD", scene.key("consumers"), *[f"c{i}" for i in range(2000)])
    sink = await scene.sink()
    called = await called_by_scripts(scene.url, "RPUSH", lambda: sink.send([delivery(each) for each in MANY[:19]]))
    pushed = [references for key, *references in called if key.endswith(":refs")]
    assert len(pushed) == 2 * 2000
    assert max(len(references) for references in pushed) == 10


@on_topic
async def test_a_topic_takes_no_more_consumers_than_it_can_serve_in_one_step(scene: Scene) -> None:
    await scene.direct.command("SADD", scene.key("consumers"), *[f"c{i}" for i in range(2000)])
    with pytest.raises(ConfigurationError, match="2,000"):
        await scene.fanout.register(TOPIC, "one-more")
    assert not await scene.fanout.register(TOPIC, "c7")
    await scene.publish("m")
    assert (await scene.consumer("c1999")).waiting == 1


@on_topic
async def test_l5_a_consumer_whose_list_was_spoilt_holds_up_no_other(scene: Scene) -> None:
    feed = await scene.feed("billing")
    await scene.fanout.register(TOPIC, "spoilt")
    key = scene.key("content").replace(":content", "@spoilt:refs")
    await scene.direct.command("SET", key, "no list")
    await scene.publish("a", "b")
    assert await handle_all(feed) == ["a", "b"]
    assert await scene.leftovers() == {"@spoilt:refs"}
    await scene.direct.command("DEL", key)
    assert (await scene.consumer("spoilt")).missed == 2


@pytest.mark.parametrize("name", ["@spoilt:refs", "@spoilt:state", "@spoilt:consumers", ":leaving"])
@pytest.mark.parametrize("has_left", [False, True])
@pytest.mark.parametrize("way", ["publish", "transfer"])
def test_l5_no_key_that_was_spoilt_keeps_others_from_getting_each_message_once(
    server_url: str, way: str, has_left: bool, name: str
) -> None:
    @on_topic
    async def play(scene: Scene) -> None:
        feed = await scene.feed("billing")
        await scene.fanout.register(TOPIC, "spoilt")
        await getattr(scene, way)("first", to=f"{TOPIC}@spoilt")
        if has_left:
            await scene.direct.command("SMOVE", scene.key("consumers"), scene.key("leaving"), "spoilt")
        key = scene.key("")[:-1] + name
        await scene.direct.command("DEL", key)
        await scene.direct.command("SET", key, "no list, no set, no hash")
        seen: list[str] = []
        for i in range(0, 40, 4):
            await getattr(scene, way)(*MANY[i : i + 4], max_messages=5)
            seen += await handle_all(feed)
        assert seen == MANY

    play(server_url)


@pytest.mark.parametrize(
    "address", ["", "orders?consumer=a", "a:b", "a b", "a@", "@b", "a@b@c", "{a}", "a@b:refs", "x" * 101]
)
def test_an_address_that_can_never_work_is_refused(address: str) -> None:
    with pytest.raises(TargetError):
        RedisFanoutSink("redis://localhost").check(address)
    RedisFanoutSink("redis://localhost").check("orders.new/é-1@billing")


BAD_PLACES = """orders ?consumer=a o?consumer= o?consumer=a&from=then o?consumer=a&ordered=1 o?consumer=a&x=1
o?consumer=a&consumer=b o@a o?consumer=a@b"""


@pytest.mark.parametrize("address", BAD_PLACES.split())
def test_a_source_that_can_never_work_is_refused(address: str) -> None:
    with pytest.raises(TargetError):
        RedisFanoutSource("redis://localhost").check(address)
    RedisFanoutSource("redis://localhost").check("o?consumer=a&from=oldest&ordered=true")


@pytest.mark.parametrize(
    "settings",
    [{"max_messages": -1}, {"max_messages": True}, {"inline_below": 501}, {"max_age": "0s"}, {"namespace": "{a}"}],
)
def test_a_setting_that_cannot_be_is_refused(settings: Any) -> None:  # noqa: ANN401
    (name,) = settings
    with pytest.raises(ConfigurationError, match=name):
        RedisFanoutSink("redis://localhost", **settings)

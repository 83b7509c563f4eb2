"""Logs, call by call: indexes, cursors, replay, trimmed messages, retries, and appends of other programs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import wraps
from itertools import pairwise
from typing import Any
from uuid import uuid4

import pytest

from aiodelay.core.ids import new_op
from aiodelay.core.transitions import SILENT_LEASES
from aiodelay.core.validation import check_id
from aiodelay.core.values import After, Dead, Delivery, Demand, Done, Envelope, NotTaken, Put, Sent, SettleOutcome
from aiodelay.errors import ConfigurationError, InputError, StoreUnavailableError, TargetError
from aiodelay.memory import MemoryStore
from aiodelay.ports import Feed
from aiodelay.redis import (
    LogConsumer,
    LogEntry,
    LogMessage,
    LogTopic,
    RedisFanout,
    RedisFanoutSink,
    RedisFanoutSource,
    RedisLog,
    RedisStore,
)
from tests.integration.test_redis_fanout import (
    MANY,
    RETRY_MS,
    SHORT_MS,
    TakersTime,
    again,
    claim,
    claimed,
    done,
    handle_all,
    ids,
    release,
    settle,
)
from tests.integration.test_redis_list_bounds import called_by_scripts
from tests.support.servers import Found, redis_servers

TOPIC = "orders"


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def server_url(request: pytest.FixtureRequest, shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(request.param)


class Scene:
    """A log in a namespace of its own, who appends to it, and who takes from it."""

    def __init__(self, url: str, opened: AsyncExitStack) -> None:
        self.url, self._opened = url, opened
        self.namespace = uuid4().hex
        self.time = TakersTime()
        self.letters = MemoryStore(clock=self.time.clock)
        self.direct = RedisStore(url, namespace=self.namespace)
        self.log = RedisLog(url, namespace=self.namespace)

    async def open(self) -> None:
        for each in (self.letters, self.direct, self.log):
            await self._opened.enter_async_context(each)

    async def sink(self, **settings: Any) -> RedisLog:  # noqa: ANN401
        return await self._opened.enter_async_context(RedisLog(self.url, namespace=self.namespace, **settings))

    async def feed(self, consumer: str, options: str = "") -> Feed:
        address = f"{TOPIC}?consumer={consumer}{options}"
        opening = self.log.feed(address, uuid4().hex, self.letters.put_back, self.letters.now_ms)
        feed = await self._opened.enter_async_context(opening)
        self.time.rule(feed)
        await claim(feed, 0)
        return feed

    async def send(self, *ids: str, to: str = TOPIC, payload: bytes = b"payload", **settings: Any) -> None:  # noqa: ANN401
        sink = await self.sink(**settings)
        assert await sink.send([delivery(each, to, payload) for each in ids]) == [Sent()] * len(ids)

    async def send_ago(self, hours: int, ids: Sequence[str]) -> None:
        """Append messages some hours ago: the script gets that time instead of the server's."""
        sink: Any = await self.sink()
        run_on, sent_ms = sink._client.run_on, self.letters.now_ms() - hours * 3_600_000

        async def earlier(name: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:  # noqa: ANN401 - passed on
            return await run_on(name, keys, [sent_ms, *arguments[1:]])

        sink._client.run_on = earlier
        assert await sink.send([delivery(each) for each in ids]) == [Sent()] * len(ids)

    async def transfer(self, *ids: str, to: str = TOPIC, payload: bytes = b"payload", **settings: Any) -> None:  # noqa: ANN401
        envelopes = [Envelope(each, "redis-log", to, payload=payload) for each in ids]
        await self.direct.apply([Put(new_op(), each, After(0)) for each in envelopes])
        moved = 0
        with self.direct.transferring(RedisLog(self.url, namespace=self.namespace, **settings)) as moves:
            while (transferred := await moves.transfer(Demand(500))).moved:
                moved += transferred.moved
        assert moved == len(ids)

    async def entries(self, **options: Any) -> list[LogEntry]:  # noqa: ANN401
        return [each async for each in self.log.read(TOPIC, **options)]

    async def indexes(self, **options: Any) -> list[int]:  # noqa: ANN401
        return [each.index for each in await self.entries(**options)]

    async def topic(self) -> LogTopic:
        (topic,) = await self.log.topics()
        return topic

    async def consumer(self, name: str) -> LogConsumer:
        return {each.name: each for each in await self.log.consumers(TOPIC)}[name]

    def key(self, name: str = "") -> str:
        return f"{{{self.namespace}:00}}:log:{TOPIC}{name}"


def on_log(test: Callable[[Scene], Awaitable[None]]) -> Callable[[str], None]:
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
    return Delivery(Envelope(message_id, "redis-log", to, payload=payload), f"{message_id}/5/1000", 1000, 5, 1, 0)


# --- appending and reading --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["send", "transfer"])
def test_indexes_are_consecutive_in_the_order_of_appending_for_all_who_append(server_url: str, way: str) -> None:
    @on_log
    async def play(scene: Scene) -> None:
        await getattr(scene, way)(*MANY[:20])
        assert await scene.log.append(TOPIC, [b"a", b"b"]) == [21, 22]
        await getattr(scene, way)(*MANY[20:])
        found = await scene.entries()
        assert [each.index for each in found] == list(range(1, 43))
        assert [each.id for each in found if each.payload == b"payload"] == MANY
        topic = await scene.topic()
        assert (topic.name, topic.first, topic.last, topic.consumers) == (TOPIC, 1, 42, 0)

    play(server_url)


@on_log
async def test_many_who_append_at_once_leave_no_gap(scene: Scene) -> None:
    async with asyncio.TaskGroup() as tasks:
        appending = [tasks.create_task(scene.log.append(TOPIC, [b"p"] * 7)) for _ in range(30)]
    found = [index for each in appending for index in each.result()]
    assert sorted(index for index in found if index) == list(range(1, 211))


@on_log
async def test_s8_payload_key_and_headers_arrive_identical(scene: Scene) -> None:
    message = LogMessage(bytes(range(256)) * 300, key=b"\x00\xff", headers={"a": b"\xff", "b": b""}, id="mine")
    await scene.log.append(TOPIC, [message])
    (entry,) = await scene.entries()
    assert (entry.payload, entry.key, entry.headers, entry.id) == (
        message.payload,
        message.key,
        message.headers,
        "mine",
    )
    assert entry.at is not None
    (one,) = await claim(await scene.feed("billing"))
    envelope = one.record.envelope
    assert (envelope.payload, envelope.key, envelope.headers) == (message.payload, message.key, message.headers)


@on_log
async def test_what_is_appended_again_under_its_id_is_there_once(scene: Scene) -> None:
    again_ = [LogMessage(b"p", id=each) for each in ("a", "b", "a")]
    assert await scene.log.append(TOPIC, again_) == [1, 2, None]
    assert await scene.log.append(TOPIC, [*again_, b"other"]) == [None, None, None, 3]
    sink, batch = await scene.sink(), [delivery(each) for each in MANY]
    assert await sink.send(batch[:20]) == [Sent()] * 20
    assert await sink.send([*batch, batch[30]]) == [Sent()] * 41
    assert [each.id for each in await scene.entries(start=4)] == MANY


@on_log
async def test_reading_begins_with_an_index_a_time_the_oldest_or_what_comes(scene: Scene) -> None:
    for part in (["a", "b"], ["c"], ["d", "e"]):
        await scene.send(*part)
        await asyncio.sleep(0.02)  # each has a time of its own, by the server's clock
    found = await scene.entries()
    middle = found[2].at
    assert middle is not None
    assert await scene.indexes(start=4) == [4, 5]
    assert await scene.indexes(start=middle) == [3, 4, 5]
    assert await scene.indexes(start=middle + timedelta(milliseconds=1)) == [4, 5]
    assert await scene.indexes(start=middle - timedelta(days=1)) == [1, 2, 3, 4, 5]
    assert await scene.indexes(start=middle + timedelta(days=1)) == []
    assert await scene.indexes(start="now") == []
    assert await scene.indexes(start=99) == []


@on_log
async def test_a_time_is_found_among_many_large_and_some_that_do_not_say_when(scene: Scene) -> None:
    await scene.log.append(TOPIC, [bytes(300_000)] * 20)
    await scene.direct.command("XADD", scene.key(), "0-21", "payload", "when?")
    await asyncio.sleep(0.01)  # a later time, by the server's clock
    await scene.log.append(TOPIC, [bytes(300_000)] * 20)
    at = (await scene.entries(start=22))[0].at
    assert at is not None
    assert (await scene.indexes(start=at))[0] in (21, 22)


@on_log
async def test_another_program_appends_field_by_field(scene: Scene) -> None:
    await scene.log.append(TOPIC, [b"ours"])
    fields = ("payload", "theirs", "key", "k", "header.a", "1", "header.long-" + "x" * 60, "2", "at", "1795000000000")
    await scene.direct.command("XADD", scene.key(), "0-2", *fields)
    await scene.direct.command("XADD", scene.key(), "0-3", "payload", b"\xff" * 70_000)
    assert await scene.log.append(TOPIC, [b"ours again"]) == [4]
    read = await scene.entries()
    claims = await claim(await scene.feed("billing"))
    assert ids(claims)[1:3] == [read[1].id, read[2].id] == [f"{TOPIC}/2", f"{TOPIC}/3"]
    headers = {"a": b"1", "long-" + "x" * 60: b"2"}
    for envelope in (read[1], claims[1].record.envelope):
        assert (envelope.payload, envelope.key, envelope.headers) == (b"theirs", b"k", headers)
    assert (read[1].at_ms, claims[1].record.due_ms) == (1_795_000_000_000, 1_795_000_000_000)
    assert read[2].payload == claims[2].record.envelope.payload == b"\xff" * 70_000
    assert (read[2].at_ms, claims[2].queued_ms) == (None, None)


@pytest.mark.parametrize("way", ["send", "transfer"])
def test_b1_what_cannot_be_dropped_or_noted_has_nothing_appended_twice(server_url: str, way: str) -> None:
    @on_log
    async def play(scene: Scene) -> None:
        await scene.direct.command("SET", scene.key(":consumers"), "no sorted set")
        for i in range(0, 12, 4):
            await getattr(scene, way)(*MANY[i : i + 4], max_messages=10, drop_passed=True)
        assert [each.id for each in await scene.entries()] == MANY[:12]
        logs = scene.key().replace(f"log:{TOPIC}", "logs")
        await scene.direct.command("DEL", logs)
        await scene.direct.command("SET", logs, "no set")
        with pytest.raises((AssertionError, StoreUnavailableError)):
            await getattr(scene, way)("refused")
        assert [each.id for each in await scene.entries()] == MANY[:12]

    play(server_url)


@on_log
async def test_l5_what_another_program_appended_and_ends_processes_is_given_up(scene: Scene) -> None:
    await scene.direct.command("XADD", scene.key(), "0-1", "payload", "bad")
    for leases in (1, 1, SILENT_LEASES, SILENT_LEASES, SILENT_LEASES):
        assert len(await claim(await scene.feed("billing"), lease_ms=SHORT_MS)) == 1
        scene.time.lapse(leases)
    assert await handle_all(await scene.feed("billing")) == []
    (letter,) = await scene.letters.dead_letters()
    assert (letter.record.id, letter.reason) == (f"{TOPIC}/1@redis-log:{TOPIC}?consumer=billing", "killed_worker")
    assert (await scene.consumer("billing")).cursor == 1


@on_log
async def test_a_key_that_holds_something_else_takes_nothing_and_says_why(scene: Scene) -> None:
    await scene.direct.command("XADD", scene.key(), "*", "payload", "by the clock")
    sink = await scene.sink()
    (outcome,) = await sink.send([delivery("m")])
    assert isinstance(outcome, NotTaken)
    assert "no log" in outcome.reason
    with pytest.raises(StoreUnavailableError, match="no log"):
        await scene.log.append(TOPIC, [b"m"])
    with pytest.raises(StoreUnavailableError, match="no log"):
        await scene.log.register(TOPIC, "billing")
    with pytest.raises(StoreUnavailableError, match="no log"):
        await scene.log.trim(TOPIC, max_messages=1)


@on_log
async def test_what_is_no_message_is_refused_before_anything_is_appended(scene: Scene) -> None:
    wrong: list[Any] = ["text", LogMessage("text"), None]  # type: ignore[arg-type]
    for each in (
        *wrong,
        LogMessage(b"", headers={"a b": b""}),
        LogMessage(b"", id=""),
        LogMessage(b"", key=bytes(1 << 15)),
    ):
        with pytest.raises(InputError):
            await scene.log.append(TOPIC, [b"fine", each])
    assert await scene.entries() == []


@pytest.mark.parametrize("topic", ["", "a b", "a@b", "x" * 101, "a:b"])
def test_names_and_starts_that_cannot_be_are_refused(topic: str) -> None:
    log = RedisLog("redis://nowhere")
    with pytest.raises(TargetError):
        log.check(topic)
    for query in ("consumer=", "consumer=a:b", "from=now", "consumer=b&from=0", "consumer=b&from=2031-01-01", "x=1"):
        with pytest.raises(TargetError):
            log.check(f"orders?{query}")
    for query in ("consumer=b", "group=b&from=7", "consumer=b&from=2031-01-01T00:00:00%2B01:00&ordered=true"):
        log.check(f"orders?{query}")
    for settings in ({"max_messages": -1}, {"max_age": "0s"}):
        with pytest.raises(ConfigurationError):
            RedisLog("redis://nowhere", **settings)


# --- consumers and their cursor ---------------------------------------------------------------------------


@on_log
async def test_the_cursor_moves_after_handling_and_only_up_to_the_first_that_has_not_ended(scene: Scene) -> None:
    feed = await scene.feed("billing")
    await scene.send(*MANY[:5])
    claims = await claim(feed)
    assert ids(claims) == MANY[:5]
    assert ((await scene.consumer("billing")).cursor, (await scene.consumer("billing")).in_flight) == (0, 5)
    cursors = []
    for each in (claims[1], claims[0], claims[4], claims[3], claims[2]):
        await settle(feed, done(each))
        cursors.append((await scene.consumer("billing")).cursor)
    assert cursors == [0, 2, 2, 2, 5]
    assert await scene.direct.command("ZSCORE", scene.key(":consumers"), "billing") == b"5"


@on_log
async def test_consumers_begin_where_they_are_told_and_go_on_where_they_stood(scene: Scene) -> None:
    await scene.send(*MANY[:10])
    at = (await scene.entries())[0].at
    assert at is not None
    time = (at - timedelta(hours=1)).isoformat().replace("+", "%2B")
    starts = {"oldest": MANY[:10], "now": [], "4": MANY[3:10], time: MANY[:10], "99": []}
    for i, (start, expected) in enumerate(starts.items()):
        assert await handle_all(await scene.feed(f"c{i}", f"&from={start}")) == expected
    await scene.send(*MANY[10:])
    for i in range(len(starts)):
        assert await handle_all(await scene.feed(f"c{i}", "&from=oldest")) == MANY[10:]
    assert [each.cursor for each in await scene.log.consumers(TOPIC)] == [40] * 5


@on_log
async def test_a_consumer_is_seen_when_it_asks_and_noted_every_ten_seconds_at_most(scene: Scene) -> None:
    await scene.log.register(TOPIC, "billing")
    assert (await scene.consumer("billing")).seen_ms is None
    feed = await scene.feed("billing")
    first = (await scene.consumer("billing")).seen_ms
    assert first is not None
    assert first == scene.letters.now_ms()
    state = scene.key("@billing:state")
    for ago_ms, is_noted in ((9_999, False), (10_000, True), (-9_999, False), (-10_000, True)):
        before = first - ago_ms
        await scene.direct.command("HSET", state, "seen", before)
        await claim(feed, 0)
        assert ((await scene.consumer("billing")).seen_ms != before) == is_noted, ago_ms


@on_log
async def test_a_consumer_that_is_away_gets_everything_when_it_is_back(scene: Scene) -> None:
    assert await scene.log.register(TOPIC, "away")
    assert not await scene.log.register(TOPIC, "away", start="now")
    await scene.send(*MANY)
    assert (await scene.consumer("away")).waiting == 40
    assert await handle_all(await scene.feed("away")) == MANY


@on_log
async def test_s7_instances_of_a_consumer_share_and_what_one_dies_with_returns(scene: Scene) -> None:
    dead_one, other = await scene.feed("billing"), await scene.feed("billing")
    await scene.send(*MANY)
    taken = await claim(dead_one, 10, lease_ms=SHORT_MS)
    between = await claim(other, 5)
    assert ids(between) == MANY[10:15]
    await settle(other, *map(done, between))
    assert (await scene.consumer("billing")).cursor == 0
    scene.time.lapse()
    claims = await claim(other)
    assert ids(claims) == MANY[:10] + MANY[15:]
    assert [each.record.lapses for each in claims] == [1] * 10 + [0] * 25
    assert list(await dead_one.settle([done(taken[0])])) == [SettleOutcome.GONE]
    await settle(other, *map(done, claims))
    assert (await scene.consumer("billing")).cursor == 40


@on_log
async def test_a_claim_whose_answer_was_lost_gives_the_same_again(scene: Scene) -> None:
    await scene.send(*MANY)
    feed: Any = await scene.feed("billing")
    first = await claim(feed, 7)
    feed._next, feed._shall_repeat, feed._taken = 1, True, {}
    assert ids(await claim(feed, 7)) == ids(first)
    feed._next, feed._shall_repeat, feed._taken = 1, True, {}
    await scene.direct.command("XTRIM", scene.key(), "MINID", "0-4")
    assert ids(await claim(feed, 7)) == MANY[3:7]
    assert (await scene.consumer("billing")).missed == 3


@on_log
async def test_retries_come_back_to_that_consumer_only_and_do_not_hold_the_cursor(scene: Scene) -> None:
    billing, shipping = await scene.feed("billing"), await scene.feed("shipping")
    await scene.send("a", "b", payload=b"\x00" * 50)
    first, second = await claim(billing)
    await settle(billing, again(scene.letters.now_ms(), first, "no answer", in_ms=SHORT_MS), done(second))
    assert await handle_all(shipping) == ["a", "b"]
    found = await scene.consumer("billing")
    assert (found.cursor, found.retrying) == (2, 1)
    await scene.log.trim(TOPIC, drop_passed=True)
    assert await scene.entries() == []
    scene.time.lapse()
    (retry,) = await claim(await scene.feed("billing"))
    record = retry.record
    assert (record.id, record.attempt, record.last_error) == ("a", 1, "no answer")
    assert record.envelope.payload == b"\x00" * 50
    assert await claim(shipping) == []


@on_log
async def test_s9_an_ordered_consumer_waits_for_what_it_tries_again(scene: Scene) -> None:
    feed = await scene.feed("ledger", "&ordered=true")
    await scene.send("a", "b")
    (first,) = await claim(feed)
    assert await claim(await scene.feed("ledger", "&ordered=true")) == []
    await settle(feed, again(scene.letters.now_ms(), first, in_ms=RETRY_MS))
    assert await claim(feed) == []
    scene.time.until_retry()
    found: list[str] = []
    while claims := await claim(feed):
        found += ids(claims)
        await settle(feed, *map(done, claims))
    assert found == ["a", "b"]


@on_log
async def test_what_is_given_back_unrun_stands_where_it_stood(scene: Scene) -> None:
    feed, other = await scene.feed("billing"), await scene.feed("billing")
    await scene.send(*MANY)
    claims = await claim(feed, 10)
    await settle(feed, *map(release, claims[3:7]))
    assert ids(await claim(other, 6)) == MANY[3:7] + MANY[10:12]


@on_log
async def test_dead_letters_bear_the_consumers_name_and_are_sent_to_it_alone(scene: Scene) -> None:
    billing, shipping = await scene.feed("billing"), await scene.feed("shipping")
    await scene.send("m")
    (one,) = await claim(billing)
    await settle(billing, Dead("m", one.record.revision, one.token, "rejected", 1, "why"))
    (letter,) = await scene.letters.dead_letters()
    envelope = letter.record.envelope
    assert (envelope.lane, envelope.address) == ("redis-log", "orders?consumer=billing")
    assert envelope.id == "m@redis-log:orders?consumer=billing"
    for way in (scene.send, scene.transfer):
        await way(envelope.id, to=envelope.address)
        assert await handle_all(billing) == [envelope.id]
    assert await handle_all(shipping) == ["m"]
    assert await scene.indexes() == [1]


async def give_up(scene: Scene, end: RedisFanoutSource | RedisLog, topic: str, consumer: str) -> None:
    """Take the one message of a consumer, and settle it as dead."""
    opening = end.feed(f"{topic}?consumer={consumer}", uuid4().hex, scene.letters.put_back, scene.letters.now_ms)
    async with opening as feed:
        (one,) = await claim(feed) or await claim(feed)
        await settle(feed, Dead(one.record.id, one.record.revision, one.token, "rejected", 1, "why"))


@on_log
async def test_s2_the_same_id_and_revision_in_several_topics_leave_a_dead_letter_each(scene: Scene) -> None:
    async with (
        RedisFanout(scene.url, namespace=scene.namespace) as fanout,
        RedisFanoutSource(scene.url, namespace=scene.namespace) as source,
        RedisFanoutSink(scene.url, namespace=scene.namespace) as sink,
    ):
        ends: list[tuple[RedisFanoutSource | RedisLog, str, str]]
        ends = [(scene.log, "a/b", "c"), (scene.log, "a", "b/c"), (source, "a/b", "c"), (source, "a", "b/c")]
        for end, topic, consumer in ends:
            if end is source:
                await fanout.register(topic, consumer)
                assert await sink.send([delivery("m", topic, topic.encode())]) == [Sent()]
            else:
                await scene.send("m", to=topic, payload=topic.encode())
            await give_up(scene, end, topic, consumer)
        envelopes = {letter.record.id: letter.record.envelope for letter in await scene.letters.dead_letters()}
    assert {message_id: (each.lane, each.address, each.payload) for message_id, each in envelopes.items()} == {
        "m@redis-log:a/b?consumer=c": ("redis-log", "a/b?consumer=c", b"a/b"),
        "m@redis-log:a?consumer=b/c": ("redis-log", "a?consumer=b/c", b"a"),
        "m@redis-fanout:a/b@c": ("redis-fanout", "a/b@c", b"a/b"),
        "m@redis-fanout:a@b/c": ("redis-fanout", "a@b/c", b"a"),
    }


@pytest.mark.parametrize("letter", ["x", "é"])
def test_the_id_of_a_dead_letter_is_no_longer_than_an_id_may_be(server_url: str, letter: str) -> None:
    @on_log
    async def play(scene: Scene) -> None:
        consumer = letter * 100
        await scene.log.register(TOPIC, consumer)
        for long_id in ("i" * 255, "i" * 254 + "j"):
            await scene.send(long_id)
            await give_up(scene, scene.log, TOPIC, consumer)
        envelopes = [found.record.envelope for found in await scene.letters.dead_letters()]
        letter_ids = {each.id for each in envelopes}
        assert len(letter_ids) == 2
        for each in envelopes:
            assert check_id(each.id) == each.id
            await scene.transfer(each.id, to=each.address)
            await give_up(scene, scene.log, TOPIC, consumer)
        letters = await scene.letters.dead_letters()
        assert (len(letters), {found.record.id for found in letters}) == (4, letter_ids)

    play(server_url)


@on_log
async def test_s2_what_is_for_a_consumer_that_nobody_registered_waits(scene: Scene) -> None:
    sink = await scene.sink()
    to = f"{TOPIC}?consumer=billing"
    assert await sink.send([delivery("m", to)]) == [NotTaken("no such consumer is registered")]
    await scene.direct.apply([Put(new_op(), Envelope("m", "redis-log", to), After(0))])
    with scene.direct.transferring(RedisLog(scene.url, namespace=scene.namespace)) as moves:
        assert (await moves.transfer(Demand(500))).moved == 0
    assert [each.reason for each in await scene.direct.blocked()] == ["no such consumer is registered"]


@on_log
async def test_who_has_left_is_given_nothing_and_leaves_nothing_behind(
    scene: Scene,
) -> None:
    feed = await scene.feed("billing")
    await scene.send(*MANY)
    claims = await claim(feed, 10)
    await settle(feed, again(scene.letters.now_ms(), claims[0], in_ms=60_000), release(claims[1]))
    assert await scene.log.unregister(TOPIC, "billing")
    assert not await scene.log.unregister(TOPIC, "billing")
    assert list(await feed.settle([done(claims[2])])) == [SettleOutcome.GONE]
    assert await claim(feed) == []
    assert await scene.direct.command("KEYS", f"{scene.key()}@*") == []
    await scene.direct.command("DEL", scene.key())
    await scene.log.register(TOPIC, "late")
    assert await scene.log.unregister(TOPIC, "late")
    assert list(await scene.log.topics()) == []


# --- replay -----------------------------------------------------------------------------------------------


@on_log
async def test_a_consumer_goes_back_to_an_index_a_time_or_the_beginning_or_skips(scene: Scene) -> None:
    feed, other = await scene.feed("billing"), await scene.feed("shipping")
    await scene.send(*MANY[:20])
    await asyncio.sleep(0.02)  # a later time, by the server's clock
    await scene.send(*MANY[20:])
    at = (await scene.entries())[20].at
    assert at is not None
    assert await handle_all(feed) == MANY
    assert await scene.log.seek(TOPIC, "billing", 31) == 31
    assert (await scene.consumer("billing")).cursor == 30
    assert await handle_all(feed) == MANY[30:]
    assert await scene.log.seek(TOPIC, "billing", at) == 21
    assert await handle_all(feed) == MANY[20:]
    assert await scene.log.seek(TOPIC, "billing", "oldest") == 1
    assert await handle_all(feed) == MANY
    assert await scene.log.seek(TOPIC, "shipping", "now") == 41
    assert await handle_all(other) == []
    assert await scene.log.seek(TOPIC, "shipping", 999) == 41
    with pytest.raises(TargetError, match="registered"):
        await scene.log.seek(TOPIC, "nobody", 1)


@on_log
async def test_s2_going_elsewhere_loses_nothing_that_is_in_flight_or_tried_again(scene: Scene) -> None:
    feed = await scene.feed("billing")
    await scene.send(*MANY[:6])
    claims = await claim(feed, 3)
    await settle(feed, again(scene.letters.now_ms(), claims[0], in_ms=RETRY_MS), release(claims[1]))
    assert await scene.log.seek(TOPIC, "billing", 6) == 6
    assert (await scene.consumer("billing")).cursor == 1
    await settle(feed, done(claims[2]))
    assert await handle_all(feed) == [MANY[1], MANY[5]]
    scene.time.until_retry()
    assert await handle_all(feed) == [MANY[0]]
    assert (await scene.consumer("billing")).cursor == 6


@on_log
async def test_who_has_no_handler_reads_from_its_cursor_and_commits(scene: Scene) -> None:
    await scene.log.append(TOPIC, [b"p"] * 10)
    await scene.log.register(TOPIC, "report", start=3)
    assert await scene.indexes(consumer="report") == list(range(3, 11))
    assert (await scene.consumer("report")).seen_ms is None
    await scene.log.commit(TOPIC, "report", 7)
    await scene.log.commit(TOPIC, "report", 5)
    assert await scene.indexes(consumer="report") == [8, 9, 10]
    found = await scene.consumer("report")
    assert (found.cursor, found.waiting) == (7, 3)
    assert found.seen_ms is not None
    assert await scene.indexes(consumer="unknown", start=9) == [9, 10]


# --- what is kept -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["send", "transfer"])
def test_the_oldest_beyond_a_number_are_dropped_and_missed_is_told(
    server_url: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    @on_log
    async def play(scene: Scene) -> None:
        feed, away = await scene.feed("billing"), await scene.feed("away")
        await getattr(scene, way)(*MANY[:10], max_messages=10)
        taken = await claim(feed, 4)
        await getattr(scene, way)(*MANY[10:], max_messages=10)
        assert await scene.indexes() == list(range(31, 41))
        found = await scene.consumer("away")
        assert (found.missed, found.waiting) == (30, 10)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "aiodelay.redis"):
            claims = await claim(away)
        assert (ids(claims), [each.missed for each in claims]) == (MANY[30:], [30] + [0] * 9)
        assert "consumer away of topic orders" in caplog.text
        assert "missed 30 messages" in caplog.text
        assert (await scene.consumer("away")).missed == 30
        await settle(feed, *map(done, taken))
        assert await handle_all(feed) == MANY[30:]
        assert (await scene.consumer("billing")).missed == 26

    play(server_url)


@on_log
async def test_what_was_given_back_and_then_dropped_is_missed(scene: Scene) -> None:
    feed = await scene.feed("billing")
    await scene.send(*MANY[:10])
    claims = await claim(feed, 5)
    await settle(feed, *map(release, claims))
    assert await scene.log.trim(TOPIC, max_messages=3) == 7
    claims = await claim(feed) or await claim(feed)
    assert ids(claims) == MANY[7:10]
    assert claims[0].missed == 7
    await settle(feed, *map(release, claims))
    claims = await claim(feed) or await claim(feed)
    assert [(each.record.id, each.missed) for each in claims] == [("m7", 7), ("m8", 0), ("m9", 0)], "nobody read the 7"
    await settle(feed, *map(done, claims))
    assert await claim(feed) == []
    found = await scene.consumer("billing")
    assert (found.missed, found.cursor) == (7, 10)


@on_log
async def test_what_was_dropped_before_a_consumer_had_it_stays_missed_after_a_seek(scene: Scene) -> None:
    feed = await scene.feed("billing")
    await scene.send(*MANY[:10])
    assert await scene.log.trim(TOPIC, max_messages=2) == 8
    assert (await scene.consumer("billing")).missed == 8
    for index in (4, 10, 9, 10):
        assert await scene.log.seek(TOPIC, "billing", index) == index
        assert (await scene.consumer("billing")).missed == 8
    claims = await claim(feed)
    assert [(each.record.id, each.missed) for each in claims] == [("m9", 8)]
    await settle(feed, *map(done, claims))
    assert await scene.log.seek(TOPIC, "billing", 9) == 9
    claims = await claim(feed)
    assert [(each.record.id, each.missed) for each in claims] == [("m8", 0), ("m9", 0)], "they are told already"
    assert (await scene.consumer("billing")).missed == 8


@on_log
async def test_what_a_program_commits_counts_as_read(scene: Scene) -> None:
    await scene.log.append(TOPIC, [b"p"] * 10)
    await scene.log.register(TOPIC, "report")
    assert await scene.indexes(consumer="report") == list(range(1, 11))
    assert await scene.log.trim(TOPIC, max_messages=2) == 8
    await scene.log.commit(TOPIC, "report", 4)
    assert (await scene.consumer("report")).missed == 4
    await scene.log.commit(TOPIC, "report", 10)
    assert (await scene.consumer("report")).missed == 0


@on_log
async def test_the_oldest_are_dropped_by_age_and_all_of_them_if_they_are_too_old(scene: Scene) -> None:
    await scene.send_ago(hours=2, ids=MANY[:10])
    await scene.send_ago(hours=1, ids=MANY[10:20])
    assert await scene.log.trim(TOPIC, max_age="90m") == 10
    assert await scene.indexes() == list(range(11, 21))
    assert await scene.log.trim(TOPIC, max_age="30m") == 10
    topic = await scene.topic()
    assert (topic.first, topic.last) == (21, 20)
    await scene.send("last", max_age="1h")
    assert await scene.indexes() == [21]


@on_log
async def test_what_all_have_passed_is_dropped_when_something_is_appended(scene: Scene) -> None:
    feed, slow = await scene.feed("billing"), await scene.feed("slow")
    await scene.send(*MANY[:20], drop_passed=True)
    assert await handle_all(feed) == MANY[:20]
    claims = await claim(slow, 10)
    await settle(slow, *map(done, claims[:5]), *map(done, claims[6:]))
    await scene.send(*MANY[20:], drop_passed=True)
    assert await scene.indexes() == list(range(6, 41))
    await settle(slow, done(claims[5]))
    assert await handle_all(slow) == MANY[10:]
    assert (await scene.consumer("slow")).missed == 0


@on_log
async def test_what_one_step_drops_is_bounded_and_trimming_goes_on(scene: Scene) -> None:
    for _ in range(5):
        await scene.log.append(TOPIC, [b"p"] * 500)
    dropped: list[int] = []

    async def trim() -> None:
        dropped.append(await scene.log.trim(TOPIC, max_messages=10))

    trims = await called_by_scripts(scene.url, "XTRIM", trim)
    firsts = [1, *(int(words[3].removeprefix("0-")) for words in trims)]
    assert dropped == [2490]
    assert max(after - before for before, after in pairwise(firsts)) <= 1000
    assert await scene.indexes() == list(range(2491, 2501))


@on_log
async def test_large_entries_are_taken_without_reading_those_behind_them(scene: Scene) -> None:
    await scene.log.append(TOPIC, [bytes(600_000)] * 20)
    feed = await scene.feed("billing")
    read = await called_by_scripts(scene.url, "XRANGE", lambda: claim(feed))
    assert 1 <= sum(int(words[-1]) for words in read) <= 2


@on_log
async def test_holes_that_others_have_made_are_missed(scene: Scene) -> None:
    feed = await scene.feed("billing")
    await scene.send(*MANY[:10])
    await scene.direct.command("XDEL", scene.key(), "0-3", "0-4", "0-9")
    assert ids(await claim(feed)) == [*MANY[:2], *MANY[4:8], MANY[9]]
    assert (await scene.consumer("billing")).missed == 3


@pytest.mark.valkey_too
@on_log
async def test_l2_who_waits_is_woken_by_what_is_appended_and_what_is_given_back(scene: Scene) -> None:
    feed, other = await scene.feed("billing"), await scene.feed("billing")

    async def woken(doing: Callable[[], Awaitable[object]]) -> None:
        feed.clear()
        assert await claim(feed) == []
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(feed.wait(until_ms=None))
            await asyncio.sleep(0.05)  # it must wait, and not come back at once
            assert not waiting.done()
            await doing()
            async with asyncio.timeout(60):
                await waiting

    await woken(lambda: scene.log.append(TOPIC, [b"p"]))
    claims = await claim(other)
    await woken(lambda: other.settle([release(each) for each in claims]))
    assert [each.claims != [] for each in [await claimed(feed)]] == [True]


@on_log
async def test_done_twice_moves_nothing_twice(scene: Scene) -> None:
    feed = await scene.feed("billing")
    await scene.send(*MANY[:3])
    claims = await claim(feed)
    ends = [Done(each.record.id, each.record.revision, each.token) for each in claims[1:]]
    assert list(await feed.settle(ends)) == [SettleOutcome.SETTLED] * 2
    assert list(await feed.settle(ends)) == [SettleOutcome.GONE] * 2
    assert (await scene.consumer("billing")).cursor == 0

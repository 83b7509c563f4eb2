"""Taking from a list, call by call: leases, returns, suspects, poison, and messages put back into a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from functools import wraps
from itertools import count
from uuid import uuid4

import pytest
from msgspec.structs import replace

from aiodelay.backends.redis.lists.list_consumer import ListConsumer
from aiodelay.backends.redis.records.elements import decode_element, encode_element
from aiodelay.core.transitions import RIGHTING_MS, delivery_id, token_counter, token_for
from aiodelay.core.values import (
    After,
    Again,
    Claim,
    Dead,
    Delivery,
    Demand,
    Done,
    Envelope,
    Late,
    Put,
    PutBack,
    Query,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    Stored,
)
from aiodelay.errors import StoreDamagedError, StoreUnavailableError
from aiodelay.memory import MemoryStore
from aiodelay.ports import Feed
from aiodelay.redis import RedisListSource, RedisStore
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.faults import FaultyStore
from tests.support.bad_inputs import LIST_ELEMENTS
from tests.support.servers import Found, redis_servers

LANE = "orders"
SHORT_MS = 60
_ALL, _AT_ONCE = Query(limit=1000), After(0)
requests = count(1)


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def server_url(request: pytest.FixtureRequest, shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(request.param)


class Scene:
    """A list, consumers that take from it, and a store of theirs. Only the test lets the time of both pass."""

    def __init__(self, url: str, opened: AsyncExitStack) -> None:
        self.url, self._opened = url, opened
        self.key = f"list-{uuid4().hex}"
        self.clock = VirtualClock(start=datetime.now(UTC))
        self.store = FaultyStore(MemoryStore(clock=self.clock))
        self._feeds: list[ListConsumer] = []
        self.direct = RedisStore(url, namespace=uuid4().hex)

    async def open(self) -> None:
        await self._opened.enter_async_context(self.direct)
        self.source = await self._opened.enter_async_context(RedisListSource(self.url))

    async def feed(self, consumer: str = "", *, options: str = "") -> Feed:
        async def put_back(messages: Sequence[PutBack]) -> Sequence[Stored]:
            return await self.store.put_back(messages)  # looked up at each call: tests replace it

        opening = self.source.feed(f"{self.key}{options}", consumer or uuid4().hex, put_back, self.store.now_ms)
        feed = await self._opened.enter_async_context(opening)
        assert isinstance(feed, ListConsumer)
        feed._server_ms = self.clock.now_ms()
        self._feeds.append(feed)
        return feed

    def lapse(self, ms: int = SHORT_MS) -> None:
        """Let time pass, as a rule until short leases have ended."""
        self.clock.move(ms)
        for feed in self._feeds:
            feed._server_ms = self.clock.now_ms()

    async def push(self, *elements: bytes) -> None:
        await self.direct.command("RPUSH", self.key, *elements)

    async def elements(self) -> list[bytes]:
        found: list[bytes] = await self.direct.command("LRANGE", self.key, 0, -1)
        return found

    async def ids(self) -> list[str]:
        return [decode_element(each, lane=LANE).record.id for each in await self.elements()]

    async def leftovers(self) -> list[bytes]:
        """Return every key that the list's consumers have left."""
        found: list[bytes] = await self.direct.command("KEYS", f"{{{self.key}}}*")
        return found

    async def dead(self) -> list[tuple[str, str]]:
        return [(each.record.id, each.reason) for each in await self.store.dead_letters()]


def on_list(test: Callable[[Scene], Awaitable[None]]) -> Callable[[str], None]:
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


def element(message_id: str, payload: bytes = b"payload", *, attempt: int = 1, due_ms: int = 1000) -> bytes:
    envelope = Envelope(message_id, "redis-list", "x", payload=payload)
    return encode_element(Delivery(envelope, "", due_ms, 5, attempt, 0)) + (2000).to_bytes(8, "big")


async def claim(feed: Feed, messages: int = 500, *, max_bytes: int = 1 << 20, lease_ms: int = 15_000) -> list[Claim]:
    claimed = await feed.claim({LANE: Demand(messages, max_bytes)}, request=f"r{next(requests)}", lease_ms=lease_ms)
    return list(claimed.claims)


def ids(claims: list[Claim]) -> list[str]:
    return [each.record.id for each in claims]


def done(each: Claim) -> Done:
    return Done(each.record.id, each.record.revision, each.token)


def again(each: Claim, due_ms: int, attempt: int = 1, error: str | None = "e") -> Again:
    return Again(each.record.id, each.record.revision, each.token, due_ms, attempt, error)


def dead(each: Claim) -> Dead:
    return Dead(each.record.id, each.record.revision, each.token, "rejected", 1, "why")


def renewal(each: Claim, ends_ms: int) -> Renewal:
    return Renewal(each.record.id, each.record.revision, each.token, token_for(ends_ms, token_counter(each.token)))


# --- taking and settling ----------------------------------------------------------------------------------


@on_list
async def test_elements_are_taken_in_order_as_many_as_asked_for(scene: Scene) -> None:
    feed = await scene.feed()
    await scene.push(*[element(f"m{i}") for i in range(40)])
    taken = [ids(await claim(feed, most)) for most in (3, 35, 9, 9)]
    assert [name for each in taken for name in each] == [f"m{i}" for i in range(40)]
    assert [len(each) for each in taken] == [3, 35, 2, 0]


@on_list
async def test_a_claim_says_for_whom_it_is_and_how_long_it_waited(scene: Scene) -> None:
    feed = await scene.feed()
    await scene.push(element("m", attempt=3))
    (one,) = await claim(feed)
    assert (one.record.envelope.lane, one.record.envelope.address, one.record.attempt) == (LANE, "", 2)
    assert one.queued_ms is not None
    assert one.queued_ms > 1_000_000
    assert (one.record.revision, one.record.due_ms) == (5, 1000)


@on_list
async def test_no_more_bytes_than_asked_for_and_one_larger_element_alone(scene: Scene) -> None:
    feed = await scene.feed()
    sizes = [("a", 100), ("b", 100), ("large", 5000), ("c", 100)]
    await scene.push(*[element(name, bytes(size)) for name, size in sizes])
    assert [ids(await claim(feed, max_bytes=450)) for _ in range(4)] == [["a", "b"], ["large"], ["c"], []]


@on_list
async def test_what_is_settled_leaves_nothing_behind(scene: Scene) -> None:
    feed = await scene.feed()
    await scene.push(*[element(f"m{i}") for i in range(3)])
    claims = await claim(feed)
    assert len(await scene.leftovers()) == 2
    settlements = [done(each) for each in reversed(claims)]
    assert await feed.settle(settlements) == [SettleOutcome.SETTLED] * 3
    assert await feed.settle(settlements) == [SettleOutcome.GONE] * 3
    assert await scene.leftovers() == []
    assert await scene.elements() == []


@on_list
async def test_a_claim_whose_answer_was_lost_is_given_again(scene: Scene) -> None:
    feed = await scene.feed()
    await scene.push(element("a"), element("b"))
    run = feed._run  # type: ignore[attr-defined]

    async def lose(*arguments: object) -> object:
        await run(*arguments)
        raise StoreUnavailableError("list", "lost")

    feed._run = lose  # type: ignore[attr-defined]
    with pytest.raises(StoreUnavailableError):
        await claim(feed, 1)
    feed._run = run  # type: ignore[attr-defined]
    assert ids(await claim(feed, 1)) == ["a"]
    assert ids(await claim(feed, 1)) == ["b"]
    assert await scene.elements() == []


@on_list
async def test_s2_the_end_of_poison_whose_answer_was_lost_costs_no_other_element(scene: Scene) -> None:
    feed = await scene.feed()
    await scene.push(b"garbage", element("a"), b"rubbish", element("b"), element("c"), element("d"), element("e"))
    run = feed._run  # type: ignore[attr-defined]

    async def lose(script: str, *arguments: object) -> object:
        answer = await run(script, *arguments)
        if script == "drop":
            raise StoreUnavailableError("list", "lost")
        return answer

    feed._run = lose  # type: ignore[attr-defined]
    with pytest.raises(StoreUnavailableError):
        await claim(feed, 5)
    feed._run = run  # type: ignore[attr-defined]
    claims = [each for _ in range(2) for each in await claim(feed, 5)]
    assert ids(claims) == ["a", "b", "c", "d", "e"]
    assert await feed.settle([done(each) for each in claims]) == [SettleOutcome.SETTLED] * 5
    assert await scene.leftovers() == []


@on_list
async def test_the_same_message_pushed_twice_is_settled_twice(scene: Scene) -> None:
    feed = await scene.feed()
    await scene.push(element("m"), element("m"))
    claims = await claim(feed)
    assert await feed.settle([done(claims[0])]) == [SettleOutcome.SETTLED]
    assert await feed.settle([again(claims[1], 10**14)]) == [SettleOutcome.SETTLED]
    assert await scene.leftovers() == []


@on_list
async def test_a_copy_taken_while_another_is_settled_has_its_own_end(scene: Scene) -> None:
    feed = await scene.feed()
    await scene.push(element("m"), element("m"))
    (first,) = await claim(feed, 1)
    settling = asyncio.create_task(feed.settle([done(first)]))  # its call is under way once it runs
    (second,) = await claim(feed, 1)
    assert await settling == [SettleOutcome.SETTLED]
    assert await feed.settle([done(second)]) == [SettleOutcome.SETTLED]
    assert await scene.leftovers() == []


@on_list
async def test_what_is_given_back_unrun_stands_where_it_stood(scene: Scene) -> None:
    feed = await scene.feed()
    await scene.push(*[element(f"m{i}") for i in range(5)])
    before = await scene.elements()
    claims = await claim(feed, 3)
    released = [again(each, each.record.due_ms, 0, None) for each in claims]
    assert await feed.settle([released[2], released[0], released[1]]) == [SettleOutcome.SETTLED] * 3
    assert await scene.elements() == before
    assert await scene.leftovers() == []


@on_list
async def test_l1_large_elements_that_are_given_back_at_once_all_stand_where_they_stood(scene: Scene) -> None:
    feed = await scene.feed()
    await scene.push(*[element(f"m{i}", bytes(400_000)) for i in range(6)])
    before = await scene.elements()
    claims = [each for _ in range(3) for each in await claim(feed)]
    released = [again(each, each.record.due_ms, 0, None) for each in claims]
    assert await feed.settle(released) == [SettleOutcome.SETTLED] * 6
    assert await scene.elements() == before
    assert await scene.leftovers() == []


# --- leases -----------------------------------------------------------------------------------------------


@on_list
async def test_l1_what_a_dead_consumer_had_taken_returns_in_order(scene: Scene) -> None:
    dead_one, other = await scene.feed(), await scene.feed()
    await scene.push(*[element(f"m{i}") for i in range(5)])
    taken = await claim(dead_one, 3, lease_ms=SHORT_MS)
    waiting = await other.claim({LANE: Demand(0)}, request="r", lease_ms=15_000)
    assert waiting.next_due_ms is not None
    assert 0 < waiting.next_due_ms - waiting.now_ms <= SHORT_MS
    scene.lapse()
    claims = await claim(other)
    assert ids(claims) == [f"m{i}" for i in range(5)]
    assert [each.record.lapses for each in claims] == [1, 1, 1, 0, 0]
    assert await dead_one.settle([done(taken[0]), again(taken[1], 10**14)]) == [SettleOutcome.GONE] * 2
    assert await dead_one.renew([renewal(taken[2], scene.store.now_ms() + 1000)]) == [RenewOutcome.LOST]
    assert list(await scene.store.search(_ALL)) == []


@on_list
async def test_s7_what_was_taken_from_a_list_returns_to_no_other(scene: Scene) -> None:
    dead_one = await scene.feed()
    await scene.push(element("m"))
    await claim(dead_one, lease_ms=SHORT_MS)
    scene.lapse()
    key, scene.key = scene.key, f"{{{scene.key}}}"
    assert await claim(await scene.feed()) == []
    scene.key = key
    assert ids(await claim(await scene.feed())) == ["m"]


@on_list
async def test_l1_a_renewed_lease_holds_for_all_that_was_taken(scene: Scene) -> None:
    feed, other = await scene.feed(), await scene.feed()
    await scene.push(element("a"), element("b"))
    claims = await claim(feed, lease_ms=SHORT_MS)
    assert await feed.renew([renewal(claims[0], scene.store.now_ms() + 15_000)]) == [RenewOutcome.RENEWED]
    scene.lapse()
    assert await claim(other) == []
    assert await feed.settle([done(each) for each in claims]) == [SettleOutcome.SETTLED] * 2


@on_list
async def test_l1_a_lease_that_ends_too_far_ahead_is_left_to_its_holder_for_20_seconds(scene: Scene) -> None:
    dead_one, other = await scene.feed("dead"), await scene.feed()
    await scene.push(element("m"))
    await claim(dead_one)
    consumers = f"{{{scene.key}}}:aiodelay:consumers"
    await scene.direct.command("ZADD", consumers, 10**14, "dead")
    assert await claim(other) == []
    ends_ms = int(float(await scene.direct.command("ZSCORE", consumers, "dead")))
    assert 0 < ends_ms - scene.store.now_ms() <= RIGHTING_MS
    await scene.direct.command("ZADD", consumers, ends_ms - RIGHTING_MS, "dead")
    assert ids(await claim(other)) == ["m"]


@pytest.mark.valkey_too
@on_list
async def test_l1_more_than_one_script_may_move_returns_step_by_step_in_order(scene: Scene) -> None:
    dead_one, other = await scene.feed(), await scene.feed()
    for first in range(0, 1300, 100):
        await scene.push(*[element(f"m{first + i:04}") for i in range(100)])
    while await claim(dead_one, lease_ms=SHORT_MS):
        pass
    scene.lapse()
    for _ in range(3):
        await other.claim({LANE: Demand(0)}, request="r", lease_ms=15_000)
    assert await scene.ids() == [f"m{i:04}" for i in range(1300)]


@on_list
async def test_l1_what_one_lost_and_took_again_is_settled_as_it_was_taken_last(scene: Scene) -> None:
    feed = await scene.feed()
    await scene.push(element("m"))
    (lost,) = await claim(feed, lease_ms=SHORT_MS)
    scene.lapse()
    (held,) = await claim(feed)
    ends_ms = scene.store.now_ms() + 15_000
    assert await feed.renew([renewal(held, ends_ms), renewal(lost, ends_ms)]) == [
        RenewOutcome.RENEWED,
        RenewOutcome.LOST,
    ]
    assert await feed.settle([done(lost), done(held)]) == [SettleOutcome.GONE, SettleOutcome.SETTLED]
    assert await scene.leftovers() == []


@on_list
async def test_l1_what_a_failover_brought_back_is_not_kept_by_one_who_knows_nothing_of_it(scene: Scene) -> None:
    feed = await scene.feed("busy")
    await scene.push(element("m"), element("running"))
    first, running = await claim(feed)
    taken = f"{{{scene.key}}}:aiodelay:taken:busy"
    before: list[bytes] = await scene.direct.command("HGETALL", taken)
    assert await feed.settle([again(first, first.record.due_ms, 0, None)]) == [SettleOutcome.SETTLED]
    await scene.direct.command("DEL", scene.key)  # a replica that had not heard of the release is the server now
    fields = before if isinstance(before, list) else [each for pair in before.items() for each in pair]
    await scene.direct.command("HSET", taken, *fields)
    while not (claims := await claim(feed)):
        assert await feed.renew([renewal(running, scene.store.now_ms() + 15_000)]) == [RenewOutcome.RENEWED]
    assert ids(claims) == ["m"]
    assert await feed.settle([done(claims[0]), done(running)]) == [SettleOutcome.SETTLED] * 2
    assert await scene.leftovers() == []


@on_list
async def test_s7_an_element_has_one_owner(scene: Scene) -> None:
    feeds = [await scene.feed() for _ in range(4)]
    await scene.push(*[element(f"m{i}") for i in range(200)])
    taken: list[list[Claim]] = []
    for _ in range(8):
        taken += await asyncio.gather(*[claim(feed, 7) for feed in feeds])
    assert sorted(name for each in taken for name in ids(each)) == sorted(f"m{i}" for i in range(200))


# --- suspects and killers ---------------------------------------------------------------------------------


@on_list
async def test_l5_suspects_are_taken_alone_and_lapse_once_more_after_their_trial(scene: Scene) -> None:
    await scene.push(element("fine"), element("suspect"))
    feed = await scene.feed()
    (fine,) = await claim(feed, 1)
    for _ in range(2):
        await claim(await scene.feed(), lease_ms=SHORT_MS)
        scene.lapse()
    await scene.push(element("next"))
    (alone,) = await claim(feed)
    assert (alone.record.id, alone.record.alone, alone.record.lapses) == ("suspect", True, 2)
    ended = replace(renewal(alone, scene.store.now_ms() + SHORT_MS), ends_trial=True)
    assert await feed.renew([ended]) == [RenewOutcome.RENEWED]
    await feed.settle([done(fine)])
    scene.lapse()
    other = await scene.feed()
    (again_,) = await claim(other)
    state = (again_.record.id, again_.record.alone, again_.record.lapses, again_.record.kills)
    assert state == ("suspect", True, 3, 0)
    (beside,) = await claim(other)
    assert await other.settle([done(again_), done(beside)]) == [SettleOutcome.SETTLED] * 2


@on_list
async def test_l5_a_suspect_is_not_taken_beside_others(scene: Scene) -> None:
    await scene.push(element("suspect"))
    for _ in range(2):
        await claim(await scene.feed(), lease_ms=SHORT_MS)
        scene.lapse()
    await scene.direct.command("LPUSH", scene.key, element("before"))
    feed = await scene.feed()
    await feed.claim({LANE: Demand(0)}, request="r", lease_ms=15_000)
    await scene.direct.command("LMOVE", scene.key, scene.key, "LEFT", "RIGHT")
    assert [ids(await claim(feed)) for _ in range(2)] == [["before"], ["suspect"]]


# --- what goes back to the store --------------------------------------------------------------------------


@on_list
async def test_a_retry_goes_through_the_store_under_the_same_delivery_id(scene: Scene) -> None:
    feed = await scene.feed()
    await scene.push(element("m", attempt=2))
    (one,) = await claim(feed)
    due_ms = scene.store.now_ms() + 60_000
    assert await feed.settle([again(one, due_ms, 2, "no answer")]) == [SettleOutcome.SETTLED]
    (snapshot,) = await scene.store.search(_ALL)
    record = snapshot.record
    assert (delivery_id(record), record.attempt, record.last_error) == (delivery_id(one.record), 2, "no answer")
    assert (record.envelope.lane, snapshot.next_attempt_ms) == (LANE, due_ms)
    assert await scene.leftovers() == []


@on_list
async def test_a_dead_letter_goes_to_the_store(scene: Scene) -> None:
    feed = await scene.feed()
    await scene.push(element("m"))
    assert await feed.settle([dead(each) for each in await claim(feed)]) == [SettleOutcome.SETTLED]
    (letter,) = await scene.store.dead_letters()
    assert (letter.record.id, letter.reason, letter.record.last_error) == ("m", "rejected", "why")
    assert await scene.elements() == []


@on_list
async def test_s2_what_the_store_did_not_take_stays_with_the_list(scene: Scene) -> None:
    feed = await scene.feed()
    await scene.push(element("a"), element("b"))
    claims = await claim(feed)
    failing = scene.store.put_back

    async def fail(messages: Sequence[PutBack]) -> Sequence[Stored]:
        await failing(messages)
        raise StoreUnavailableError("memory", "lost")

    scene.store.put_back = fail  # type: ignore[method-assign]
    settlements: list[Settlement] = [again(claims[0], 10**14), dead(claims[1])]
    with pytest.raises(StoreUnavailableError):
        await feed.settle(settlements)
    assert len(await scene.leftovers()) == 2
    scene.store.put_back = failing  # type: ignore[method-assign]
    assert await feed.settle(settlements) == [SettleOutcome.SETTLED] * 2
    assert len(await scene.store.search(_ALL)) == 1
    assert await scene.dead() == [("b", "rejected")]


@pytest.mark.parametrize("policy", [Late.drop("1h"), Late.dead_letter("1h")], ids=["drop", "dead letter"])
def test_what_is_too_late_is_not_given_out(server_url: str, policy: Late) -> None:
    async def play(scene: Scene) -> None:
        await scene.direct.apply(
            [
                Put(bytes([i] * 8), Envelope(name, "redis-list", scene.key), _AT_ONCE, late=late)
                for i, (name, late) in enumerate([("late", policy), ("fine", Late.drop("1d"))], 1)
            ]
        )
        with scene.direct.transferring(scene.direct.sinks[0]) as moves:
            await moves.transfer(Demand(500))
        scene.lapse(2 * 3_600_000)
        assert ids(await claim(await scene.feed())) == ["fine"]
        assert await scene.dead() == ([("late", "late")] if policy.action == 2 else [])
        assert await scene.elements() == []

    on_list(play)(server_url)


# --- poison, raw, wrong types -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(LIST_ELEMENTS))
def test_l5_an_element_that_cannot_be_read_is_a_dead_letter_and_stops_nobody(server_url: str, kind: str) -> None:
    async def play(scene: Scene) -> None:
        feed = await scene.feed()
        await scene.push(element("before"), LIST_ELEMENTS[kind], element("after"))
        claims = await claim(feed)
        if kind == "a series":  # the flag alone makes no series: it has no rule
            assert ids(claims) == ["before", "s", "after"]
            return
        assert ids(claims) == ["before", "after"]
        (letter,) = await scene.store.dead_letters()
        assert (letter.reason, letter.record.envelope.payload) == ("undecodable", LIST_ELEMENTS[kind])
        assert letter.record.last_error is not None
        assert letter.record.last_error.startswith("cannot be read: ")
        advice = f"; what other programs push needs source='redis-list:{scene.key}?format=raw'"
        assert letter.record.last_error.endswith(advice) is (kind != "a newer format")
        assert await feed.settle([done(each) for each in claims]) == [SettleOutcome.SETTLED] * 2
        assert await scene.leftovers() == []

    on_list(play)(server_url)


@on_list
async def test_l5_a_push_time_that_is_none_is_not_read(scene: Scene) -> None:
    feed = await scene.feed()
    await scene.push(element("text")[:-11] + b"\xa1q\xa5later", element("none")[:-11] + b"\xa1q\xc0", element("good"))
    assert [each.queued_ms is None for each in await claim(feed)] == [True, True, False]


@on_list
async def test_l5_poison_stays_with_the_list_until_the_store_has_it(scene: Scene) -> None:
    feed = await scene.feed()
    await scene.push(b"garbage", element("m"))
    working = scene.store.put_back

    async def refuse(messages: Sequence[PutBack]) -> Sequence[Stored]:
        raise StoreUnavailableError("memory", "away")

    async def lose_the_answer(messages: Sequence[PutBack]) -> Sequence[Stored]:
        await working(messages)
        raise StoreUnavailableError("memory", "lost")

    for failure in (refuse, lose_the_answer):
        scene.store.put_back = failure  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailableError):
            await claim(feed)
    scene.store.put_back = working  # type: ignore[method-assign]
    assert ids(await claim(feed)) == ["m"]
    assert len(await scene.dead()) == 1


@on_list
async def test_raw_elements_are_payloads(scene: Scene) -> None:
    feed = await scene.feed(options="?format=raw")
    await scene.push(b"one", b"one", b"\x00\xff", b"")
    claims = await claim(feed)
    assert [each.record.envelope.payload for each in claims] == [b"one", b"one", b"\x00\xff", b""]
    assert {each.queued_ms for each in claims} == {None}
    assert len({each.record.id for each in claims}) == 4
    assert await feed.settle([done(claims[1]), again(claims[0], 10**14)]) == [SettleOutcome.SETTLED] * 2
    (snapshot,) = await scene.store.search(_ALL)
    assert snapshot.record.envelope.payload == b"one"


@on_list
async def test_a_key_that_is_no_list_is_refused_with_the_reason(scene: Scene) -> None:
    feed = await scene.feed()
    await scene.direct.command("SET", scene.key, "no list")
    with pytest.raises(StoreDamagedError, match=rf"list {scene.key} at .* cannot be used: .*'{scene.key}'.*WRONGTYPE"):
        await claim(feed)
    assert await scene.direct.command("GET", scene.key) == b"no list"


# --- waiting ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def waiting(feed: Feed) -> AsyncIterator[asyncio.Task[None]]:
    feed.clear()
    assert await claim(feed) == []
    async with asyncio.TaskGroup() as tasks:
        waiter = tasks.create_task(feed.wait(until_ms=None))
        await asyncio.sleep(0.05)  # it must wait, and not come back at once
        assert not waiter.done()
        yield waiter


@pytest.mark.valkey_too
@on_list
async def test_l2_a_push_by_anybody_ends_the_wait_of_all_and_takes_nothing(scene: Scene) -> None:
    first, second = await scene.feed(), await scene.feed()
    async with asyncio.timeout(60), waiting(first), waiting(second):
        await scene.push(element("m"))
    assert await scene.ids() == ["m"]
    assert sorted(ids([*await claim(first), *await claim(second)])) == ["m"]


@pytest.mark.valkey_too
@on_list
async def test_l2_a_wait_blocks_on_the_server_and_does_not_poll(scene: Scene) -> None:
    feed = await scene.feed()
    async with waiting(feed) as waiter:
        before = await _calls(scene)
        await asyncio.sleep(0.6)  # commands are counted meanwhile
        assert await _calls(scene) - before <= 3  # those that count
        await scene.push(element("m"))
        await asyncio.wait([waiter], timeout=20)
        assert waiter.done()


@on_list
async def test_l2_a_cut_connection_is_made_again(scene: Scene) -> None:
    feed = await scene.feed()
    async with asyncio.timeout(60), waiting(feed):
        await scene.direct.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    feed.clear()
    for _ in range(3):
        try:
            assert await claim(feed) == []
        except StoreUnavailableError:
            await asyncio.sleep(0.2)  # as a dispatcher pauses after an error
    async with asyncio.timeout(60), waiting(feed):
        await asyncio.sleep(0.5)  # it must have come to wait on the server again
        await scene.push(element("m"))
    assert ids(await claim(feed)) == ["m"]


@on_list
async def test_l2_wake_ends_a_wait(scene: Scene) -> None:
    feed = await scene.feed()
    async with asyncio.timeout(60), waiting(feed):
        feed.wake()


async def _calls(scene: Scene) -> int:
    info = (await scene.direct.command("INFO", "stats")).decode()
    return int(info.partition("total_commands_processed:")[2].split("\r")[0])

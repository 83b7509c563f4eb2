"""Random appending, taking, settling, joining, leaving, seeking and trimming, compared with a model of a log."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeVar
from uuid import uuid4

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Again, Claim, Delivery, Demand, Done, Envelope, Put, Sent, SettleOutcome
from aiodelay.memory import MemoryStore
from aiodelay.ports import Feed
from aiodelay.redis import RedisLog, RedisStore
from tests.stateful.test_store_machine import WALKS
from tests.support.servers import redis_servers, serving

T = TypeVar("T")
NAMES = ("billing", "shipping", "mail")
LANE, TOPIC = "order", "orders"
names, sizes, indexes = st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 40)
Start: TypeAlias = Literal["oldest", "now"] | int
words: tuple[Start, ...] = ("oldest", "now")
starts = st.one_of(st.sampled_from(words), indexes)


class Held(NamedTuple):
    place: int
    claim: Claim


class Consumer:
    """The model of a consumer: where it goes on, what was given back, what its one instance holds, what it missed."""

    def __init__(self, next_index: int) -> None:
        self.next = next_index
        self.back: deque[int] = deque()
        self.held: dict[int, Held] = {}
        self.open: set[int] = set()
        self.missed = self.taken = 0

    @property
    def cursor(self) -> int:
        return min(self.open | {self.next}) - 1


class LogMachine(RuleBasedStateMachine):
    """One instance per consumer takes; the model knows of every index what its entry was called."""

    url: ClassVar[str]
    max_messages: ClassVar[int] = 0
    drop_passed: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.runner, self.opened = asyncio.Runner(), AsyncExitStack()
        self.namespace = uuid4().hex
        self.model: dict[str, Consumer] = {}
        self.feeds: dict[str, Feed] = {}
        self.ids: list[str] = []
        self.first = 1
        self.run(self._open())

    @property
    def last(self) -> int:
        return len(self.ids)

    def run(self, doing: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(doing)

    async def _open(self) -> None:
        self.letters = MemoryStore()
        self.store = RedisStore(self.url, namespace=self.namespace)
        limits = {"max_messages": self.max_messages, "drop_passed": self.drop_passed}
        self.log = RedisLog(self.url, namespace=self.namespace, **limits)  # type: ignore[arg-type]
        for each in (self.letters, self.store, self.log):
            await self.opened.enter_async_context(each)

    def teardown(self) -> None:
        self.run(self.opened.aclose())
        self.runner.close()

    def index_of(self, start: Start) -> int:
        wanted = {"oldest": self.first, "now": self.last + 1}.get(str(start), start)
        assert isinstance(wanted, int)
        return min(wanted, self.last + 1)

    # --- who is there -------------------------------------------------------------------------------------

    @rule(name=names, start=starts)
    def joins(self, name: str, start: Start) -> None:
        is_new = name not in self.model
        assert self.run(self.log.register(TOPIC, name, start=start)) is is_new
        if is_new:
            self.model[name] = Consumer(self.index_of(start))

    @rule(name=names)
    def leaves(self, name: str) -> None:
        assert self.run(self.log.unregister(TOPIC, name)) is (name in self.model)
        gone = self.model.pop(name, None)
        feed = self.feeds.pop(name, None)
        if gone is not None and feed is not None and gone.held:
            ends = [Done(c.record.id, c.record.revision, c.token) for _, c in gone.held.values()]
            assert set(self.run(feed.settle(ends))) == {SettleOutcome.GONE}

    @rule(name=names, start=starts)
    def goes_elsewhere(self, name: str, start: Start) -> None:
        if name in self.model:
            index = self.index_of(start)
            self.model[name].missed += max(min(index, self.first) - self.model[name].next, 0)
            self.model[name].next = index
            assert self.run(self.log.seek(TOPIC, name, start)) == self.model[name].next

    @rule(name=names, index=indexes)
    def commits(self, name: str, index: int) -> None:
        if name in self.model:
            self.run(self.log.commit(TOPIC, name, index))
            self.model[name].next = max(self.model[name].next, self.index_of(index + 1))

    # --- messages -----------------------------------------------------------------------------------------

    def appended(self, ids: list[str]) -> None:
        self.ids += ids
        self.dropped(self.max_messages, passed=self.drop_passed)

    def dropped(self, most: int, *, passed: bool) -> None:
        if most:
            self.first = max(self.first, self.last - most + 1)
        if passed and self.model:
            slowest = min(each.cursor for each in self.model.values())
            self.first = max(self.first, min(slowest + 1, self.last + 1))

    def new_ids(self, n: int) -> list[str]:
        return [f"m{i}" for i in range(self.last, self.last + n)]

    @rule(n=sizes, again=st.booleans())
    def is_sent(self, n: int, again: bool) -> None:
        ids = self.new_ids(n)
        batch = [Delivery(Envelope(i, "redis-log", TOPIC), f"{i}/5/1000", 1000, 5, 1, 0) for i in ids]
        for _ in range(1 + again):
            assert list(self.run(self.log.send(batch))) == [Sent()] * n
        self.appended(ids)

    @rule(n=sizes)
    def is_transferred(self, n: int) -> None:
        ids = self.new_ids(n)

        async def transfer() -> int:
            await self.store.apply([Put(new_op(), Envelope(i, "redis-log", TOPIC), After(0)) for i in ids])
            with self.store.transferring(self.log) as moves:
                return (await moves.transfer(Demand(500))).moved

        assert self.run(transfer()) == n
        self.appended(ids)

    @rule(most=st.integers(0, 10), passed=st.booleans())
    def is_trimmed(self, most: int, passed: bool) -> None:
        before = self.first
        self.dropped(most, passed=passed)
        trimmed = self.run(self.log.trim(TOPIC, max_messages=most, drop_passed=passed))
        assert trimmed == self.first - before

    @rule(name=names, n=sizes)
    def takes(self, name: str, n: int) -> None:
        if name in self.model:
            self.run(self._take(name, n))

    async def _take(self, name: str, n: int) -> None:
        model, feed = self.model[name], self.feeds.get(name)
        if feed is None:
            opening = self.log.feed(f"{TOPIC}?consumer={name}", uuid4().hex, self.letters.put_back, self.letters.now_ms)
            feed = self.feeds[name] = await self.opened.enter_async_context(opening)
        claims = (await feed.claim({LANE: Demand(n)}, request="r", lease_ms=600_000)).claims
        expected: list[int] = []
        while model.back and len(expected) < n:
            index = model.back.popleft()
            if index < self.first:
                model.missed += 1
                model.open.discard(index)
            else:
                expected.append(index)
        if len(expected) < n and max(model.next, self.first) <= self.last:
            model.missed += max(self.first - model.next, 0)
            after = max(model.next, self.first)
            ahead = list(range(after, min(after + n - len(expected), self.last + 1)))
            expected += ahead
            model.open.update(ahead)
            model.next = ahead[-1] + 1
        assert [each.record.id for each in claims] == [self.ids[index - 1] for index in expected]
        for index, claim in zip(expected, claims, strict=True):
            model.taken += 1
            model.held[model.taken] = Held(index, claim)

    @rule(name=names, data=st.data())
    def settles(self, name: str, data: st.DataObject) -> None:
        model = self.model.get(name)
        if model is None or not model.held:
            return
        numbers = data.draw(st.lists(st.sampled_from(sorted(model.held)), min_size=1, unique=True))
        ends: list[Done | Again] = []
        back: list[int] = []
        for number in numbers:
            claim, record = model.held[number].claim, model.held[number].claim.record
            if data.draw(st.booleans()):
                ends.append(Done(record.id, record.revision, claim.token))
                model.open.discard(model.held.pop(number).place)
            else:  # unrun
                ends.append(Again(record.id, record.revision, claim.token, record.due_ms, record.attempt))
                back.append(number)
        assert set(self.run(self.feeds[name].settle(ends))) == {SettleOutcome.SETTLED}
        model.back.extendleft(model.held.pop(number).place for number in sorted(back, reverse=True))

    # --- what always holds --------------------------------------------------------------------------------

    @invariant()
    def each_stands_where_the_model_says(self) -> None:
        found = {each.name: each for each in self.run(self.log.consumers(TOPIC))}
        assert set(found) == set(self.model)
        for name, model in self.model.items():
            each = found[name]
            waiting = len(model.back) + max(self.last - max(model.next, self.first) + 1, 0)
            missed = model.missed + max(self.first - model.next, 0)
            assert (each.cursor, each.in_flight) == (model.cursor, len(model.held))
            assert (each.waiting, each.missed) == (waiting, missed)

    @invariant()
    def indexes_are_consecutive(self) -> None:
        async def read() -> list[tuple[int, str]]:
            return [(each.index, each.id) async for each in self.log.read(TOPIC)]

        assert self.run(read()) == [(index, self.ids[index - 1]) for index in range(self.first, self.last + 1)]


@pytest.fixture(params=redis_servers(), ids=lambda found: found.name)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as url:
        yield f"{url}?timeout_ms=60000"


LIMITS = [{}, {"max_messages": 8}, {"drop_passed": True}]


def machine(url: str, limits: dict[str, Any]) -> type[RuleBasedStateMachine]:
    return type("LogMachineOf", (LogMachine,), {"url": url, **limits})


@pytest.mark.parametrize(
    "limits", [LIMITS[0], pytest.param(LIMITS[1], marks=pytest.mark.valkey_too), LIMITS[2]], ids=str
)
def test_walks(url: str, limits: dict[str, Any]) -> None:
    run_state_machine_as_test(machine(url, limits), settings=settings(WALKS, max_examples=20))


@pytest.mark.storm
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_long_walks(url: str, limits: dict[str, Any]) -> None:
    walks = settings(WALKS, max_examples=1000, stateful_step_count=150, derandomize=False)
    run_state_machine_as_test(machine(url, limits), settings=walks)

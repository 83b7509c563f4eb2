"""Random publishing, taking, settling, dying, joining and leaving, compared with a plain model of a topic."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Again, Claim, Delivery, Demand, Done, Envelope, Put, Sent, SettleOutcome
from aiodelay.memory import MemoryStore
from aiodelay.ports import Feed
from aiodelay.redis import RedisFanout, RedisFanoutSink, RedisFanoutSource, RedisStore
from tests.stateful.test_store_machine import WALKS
from tests.support.servers import redis_servers, serving

T = TypeVar("T")
NAMES = ("billing", "shipping", "mail")
LANE, TOPIC = "order", "orders"
names, sizes = st.sampled_from(NAMES), st.integers(1, 6)


class Consumer:
    """The model of a consumer: what waits, in order, dropped or not, what its one instance holds, what it missed."""

    def __init__(self, waiting: list[str]) -> None:
        self.waiting = deque(waiting)
        self.held: dict[str, Claim] = {}
        self.missed = 0


class FanoutMachine(RuleBasedStateMachine):
    """One instance per consumer takes; the model keeps what each has not settled."""

    url: ClassVar[str]
    max_messages: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.runner, self.opened = asyncio.Runner(), AsyncExitStack()
        self.namespace, self.number = uuid4().hex, 0
        self.model: dict[str, Consumer] = {}
        self.feeds: dict[str, Feed] = {}
        self.order: list[str] = []
        self.dropped: set[str] = set()
        self.run(self._open())

    def run(self, doing: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(doing)

    async def _open(self) -> None:
        self.letters = MemoryStore()
        self.store = RedisStore(self.url, namespace=self.namespace)
        self.sink = RedisFanoutSink(self.url, namespace=self.namespace, max_messages=self.max_messages)
        self.fanout = RedisFanout(self.url, namespace=self.namespace)
        self.source = RedisFanoutSource(self.url, namespace=self.namespace)
        for each in (self.letters, self.store, self.sink, self.fanout, self.source):
            await self.opened.enter_async_context(each)

    def teardown(self) -> None:
        self.run(self.opened.aclose())
        self.runner.close()

    def kept(self) -> list[str]:
        """Return what somebody has not settled, oldest first."""
        open_ = {each for c in self.model.values() for each in (*c.waiting, *c.held)}
        return [each for each in self.order if each in open_ - self.dropped]

    # --- who is there -------------------------------------------------------------------------------------

    @rule(name=names, oldest=st.booleans())
    def joins(self, name: str, oldest: bool) -> None:
        is_new = name not in self.model
        start = "oldest" if oldest else "now"
        assert self.run(self.fanout.register(TOPIC, name, start=start)) is is_new  # type: ignore[arg-type]
        if is_new:
            self.model[name] = Consumer(self.kept() if oldest else [])

    @rule(name=names)
    def leaves(self, name: str) -> None:
        assert self.run(self.fanout.unregister(TOPIC, name)) is (name in self.model)
        gone = self.model.pop(name, None)
        feed = self.feeds.pop(name, None)
        if gone is not None and feed is not None and gone.held:
            ends = [Done(c.record.id, c.record.revision, c.token) for c in gone.held.values()]
            assert set(self.run(feed.settle(ends))) == {SettleOutcome.GONE}

    # --- messages -----------------------------------------------------------------------------------------

    def published(self, ids: list[str]) -> None:
        self.order += ids
        for each in self.model.values():
            each.waiting.extend(ids)
        kept = self.kept()
        if self.max_messages:
            self.dropped.update(kept[: max(len(kept) - self.max_messages, 0)])

    def new_ids(self, n: int) -> list[str]:
        self.number += n
        return [f"m{i}" for i in range(self.number - n, self.number)]

    @precondition(lambda self: self.model)
    @rule(n=sizes, again=st.booleans())
    def is_published(self, n: int, again: bool) -> None:
        ids = self.new_ids(n)
        batch = [Delivery(Envelope(i, "redis-fanout", TOPIC), f"{i}/5/1000", 1000, 5, 1, 0) for i in ids]
        for _ in range(1 + again):
            assert list(self.run(self.sink.send(batch))) == [Sent()] * n
        self.published(ids)

    @precondition(lambda self: self.model)
    @rule(n=sizes)
    def is_transferred(self, n: int) -> None:
        ids = self.new_ids(n)

        async def transfer() -> int:
            await self.store.apply([Put(new_op(), Envelope(i, "redis-fanout", TOPIC), After(0)) for i in ids])
            with self.store.transferring(self.sink) as moves:
                return (await moves.transfer(Demand(500))).moved

        assert self.run(transfer()) == n
        self.published(ids)

    @rule(name=names, n=sizes)
    def takes(self, name: str, n: int) -> None:
        if name in self.model:
            self.run(self._take(name, n))

    async def _take(self, name: str, n: int) -> None:
        model, feed = self.model[name], self.feeds.get(name)
        if feed is None:
            opening = self.source.feed(
                f"{TOPIC}?consumer={name}", uuid4().hex, self.letters.put_back, self.letters.now_ms
            )
            feed = self.feeds[name] = await self.opened.enter_async_context(opening)
        claims = (await feed.claim({LANE: Demand(n)}, request="r", lease_ms=600_000)).claims
        expected: list[str] = []
        while model.waiting and len(expected) < n:
            first = model.waiting.popleft()
            if first in self.dropped:
                model.missed += 1
            else:
                expected.append(first)
        assert [each.record.id for each in claims] == expected
        model.held |= {each.record.id: each for each in claims}

    @rule(name=names, data=st.data())
    def settles(self, name: str, data: st.DataObject) -> None:
        model = self.model.get(name)
        if model is None or not model.held:
            return
        ids = data.draw(st.lists(st.sampled_from(sorted(model.held)), min_size=1, unique=True))
        ends: list[Done | Again] = []
        back: list[str] = []
        for i in ids:
            claim = model.held.pop(i)
            record = claim.record
            if data.draw(st.booleans()):
                ends.append(Done(record.id, record.revision, claim.token))
            else:  # unrun
                ends.append(Again(record.id, record.revision, claim.token, record.due_ms, record.attempt))
                back.append(i)
        assert set(self.run(self.feeds[name].settle(ends))) == {SettleOutcome.SETTLED}
        model.waiting.extendleft(sorted(back, key=self.order.index, reverse=True))

    # --- what always holds --------------------------------------------------------------------------------

    @invariant()
    def what_is_kept_is_what_somebody_has_not_settled(self) -> None:
        found = {each.name: each for each in self.run(self.fanout.consumers(TOPIC))}
        assert set(found) == set(self.model)
        for name, model in self.model.items():
            assert found[name].in_flight == len(model.held)
            assert found[name].waiting + found[name].missed == len(model.waiting) + model.missed
        topics = self.run(self.fanout.topics())
        assert (topics[0].kept if topics else 0) == len(self.kept())


@pytest.fixture(params=redis_servers(), ids=lambda found: found.name)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as url:
        yield f"{url}?timeout_ms=60000"


@pytest.mark.parametrize("max_messages", [0, pytest.param(8, marks=pytest.mark.valkey_too)])
def test_walks(url: str, max_messages: int) -> None:
    machine = type("FanoutMachineOf", (FanoutMachine,), {"url": url, "max_messages": max_messages})
    run_state_machine_as_test(machine, settings=settings(WALKS, max_examples=20))


@pytest.mark.storm
@pytest.mark.parametrize("max_messages", [0, 8])
def test_long_walks(url: str, max_messages: int) -> None:
    machine = type("FanoutMachineOf", (FanoutMachine,), {"url": url, "max_messages": max_messages})
    walks = settings(WALKS, max_examples=1000, stateful_step_count=150, derandomize=False)
    run_state_machine_as_test(machine, settings=walks)

"""The reactive suites can fail: each publisher and subscriber here breaks one rule, and its test must fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest

from aiodelay.reactive import Publisher, Subscriber, Subscription
from aiodelay.testing.clock import VirtualLoop
from aiodelay.testing.conformance import PublisherConformance, SubscriberConformance

# --- publishers -------------------------------------------------------------------------------------------


class Numbers:
    """A publisher as it should be; each subscriber gets all numbers."""

    def __init__(self, numbers: Sequence[int], error: Exception | None = None) -> None:
        self.numbers, self.error = numbers, error

    def subscribe(self, subscriber: Subscriber[int]) -> None:
        if subscriber is None:
            raise TypeError
        self.link(subscriber).begin()

    def link(self, subscriber: Subscriber[int]) -> Link:
        return Link(subscriber, iter(self.numbers), self.error)


class Link:
    def __init__(self, subscriber: Subscriber[int], numbers: Iterator[int], error: Exception | None) -> None:
        self.subscriber: Subscriber[int] | None = subscriber
        self.numbers, self.error, self.demand = numbers, error, 0
        self.loop = asyncio.get_running_loop()

    def begin(self) -> None:
        assert self.subscriber is not None
        try:
            self.subscriber.on_subscribe(self)
        except Exception:  # noqa: BLE001 - whatever a subscriber raises
            self.subscriber = None
        if self.error is not None and self.subscriber is not None:
            self.subscriber.on_error(self.error)
            self.subscriber = None

    def request(self, n: int) -> None:
        if self.subscriber is None:
            return
        if n < 1:
            raise ValueError("ask for 1 or more")
        self.demand += n
        self.loop.call_soon(self.go_on)

    def cancel(self) -> None:
        self.subscriber = None

    def go_on(self) -> None:
        while self.demand and self.subscriber is not None:
            self.demand -= 1
            self.give_one()

    def give_one(self) -> None:
        assert self.subscriber is not None
        number = next(self.numbers, None)
        if number is None:
            self.end()
            return
        try:
            self.subscriber.on_next(number)
        except Exception:  # noqa: BLE001 - whatever a subscriber raises
            self.subscriber = None

    def end(self) -> None:
        assert self.subscriber is not None
        self.subscriber.on_complete()
        self.subscriber = None


class OneTooMany(Link):
    def request(self, n: int) -> None:
        super().request(n + 1)


class AtOnce(Link):
    def request(self, n: int) -> None:
        super().request(n)
        self.go_on()


class Endless(Link):
    def end(self) -> None: ...


class Fails(Link):
    def begin(self) -> None:
        assert self.subscriber is not None
        self.subscriber.on_subscribe(self)


class CompletesAgain(Link):
    def end(self) -> None:
        assert self.subscriber is not None
        self.subscriber.on_complete()


class GoesOn(Link):
    def cancel(self) -> None: ...


class Late(Link):
    def begin(self) -> None:
        assert self.subscriber is not None
        self.subscriber.on_subscribe(self)
        self.subscriber.on_subscribe(self)


class SignalsFirst(Link):
    def begin(self) -> None:
        assert self.subscriber is not None
        self.subscriber.on_next(0)
        super().begin()


class Breaks(Link):
    def give_one(self) -> None:
        assert self.subscriber is not None
        self.subscriber.on_next(next(self.numbers))


class TellsTheFailure(Link):
    def give_one(self) -> None:
        assert self.subscriber is not None
        try:
            self.subscriber.on_next(next(self.numbers))
        except Exception as error:  # noqa: BLE001
            self.subscriber.on_error(error)
            self.subscriber = None


class NotWithin(Link):
    def go_on(self) -> None:
        demand, self.demand = self.demand, 0
        for _ in range(demand):
            if self.subscriber is not None:
                self.give_one()
                self.demand = 0


class CancelsOnce(Link):
    def cancel(self) -> None:
        assert self.subscriber is not None
        super().cancel()


class WakesAgain(Link):
    def __init__(self, subscriber: Subscriber[int], numbers: Iterator[int], error: Exception | None) -> None:
        super().__init__(subscriber, numbers, error)
        self.before = subscriber

    def request(self, n: int) -> None:
        self.subscriber = self.before
        super().request(n)


class LastRequestCounts(Link):
    def request(self, n: int) -> None:
        self.demand = 0
        super().request(n)


class TakesAnyNumber(Link):
    def request(self, n: int) -> None:
        if n > 0:
            super().request(n)


class ClampsToOne(Link):
    def request(self, n: int) -> None:
        super().request(max(n, 1))


class Remembers(Link):
    everybody: ClassVar[list[object]] = []

    def __init__(self, subscriber: Subscriber[int], numbers: Iterator[int], error: Exception | None) -> None:
        super().__init__(subscriber, numbers, error)
        self.everybody.append(subscriber)


class Overflows(Link):
    def request(self, n: int) -> None:
        super().request(n)
        self.demand = (self.demand + (1 << 63)) % (1 << 64) - (1 << 63)
        self.demand = max(self.demand, 0)


def with_links(link: type[Link]) -> type[Numbers]:
    class Broken(Numbers):
        def link(self, subscriber: Subscriber[int]) -> Link:
            return link(subscriber, iter(self.numbers), self.error)

    Broken.__name__ = link.__name__
    return Broken


class TakesNone(Numbers):
    def subscribe(self, subscriber: Subscriber[int]) -> None:
        if subscriber is not None:
            super().subscribe(subscriber)


class Awaited(Numbers):
    async def subscribe(self, subscriber: Subscriber[int]) -> None:  # type: ignore[override]
        super().subscribe(subscriber)


class LeavesTheFirst(Numbers):
    first: Link | None = None

    def link(self, subscriber: Subscriber[int]) -> Link:
        if self.first is not None:
            self.first.cancel()
        self.first = super().link(subscriber)
        return self.first


class SilentToTheSecond(Numbers):
    taken = False

    def link(self, subscriber: Subscriber[int]) -> Link:
        link = super().link(subscriber)
        if self.taken:
            link.numbers = iter(())
            link.end = lambda: None  # type: ignore[method-assign]
        self.taken = True
        return link


class NumbersSuite(PublisherConformance[int]):
    quiet_s, soon_s = 0.01, 0.3
    kind: type[Numbers] = Numbers

    @asynccontextmanager
    async def publisher(self, items: int) -> AsyncIterator[Publisher[int]]:
        yield self.kind(range(items))

    async def end(self, publisher: Publisher[int]) -> None: ...

    @asynccontextmanager
    async def failing_publisher(self) -> AsyncIterator[Publisher[int]]:
        yield self.kind((), RuntimeError("out of numbers"))


class TestNumbers(NumbersSuite):
    def new_loop(self) -> asyncio.AbstractEventLoop:
        return VirtualLoop()


BROKEN_PUBLISHERS: list[tuple[type[Numbers], str]] = [
    (with_links(OneTooMany), "test_d1_no_more_than_was_requested"),
    (with_links(AtOnce), "test_d2_no_signal_begins_within_another"),
    (with_links(Endless), "test_d3_the_end_is_told"),
    (with_links(Fails), "test_d3_a_failure_is_told"),
    (with_links(CompletesAgain), "test_d4_nothing_follows_the_end"),
    (with_links(GoesOn), "test_d5_signals_stop_after_cancel"),
    (with_links(Late), "test_d6_on_subscribe_comes_first_and_once"),
    (with_links(SignalsFirst), "test_d6_on_subscribe_comes_first_and_once"),
    (Awaited, "test_d6_on_subscribe_comes_first_and_once"),
    (TakesNone, "test_d6_subscribing_none_is_refused"),
    (LeavesTheFirst, "test_d7_another_subscriber_is_served_or_told_why_and_takes_nothing_from_the_first"),
    (SilentToTheSecond, "test_d7_another_subscriber_is_served_or_told_why_and_takes_nothing_from_the_first"),
    (with_links(Breaks), "test_d15_a_subscriber_that_raises_is_cancelled"),
    (with_links(TellsTheFailure), "test_d15_a_subscriber_that_raises_is_cancelled"),
    (with_links(Fails), "test_d15_one_that_raises_when_it_is_subscribed_is_cancelled"),
    (with_links(NotWithin), "test_d16_request_may_be_called_within_signals"),
    (with_links(CancelsOnce), "test_d17_after_cancel_request_and_cancel_do_nothing"),
    (with_links(WakesAgain), "test_d17_after_cancel_request_and_cancel_do_nothing"),
    (with_links(LastRequestCounts), "test_d18_requests_add_up"),
    (with_links(TakesAnyNumber), "test_d19_requesting_less_than_one_is_refused"),
    (with_links(ClampsToOne), "test_d19_requesting_less_than_one_is_refused"),
    (with_links(Remembers), "test_d20_a_cancelled_subscriber_is_forgotten"),
    (with_links(Overflows), "test_d21_demand_has_no_limit"),
]


@pytest.mark.parametrize(("kind", "test"), BROKEN_PUBLISHERS, ids=lambda value: getattr(value, "__name__", value))
def test_a_publisher_that_breaks_a_rule_fails_its_test(kind: type[Numbers], test: str) -> None:
    suite = NumbersSuite()
    suite.kind = kind
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(suite, test)()


def test_each_publisher_rule_has_a_publisher_that_breaks_it() -> None:
    assert {test for _, test in BROKEN_PUBLISHERS} == rules_of(PublisherConformance)


# --- subscribers ------------------------------------------------------------------------------------------


class Sum:
    """A subscriber as it should be: adds up numbers, two at a time."""

    def __init__(self) -> None:
        self.subscription: Subscription | None = None
        self.total, self.is_over = 0, False

    def on_subscribe(self, subscription: Subscription) -> None:
        if subscription is None:
            raise TypeError
        if self.subscription is not None:
            subscription.cancel()
            return
        self.subscription = subscription
        subscription.request(2)

    def on_next(self, item: int, /) -> None:
        if item is None:
            raise TypeError
        if self.is_over:
            return
        self.total += item
        self.ask()

    def ask(self) -> None:
        assert self.subscription is not None
        self.subscription.request(1)

    def on_error(self, error: Exception) -> None:
        if error is None:
            raise TypeError
        self.is_over = True

    def on_complete(self) -> None:
        self.is_over = True

    def leave(self) -> None:
        self.is_over = True
        assert self.subscription is not None
        self.subscription.cancel()


class AsksOnce(Sum):
    def ask(self) -> None: ...


class Never(Sum):
    def on_subscribe(self, subscription: Subscription) -> None:
        self.subscription = subscription


class AwaitedSum(Sum):
    async def on_next(self, item: int, /) -> None:  # type: ignore[override]
        super().on_next(item)


class Blocks(Sum):
    def on_complete(self) -> None:
        time.sleep(0.1)  # the fault: it blocks the loop


class CancelsAtTheEnd(Sum):
    def on_complete(self) -> None:
        self.leave()

    def on_error(self, error: Exception) -> None:
        self.leave()


class TakesTheSecond(Sum):
    def on_subscribe(self, subscription: Subscription) -> None:
        self.subscription = subscription
        subscription.request(2)


class LeavesInSilence(Sum):
    def leave(self) -> None:
        self.is_over = True


class AsksOn(Sum):
    def on_next(self, item: int, /) -> None:
        super().on_next(item)
        if self.is_over:
            self.ask()


class RaisesAfterTheEnd(Sum):
    def on_next(self, item: int, /) -> None:
        if self.is_over:
            raise RuntimeError
        super().on_next(item)


class NeedsAnItem(Sum):
    def on_complete(self) -> None:
        if not self.total:
            raise RuntimeError

    def on_error(self, error: Exception) -> None:
        self.on_complete()


class PutsUpWithNone(Sum):
    def on_error(self, error: Exception) -> None: ...


class RequestsNothing(Sum):
    def ask(self) -> None:
        super().ask()
        assert self.subscription is not None
        self.subscription.request(0)


class SumSuite(SubscriberConformance[int]):
    quiet_s, soon_s, at_once_s = 0.01, 0.3, 0.05
    kind: type[Sum] = Sum

    @asynccontextmanager
    async def subscriber(self) -> AsyncIterator[Subscriber[int]]:
        yield self.kind()

    def item(self, number: int) -> int:
        return number

    def leave(self, subscriber: Subscriber[int]) -> None:
        assert isinstance(subscriber, Sum)
        subscriber.leave()


class TestSum(SumSuite):
    def new_loop(self) -> asyncio.AbstractEventLoop:
        return VirtualLoop()


BROKEN_SUBSCRIBERS: list[tuple[type[Sum], str, tuple[Any, ...]]] = [
    (Never, "test_d8_it_requests_what_it_takes", ()),
    (AsksOnce, "test_d8_it_requests_what_it_takes", ()),
    (AwaitedSum, "test_d9_signals_are_plain_functions_that_return_at_once", ()),
    (Blocks, "test_d9_signals_are_plain_functions_that_return_at_once", ()),
    (CancelsAtTheEnd, "test_d10_the_end_is_answered_by_no_call", ("on_complete",)),
    (CancelsAtTheEnd, "test_d10_the_end_is_answered_by_no_call", ("on_error",)),
    (TakesTheSecond, "test_d11_a_second_subscription_is_cancelled", ()),
    (LeavesInSilence, "test_d12_it_cancels_when_it_needs_no_more", ()),
    (AsksOn, "test_d13_items_after_cancel_are_put_up_with", ()),
    (RaisesAfterTheEnd, "test_d13_items_after_cancel_are_put_up_with", ()),
    (NeedsAnItem, "test_d14_the_end_may_come_at_any_time", ("on_complete",)),
    (NeedsAnItem, "test_d14_the_end_may_come_at_any_time", ("on_error",)),
    (PutsUpWithNone, "test_d15_none_is_refused", ()),
    (RequestsNothing, "test_d19_it_requests_one_or_more", ()),
]


@pytest.mark.parametrize(
    ("kind", "test", "values"), BROKEN_SUBSCRIBERS, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_subscriber_that_breaks_a_rule_fails_its_test(kind: type[Sum], test: str, values: tuple[Any, ...]) -> None:
    suite = SumSuite()
    suite.kind = kind
    with pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)):
        getattr(suite, test)(*values)


def test_each_subscriber_rule_has_a_subscriber_that_breaks_it() -> None:
    assert {test for _, test, _ in BROKEN_SUBSCRIBERS} == rules_of(SubscriberConformance)


# --- what cannot be asked ---------------------------------------------------------------------------------


@pytest.mark.parametrize("test", ["test_d3_the_end_is_told", "test_d4_nothing_follows_the_end"])
def test_rules_about_the_end_are_skipped_where_there_is_none(test: str) -> None:
    suite = NumbersSuite()
    suite.completes = False
    with pytest.raises(pytest.skip.Exception, match="never completes"):
        getattr(suite, test)()


def test_rules_are_skipped_where_nothing_fails_and_nobody_leaves() -> None:
    class NeverFails(NumbersSuite):
        failing_publisher: Callable[[], None] = lambda self: None  # type: ignore[assignment,misc]

    class NeverLeaves(SumSuite):
        leave = SubscriberConformance.leave

    with pytest.raises(pytest.skip.Exception, match="never fails"):
        NeverFails().test_d3_a_failure_is_told()
    with pytest.raises(pytest.skip.Exception, match="always needs more"):
        NeverLeaves().test_d12_it_cancels_when_it_needs_no_more()


def rules_of(suite: type) -> set[str]:
    return {name for name in dir(suite) if name.startswith("test_")}

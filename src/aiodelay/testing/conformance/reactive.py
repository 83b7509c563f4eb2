"""`PublisherConformance` and `SubscriberConformance`: suites for the rules D1 to D21 of docs/reactive.md."""

# ruff: noqa: D102 - the name of a test states its rule

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import pytest

from aiodelay.ports.reactive import Publisher, Subscriber, Subscription

__all__ = ["Probe", "ProbeSubscription", "PublisherConformance", "SubscriberConformance"]

T = TypeVar("T")
S = TypeVar("S", bound="_Suite")
P = ParamSpec("P")
ROUND_S = 0.001


class _Suite:
    quiet_s: float = 0.1
    """Seconds for which a test waits before it concludes that no signal comes any more."""
    soon_s: float = 5.0
    """Seconds within which an expected signal must come."""

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """Return an event loop for one test; by default asyncio's own loop."""
        return asyncio.new_event_loop()

    async def quiet(self) -> None:
        """Wait `quiet_s`, so that any signal under way arrives."""
        await asyncio.sleep(self.quiet_s)

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until a condition is true; fail after `soon_s`. `what` names the condition in the error."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + self.soon_s
        while not condition():
            assert loop.time() < ends, f"not within {self.soon_s:g} s: {what}"
            await asyncio.sleep(ROUND_S)


def _on_loop(test: Callable[Concatenate[S, P], Coroutine[Any, Any, None]]) -> Callable[Concatenate[S, P], None]:
    """Run an async test on a loop of its own. If an exception reaches the loop's exception handler, the test fails."""

    @functools.wraps(test)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        unnoticed: list[str] = []

        async def play() -> None:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: unnoticed.append(f"{context}"))
            await test(self, *args, **kwargs)

        with asyncio.Runner(loop_factory=self.new_loop) as runner:
            runner.run(play())
        assert unnoticed == []

    return run


def _check_plain(call: Callable[..., object], *arguments: object) -> None:
    """Call a plain function that returns None. Fail if it is a coroutine function, whose body would never run."""
    result = call(*arguments)
    if inspect.iscoroutine(result):
        result.close()
    assert result is None, f"{call.__name__} returned {result!r}"


def _skip(reason: str) -> None:
    pytest.skip(reason)


# --- publishers -------------------------------------------------------------------------------------------


class Probe(Generic[T]):
    """A subscriber that records its signals and runs callbacks of a test.

    Args:
        on_subscribe: Called with the probe, inside the signal `on_subscribe`.
        on_next: Called with the probe and the item, inside each signal `on_next`.

    Attributes:
        signals: The names of the signals, in order.
        items: The items that came.
        requested: The number of items requested so far.
        wrong: One text per violation of D1, D2, D4 or D6, the rules that hold at all times.
    """

    subscription: Subscription

    def __init__(
        self,
        *,
        on_subscribe: Callable[[Probe[T]], object] = lambda probe: None,
        on_next: Callable[[Probe[T], T], object] = lambda probe, item: None,
    ) -> None:
        self._act_on_subscribe, self._act_on_next = on_subscribe, on_next
        self.signals: list[str] = []
        self.items: list[T] = []
        self.requested: int = 0
        self.error: Exception | None = None
        self.wrong: list[str] = []
        self._signal = ""

    @property
    def is_ended(self) -> bool:
        """Whether `on_error` or `on_complete` has come."""
        return not {"on_error", "on_complete"}.isdisjoint(self.signals)

    def request(self, n: int) -> None:
        """Request `n` more items."""
        self.requested += n
        self.subscription.request(n)

    def on_subscribe(self, subscription: Subscription) -> None:
        """Keep the subscription."""
        with self._noting("on_subscribe"):
            self.subscription = subscription
            self._act_on_subscribe(self)

    def on_next(self, item: T, /) -> None:
        """Keep the item."""
        with self._noting("on_next"):
            self.items.append(item)
            if len(self.items) > self.requested:
                self.wrong.append(f"D1: item {len(self.items)} came, {self.requested} were requested")
            self._act_on_next(self, item)

    def on_error(self, error: Exception) -> None:
        """Keep the error."""
        with self._noting("on_error"):
            self.error = error

    def on_complete(self) -> None:
        """Record the end."""
        with self._noting("on_complete"):
            pass

    @contextmanager
    def _noting(self, signal: str) -> Iterator[None]:
        if self._signal:
            self.wrong.append(f"D2: {signal} began within {self._signal}")
        if self.is_ended:
            self.wrong.append(f"D4: {signal} came after the end")
        if (signal == "on_subscribe") == bool(self.signals):
            self.wrong.append(f"D6: {signal} came as signal {len(self.signals) + 1}")
        self.signals.append(signal)
        before, self._signal = self._signal, signal
        try:
            yield
        finally:
            self._signal = before


class PublisherConformance(_Suite, ABC, Generic[T]):
    """The suite for publishers: one test or more for each rule of docs/reactive.md that a publisher must keep.

    Subclass this suite in a test module, say how to make a publisher, and let pytest collect the class:

    ```python
    class TestMyPublisher(PublisherConformance[int]):
        @asynccontextmanager
        async def publisher(self, items):
            yield MyPublisher(range(items))
    ```

    Each test has an event loop of its own. The suite needs no plugin for async tests, and works with any. A test waits
    `quiet_s` to see that no signal comes, and up to `soon_s` for an expected signal.
    """

    completes: bool = True
    """Whether the publisher completes after its items were taken and `end` was called.

    False skips the rules about completion.
    """

    @abstractmethod
    def publisher(self, items: int) -> AbstractAsyncContextManager[Publisher[T]]:
        """Open a publisher with exactly this number of items."""

    async def end(self, publisher: Publisher[T]) -> None:
        """Do nothing. Override this to make a publisher complete after all of its items were taken."""

    def failing_publisher(self) -> AbstractAsyncContextManager[Publisher[T]] | None:
        """Return None: no publisher of this kind fails. Override this to open one that fails before its first item."""
        return None

    def take(self, item: T) -> None:
        """Do nothing. Override this to do what every subscriber must do with an item, such as settling the item."""

    def _probe(
        self,
        *,
        on_subscribe: Callable[[Probe[T]], object] = lambda probe: None,
        on_next: Callable[[Probe[T]], object] = lambda probe: None,
    ) -> Probe[T]:
        def take(probe: Probe[T], item: T) -> None:
            self.take(item)
            on_next(probe)

        return Probe(on_subscribe=on_subscribe, on_next=take)

    async def _subscribed(self, publisher: Publisher[T], probe: Probe[T] | None = None) -> Probe[T]:
        probe = self._probe() if probe is None else probe
        publisher.subscribe(probe)
        await self.until(lambda: probe.signals, "on_subscribe")
        return probe

    async def _has(self, probe: Probe[T], items: int) -> None:
        """Check that this number of items has come, and that no more come."""
        await self.until(lambda: len(probe.items) >= items, f"requested item {items}")
        await self.quiet()
        assert len(probe.items) == items, f"{len(probe.items)} items came instead of {items}"
        assert probe.wrong == []

    @_on_loop
    async def test_d1_no_more_than_was_requested(self) -> None:
        async with self.publisher(10) as publisher:
            probe = await self._subscribed(publisher)
            await self._has(probe, 0)
            probe.request(1)
            await self._has(probe, 1)
            probe.request(3)
            await self._has(probe, 4)

    @_on_loop
    async def test_d2_no_signal_begins_within_another(self) -> None:
        async with self.publisher(20) as publisher:
            probe = self._probe(
                on_subscribe=lambda probe: probe.request(2),
                on_next=lambda probe: probe.request(1) if probe.requested < 20 else None,
            )
            await self._subscribed(publisher, probe)
            await self._has(probe, 20)

    @_on_loop
    async def test_d3_the_end_is_told(self) -> None:
        if not self.completes:
            _skip("the publisher never completes")
        async with self.publisher(3) as publisher:
            probe = await self._subscribed(publisher)
            probe.request(10)
            await self.until(lambda: len(probe.items) == 3, "all items")
            await self.end(publisher)
            await self.until(lambda: probe.is_ended, "on_complete")
            assert probe.signals[-1] == "on_complete"
            assert probe.wrong == []

    @_on_loop
    async def test_d3_a_failure_is_told(self) -> None:
        failing = self.failing_publisher()
        if failing is None:
            _skip("the publisher never fails")
        async with cast("AbstractAsyncContextManager[Publisher[T]]", failing) as publisher:
            probe = await self._subscribed(publisher)
            await self.until(lambda: probe.is_ended, "on_error")
            assert probe.signals == ["on_subscribe", "on_error"]
            assert isinstance(probe.error, Exception)

    @_on_loop
    async def test_d4_nothing_follows_the_end(self) -> None:
        if not self.completes:
            _skip("the publisher never completes")
        async with self.publisher(3) as publisher:
            probe = await self._subscribed(publisher)
            probe.request(10)
            await self.until(lambda: len(probe.items) == 3, "all items")
            await self.end(publisher)
            await self.until(lambda: probe.is_ended, "on_complete")
            probe.request(3)
            probe.subscription.cancel()
            await self.quiet()
            assert probe.wrong == []
            assert probe.signals == ["on_subscribe", "on_next", "on_next", "on_next", "on_complete"]

    @_on_loop
    async def test_d5_signals_stop_after_cancel(self) -> None:
        async with self.publisher(200) as publisher:
            probe = self._probe(on_next=lambda probe: probe.subscription.cancel() if len(probe.items) == 3 else None)
            await self._subscribed(publisher, probe)
            probe.request(200)
            await self.until(lambda: len(probe.items) >= 3, "three items")
            await self.quiet()
            seen = len(probe.signals)
            assert len(probe.items) < 200, "all items came although the subscription was cancelled after three"
            await self.quiet()
            assert len(probe.signals) == seen, "signals continue after the subscription was cancelled"
            assert not probe.is_ended

    @_on_loop
    async def test_d6_on_subscribe_comes_first_and_once(self) -> None:
        async with self.publisher(3) as publisher:
            probe = self._probe(on_subscribe=lambda probe: probe.request(3))
            _check_plain(publisher.subscribe, probe)
            await self.until(lambda: len(probe.items) == 3, "all items")
            assert probe.signals[:4] == ["on_subscribe", *["on_next"] * 3]
            assert probe.wrong == []

    @_on_loop
    async def test_d6_subscribing_none_is_refused(self) -> None:
        async with self.publisher(1) as publisher:
            with pytest.raises(TypeError):
                publisher.subscribe(cast("Subscriber[T]", None))

    @_on_loop
    async def test_d7_another_subscriber_is_served_or_told_why_and_takes_nothing_from_the_first(self) -> None:
        async with self.publisher(10) as publisher:
            first, second = await self._subscribed(publisher), await self._subscribed(publisher)
            second.request(2)
            await self.until(lambda: second.items or second.error, "an item, or on_error, for the second subscriber")
            first.request(2)
            await self._has(first, 2)
            assert second.wrong == []

    @_on_loop
    async def test_d15_a_subscriber_that_raises_is_cancelled(self) -> None:
        def fail(probe: Probe[T]) -> None:
            raise RuntimeError("a subscriber must not raise")

        async with self.publisher(5) as publisher:
            probe = await self._subscribed(publisher, self._probe(on_next=fail))
            probe.request(5)
            await self.until(lambda: probe.items, "an item")
            await self.quiet()
            assert probe.signals == ["on_subscribe", "on_next"]

    @_on_loop
    async def test_d15_one_that_raises_when_it_is_subscribed_is_cancelled(self) -> None:
        def fail(probe: Probe[T]) -> None:
            probe.request(2)
            raise RuntimeError("a subscriber must not raise")

        openings = (self.publisher(5), self.failing_publisher())
        for opening in filter(None, openings):
            async with opening as publisher:
                probe = self._probe(on_subscribe=fail)
                try:
                    publisher.subscribe(probe)
                except RuntimeError:
                    pytest.fail("subscribe raised what its subscriber had raised")
                await self.quiet()
                assert probe.signals == ["on_subscribe"]

    @_on_loop
    async def test_d16_request_may_be_called_within_signals(self) -> None:
        async with self.publisher(100) as publisher:
            probe = self._probe(
                on_subscribe=lambda probe: probe.request(1),
                on_next=lambda probe: probe.request(1) if probe.requested < 100 else None,
            )
            await self._subscribed(publisher, probe)
            await self.until(lambda: len(probe.items) == 100, "all items, each requested when the item before came")

    @_on_loop
    async def test_d17_after_cancel_request_and_cancel_do_nothing(self) -> None:
        async with self.publisher(5) as publisher:
            probe = await self._subscribed(publisher)
            probe.request(1)
            await self.until(lambda: probe.items, "an item")
            for _ in range(2):
                _check_plain(probe.subscription.cancel)
            await self.quiet()
            seen = list(probe.signals)
            probe.request(2)
            await self.quiet()
            assert probe.signals == seen, "a signal came for items requested after the subscription was cancelled"

    @_on_loop
    async def test_d18_requests_add_up(self) -> None:
        async with self.publisher(10) as publisher:
            probe = await self._subscribed(publisher)
            probe.request(2)
            probe.request(3)
            await self._has(probe, 5)

    @_on_loop
    async def test_d19_requesting_less_than_one_is_refused(self) -> None:
        async with self.publisher(5) as publisher:
            probe = await self._subscribed(publisher)
            for wrong in (0, -1):
                with pytest.raises(ValueError, match="1 or more"):
                    probe.subscription.request(wrong)
            await self._has(probe, 0)
            probe.request(2)
            await self._has(probe, 2)

    @_on_loop
    async def test_d20_a_cancelled_subscriber_is_forgotten(self) -> None:
        async with self.publisher(5) as publisher:
            probe = await self._subscribed(publisher)
            probe.request(1)
            await self.until(lambda: probe.items, "an item")
            probe.subscription.cancel()
            forgotten = weakref.ref(probe)
            probe = self._probe()
            await self.until(
                lambda: gc.collect() >= 0 and forgotten() is None,
                "the publisher holds no reference to a cancelled subscriber",
            )

    @_on_loop
    async def test_d21_demand_has_no_limit(self) -> None:
        async with self.publisher(5) as publisher:
            probe = await self._subscribed(publisher)
            for _ in range(2):
                probe.request((1 << 63) - 1)
            await self._has(probe, 5)


# --- subscribers ------------------------------------------------------------------------------------------


class ProbeSubscription:
    """A subscription that records its calls.

    Attributes:
        requests: The number `n` of each request.
        cancels: The number of calls of `cancel`.
    """

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.cancels: int = 0

    @property
    def requested(self) -> int:
        """The number of items requested so far."""
        return sum(self.requests)

    def request(self, n: int) -> None:
        """Record a request."""
        self.requests.append(n)

    def cancel(self) -> None:
        """Record a cancel."""
        self.cancels += 1


class SubscriberConformance(_Suite, ABC, Generic[T]):
    """The suite for subscribers: one test or more for each rule of docs/reactive.md that a subscriber must keep.

    Subclass this suite in a test module, say how to make a subscriber and an item, and let pytest collect the class:

    ```python
    class TestMySubscriber(SubscriberConformance[int]):
        @asynccontextmanager
        async def subscriber(self):
            yield MySubscriber()

        def item(self, number):
            return number
    ```
    """

    at_once_s: float = 0.5
    """Seconds within which each signal must return."""

    @abstractmethod
    def subscriber(self) -> AbstractAsyncContextManager[Subscriber[T]]:
        """Open a new subscriber that takes items and then requests more."""

    @abstractmethod
    def item(self, number: int) -> T:
        """Return an item. Each number gives a different item."""

    def leave(self, subscriber: Subscriber[T]) -> None:
        """Skip the test. Override this to make a subscriber cancel its subscription, if it ever does so by itself."""
        _skip("the subscriber always needs more items")

    async def _subscribed(self, subscriber: Subscriber[T]) -> ProbeSubscription:
        subscription = ProbeSubscription()
        subscriber.on_subscribe(subscription)
        await self.until(lambda: subscription.requests, "a request after on_subscribe")
        return subscription

    async def _feed(self, subscriber: Subscriber[T], subscription: ProbeSubscription, items: int) -> None:
        """Give items to a subscriber, each after the subscriber has requested it."""
        for number in range(items):
            await self.until(lambda number=number: subscription.requested > number, f"a request of item {number + 1}")  # type: ignore[misc]
            subscriber.on_next(self.item(number))

    @_on_loop
    async def test_d8_it_requests_what_it_takes(self) -> None:
        async with self.subscriber() as subscriber:
            subscription = await self._subscribed(subscriber)
            await self._feed(subscriber, subscription, 40)

    @_on_loop
    async def test_d9_signals_are_plain_functions_that_return_at_once(self) -> None:
        loop = asyncio.get_running_loop()

        def check_prompt(call: Callable[..., object], *arguments: object) -> None:
            began = loop.time()
            _check_plain(call, *arguments)
            took_s = loop.time() - began
            assert took_s < self.at_once_s, f"{call.__name__} took {took_s:.2f} s"

        async with self.subscriber() as subscriber:
            subscription = ProbeSubscription()
            check_prompt(subscriber.on_subscribe, subscription)
            await self.until(lambda: subscription.requests, "a request after on_subscribe")
            check_prompt(subscriber.on_next, self.item(0))
            check_prompt(subscriber.on_complete)
        async with self.subscriber() as subscriber:
            await self._subscribed(subscriber)
            check_prompt(subscriber.on_error, RuntimeError("the publisher failed"))

    @pytest.mark.parametrize("signal", ["on_complete", "on_error"])
    @_on_loop
    async def test_d10_the_end_is_answered_by_no_call(self, signal: str) -> None:
        async with self.subscriber() as subscriber:
            subscription = await self._subscribed(subscriber)
            await self._feed(subscriber, subscription, 1)
            await self.quiet()
            calls = len(subscription.requests) + subscription.cancels
            _end(subscriber, signal)
            await self.quiet()
            assert len(subscription.requests) + subscription.cancels == calls, f"{signal} called the subscription"

    @_on_loop
    async def test_d11_a_second_subscription_is_cancelled(self) -> None:
        async with self.subscriber() as subscriber:
            first, second = await self._subscribed(subscriber), ProbeSubscription()
            subscriber.on_subscribe(second)
            await self.until(lambda: second.cancels, "cancelling the second subscription")
            await self._feed(subscriber, first, 5)
            assert (first.cancels, second.requests) == (0, [])

    @_on_loop
    async def test_d12_it_cancels_when_it_needs_no_more(self) -> None:
        async with self.subscriber() as subscriber:
            subscription = await self._subscribed(subscriber)
            self.leave(subscriber)
            await self.until(lambda: subscription.cancels, "a cancel from a subscriber that needs no more")

    @_on_loop
    async def test_d13_items_after_cancel_are_put_up_with(self) -> None:
        async with self.subscriber() as subscriber:
            subscription = await self._subscribed(subscriber)
            self.leave(subscriber)
            await self.until(lambda: subscription.cancels, "a cancel from a subscriber that needs no more")
            requested = subscription.requested
            subscriber.on_next(self.item(0))
            await self.quiet()
            assert subscription.requested == requested, "the subscriber requested more after it had cancelled"

    @pytest.mark.parametrize("signal", ["on_complete", "on_error"])
    @_on_loop
    async def test_d14_the_end_may_come_at_any_time(self, signal: str) -> None:
        for items in (0, 1):
            async with self.subscriber() as subscriber:
                subscription = ProbeSubscription()
                subscriber.on_subscribe(subscription)
                await self._feed(subscriber, subscription, items)
                _end(subscriber, signal)
                await self.quiet()

    @_on_loop
    async def test_d15_none_is_refused(self) -> None:
        async with self.subscriber() as subscriber:
            with pytest.raises(TypeError):
                subscriber.on_subscribe(cast("Subscription", None))
            await self._subscribed(subscriber)
            with pytest.raises(TypeError):
                subscriber.on_next(cast("T", None))
            with pytest.raises(TypeError):
                subscriber.on_error(cast("Exception", None))

    @_on_loop
    async def test_d19_it_requests_one_or_more(self) -> None:
        async with self.subscriber() as subscriber:
            subscription = await self._subscribed(subscriber)
            await self._feed(subscriber, subscription, 20)
            await self.quiet()
            assert [n for n in subscription.requests if n < 1] == []


def _end(subscriber: Subscriber[Any], signal: str) -> None:
    if signal == "on_complete":
        subscriber.on_complete()
    else:
        subscriber.on_error(RuntimeError("the publisher failed"))

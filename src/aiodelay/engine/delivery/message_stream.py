"""`Messages`, the result of `scheduler.messages(...)`: messages for a program that takes them at its own pace."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, Generic, TypeVar

from aiodelay.core.wakeup import WakeUp
from aiodelay.errors import AiodelayError
from aiodelay.handlers.received import HeldMessage
from aiodelay.ports.reactive import Subscriber, Subscription

__all__ = ["Messages"]

log: logging.Logger = logging.getLogger("aiodelay.reactive")

R = TypeVar("R", bound=HeldMessage[Any, Any])
"""The kind of message that the program takes: `Received` of an event."""
ROUNDS_TO_CLOSE = 2
"""Rounds of the event loop in which asyncio closes the generator of an abandoned `async for`, which frees its lane."""


class Messages(Generic[R]):
    """A `Publisher` of one lane's messages, to subscribe to or to iterate over, while the scheduler is open.

    In one process a lane has one taker: a handler, or one subscription. When the scheduler closes, each subscription
    completes. Closing waits up to `drain` for messages that are not settled yet.

    In an `async for` loop, up to `concurrency` messages are in flight, and more arrive as these are settled. When the
    program leaves the loop, it gives back the messages that the loop has not yielded. The program may still settle the
    messages that the loop has yielded.
    """

    def __init__(self, publish: Callable[[Subscriber[R]], None], concurrency: int) -> None:
        self._publish, self._concurrency = publish, concurrency

    def subscribe(self, subscriber: Subscriber[R]) -> None:
        """Begin a subscription. If that is impossible, call `on_subscribe` and then `on_error` with the reason.

        Raises:
            TypeError: The subscriber is None.
        """
        if subscriber is None:
            raise TypeError("a subscriber must not be None")
        try:
            self._publish(subscriber)
        except AiodelayError as error:
            _reject(subscriber, error)

    async def __aiter__(self) -> AsyncGenerator[R, None]:
        """Yield messages until the scheduler is closed.

        Raises:
            AiodelayError: A subscription is impossible, or it has failed.
        """
        for _ in range(ROUNDS_TO_CLOSE):
            await asyncio.sleep(0)
        window = _Window[R](self._concurrency)
        self.subscribe(window)
        try:
            while (message := await window.next()) is not None:
                yield message
        finally:
            window.leave()


def _reject(subscriber: Subscriber[R], error: AiodelayError) -> None:
    try:
        subscriber.on_subscribe(_NoSubscription())
        subscriber.on_error(error)
    except Exception:
        log.exception("a subscriber raised an error when its subscription was refused: %s", error)


class _NoSubscription:
    """The subscription of a rejected subscriber; it does nothing."""

    def request(self, n: int) -> None: ...

    def cancel(self) -> None: ...


class _Window(Generic[R]):
    """A subscriber with up to `size` messages in flight. When a quarter of them is settled, it requests more.

    Args:
        size: 1 or more.
    """

    _subscription: Subscription

    def __init__(self, size: int) -> None:
        self._size, self._settled = size, 0
        self._ready: deque[R] = deque()
        self._wakeup = WakeUp()
        self._is_over = False
        self._error: Exception | None = None

    def on_subscribe(self, subscription: Subscription) -> None:
        self._subscription = subscription
        subscription.request(self._size)

    def on_next(self, item: R, /) -> None:
        item.over().add_done_callback(self._replenish)
        self._ready.append(item)
        self._wakeup.set()

    def on_error(self, error: Exception) -> None:
        self._error = error
        self.on_complete()

    def on_complete(self) -> None:
        self._is_over = True
        self._wakeup.set()

    def _replenish(self, over: object) -> None:
        self._settled += 1
        if self._settled >= self._size / 4 and not self._is_over:
            self._subscription.request(self._settled)
            self._settled = 0

    async def next(self) -> R | None:
        """Return the next message, skipping messages that were lost, replaced or cancelled; None at the end."""
        while True:
            self._wakeup.clear()
            while self._ready:
                message = self._ready.popleft()
                if message.is_outdated:
                    message.give_back()
                elif not message.is_settled:
                    return message
            if self._error is not None:
                raise self._error
            if self._is_over:
                return None
            await self._wakeup.wait()

    def leave(self) -> None:
        """End the subscription, and give back the messages that were not yielded."""
        self._is_over = True
        self._subscription.cancel()
        for message in self._ready:
            message.give_back()

"""Publishers, subscribers and demand: Reactive Streams for asyncio, as Protocols.

The Protocols follow https://www.reactive-streams.org (version 1.0.4) on one event loop. Their methods are plain
functions that return at once. A subscriber does work that takes time in separate tasks. All calls come from one event
loop, and so from one thread.

docs/reactive.md lists the rules D1 to D21, the rules of the specification that they stand for, and the rules that do
not apply. `aiodelay.testing.conformance` has a suite for publishers and a suite for subscribers.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

__all__ = ["Publisher", "Subscriber", "Subscription"]

T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Subscription(Protocol):
    """The link between one publisher and one subscriber. The subscriber uses it to request items."""

    def request(self, n: int) -> None:
        """Request `n` more items (D16, D18, D21). After the end or a cancellation, this does nothing (D17).

        Args:
            n: 1 or more, without an upper limit. The number is added to earlier requests.

        Raises:
            ValueError: `n` is less than 1. Earlier requests stay valid (D19).
        """
        ...

    def cancel(self) -> None:
        """End the subscription: signals stop soon, and the publisher forgets the subscriber (D5, D17, D20)."""
        ...


class Subscriber(Protocol[T_contra]):
    """Takes items, never more than it has requested.

    Each method returns at once and raises nothing (D9, D15), except `TypeError` for an argument that is None.
    """

    def on_subscribe(self, subscription: Subscription) -> None:
        """Receive the subscription, before any other signal. Items come only after a request (D6, D8)."""
        ...

    def on_next(self, item: T_contra, /) -> None:
        """Receive a requested item. A few items may come after `cancel` (D13)."""
        ...

    def on_error(self, error: Exception) -> None:
        """Learn that the publisher failed. This is the last signal: the subscription is over (D4, D10)."""
        ...

    def on_complete(self) -> None:
        """Learn that there are no more items. This is the last signal: the subscription is over (D4, D10)."""
        ...


class Publisher(Protocol[T_co]):
    """Gives items to subscribers, to each subscriber as many as it has requested."""

    def subscribe(self, subscriber: Subscriber[T_co]) -> None:
        """Begin a subscription: call `on_subscribe`, and then `on_error` if a subscription is impossible (D6, D7).

        Raises:
            TypeError: The subscriber is None. No other error is raised.
        """
        ...

"""Publishers, subscribers and demand: Reactive Streams for asyncio, as Protocols.

The contract of https://www.reactive-streams.org (version 1.0.4) on one event loop. Its methods are plain functions that
return at once; work that takes time goes into tasks of the subscriber's own. The rules D1 to D21, which of the
specification's each stands for, and which do not apply, are in docs/reactive.md; `aiodelay.testing.conformance` has a
suite for publishers and one for subscribers.

All calls are made on one event loop, from one thread.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

__all__ = ["Publisher", "Subscriber", "Subscription"]

T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Subscription(Protocol):
    """The link between one publisher and one subscriber, by which the subscriber says how much it can take."""

    def request(self, n: int) -> None:
        """Ask for `n` more items (D16, D18, D21). Once cancelled or ended, does nothing (D17).

        Args:
            n: 1 or more, without a limit; adds to what was asked for before.

        Raises:
            ValueError: `n` is less than 1; what was asked for before stands (D19).
        """
        ...

    def cancel(self) -> None:
        """Ask for an end: signals stop soon, and the publisher forgets the subscriber (D5, D17, D20)."""
        ...


class Subscriber(Protocol[T_contra]):
    """Takes items, never more than it has requested.

    Each method returns at once and raises nothing (D9, D15), save `TypeError` when it is given None.
    """

    def on_subscribe(self, subscription: Subscription) -> None:
        """Be given the link, before any other signal; nothing comes until something is requested (D6, D8)."""
        ...

    def on_next(self, item: T_contra, /) -> None:
        """Take an item that was requested; a few may come after `cancel` (D13)."""
        ...

    def on_error(self, error: Exception) -> None:
        """Be told that the publisher failed: the last signal, and the subscription is over (D4, D10)."""
        ...

    def on_complete(self) -> None:
        """Be told that there are no more items: the last signal, and the subscription is over (D4, D10)."""
        ...


class Publisher(Protocol[T_co]):
    """Gives items to subscribers, as many as each has requested."""

    def subscribe(self, subscriber: Subscriber[T_co]) -> None:
        """Begin a subscription: calls `on_subscribe`, and `on_error` after it where there can be none (D6, D7).

        Raises:
            TypeError: The subscriber is None. Nothing else is raised.
        """
        ...

"""`Sink`: takes messages when they are due."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

from aiodelay.core.values import Delivery, Demand, SendOutcome

__all__ = ["Sink"]


class Sink(Protocol):
    """Takes messages when they are due, at least once, as many as it has asked for.

    A sink's attribute `system`, if it has one, is the `messaging.system` of its deliveries' spans.
    """

    @property
    def name(self) -> str:
        """The part of `to=` before the colon."""
        ...

    @property
    def limits(self) -> Demand:
        """Most messages and bytes that may be in flight to it; the last message given may exceed the bytes."""
        ...

    def check(self, address: str) -> None:
        """Refuse an address that can never work, before anything is stored.

        Raises:
            TargetError: Says what is allowed.
        """
        ...

    async def __aenter__(self) -> Self:
        """Connect; an error leaves nothing open. After one, here or elsewhere, the sink may be entered again.

        Raises:
            SinkUnavailableError: It cannot be reached; another attempt may succeed.
        """
        ...

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect; idempotent."""
        ...

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        """Send; one outcome per delivery, in order.

        Of a batch for which it raises anything else, or answers otherwise, each message is sent again by itself; the
        one at which that happens again has failed an attempt.

        Raises:
            SinkUnavailableError: Nothing can be sent now. Costs no attempt; the messages return to the store.
        """
        ...

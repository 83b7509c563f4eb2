"""`Sink`: the interface of a sink, which takes due messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

from aiodelay.core.values import Delivery, Demand, SendOutcome

__all__ = ["Sink"]


class Sink(Protocol):
    """Takes due messages, at least once, and never more than its `limits` allow.

    A sink may have an attribute `system`: the value of `messaging.system` in the spans of deliveries to the sink. It
    may have an attribute `place`, which `Source` describes.
    """

    @property
    def name(self) -> str:
        """The part of `to=` before the colon."""
        ...

    @property
    def limits(self) -> Demand:
        """The most messages and bytes in flight to this sink. The last message may exceed the limit of bytes."""
        ...

    def check(self, address: str) -> None:
        """Refuse an address that can never work, before anything is stored.

        Raises:
            TargetError: The address is wrong. The error names the allowed form.
        """
        ...

    async def __aenter__(self) -> Self:
        """Connect. If this fails, nothing stays open. The sink may be entered again after any error.

        Raises:
            SinkUnavailableError: The sink does not answer. Another attempt may succeed.
        """
        ...

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect. Repeated calls do nothing."""
        ...

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        """Send a batch of messages.

        If `send` raises an error other than `SinkUnavailableError`, or returns a wrong number of outcomes, the engine
        sends each message of the batch separately. If `send` raises such an error for a batch of one message, this
        is a failed attempt of the message.

        Returns:
            One outcome for each delivery, in order.

        Raises:
            SinkUnavailableError: Nothing can be sent now. The messages return to the store; no attempt is counted.
        """
        ...

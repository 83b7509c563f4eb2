"""`PublishingEnd`: the base class of the sinks that publish to topics and logs.

A topic remembers the delivery ids of the last 10 minutes. If a sink publishes a delivery id again within this time, the
topic ignores it.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.connections import ConnectedSink
from aiodelay.backends.redis.connection.faults import Fault
from aiodelay.backends.redis.connection.options import Options
from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.records.elements import encode_element
from aiodelay.backends.redis.records.keys import Keys
from aiodelay.core.values import MAX_CLAIM_BYTES, Delivery, Failed, NotTaken, SendOutcome, Sent

from .topic_scripts import place_of

__all__ = ["PublishingEnd"]

REMEMBERED_S = 540.0
"""The time for which a sink may repeat a delivery: one minute less than the topic remembers the delivery id."""
MOST_UNKNOWN = 10_000


class PublishingEnd(ConnectedSink):
    """A sink that publishes to topics.

    An attempt to publish may have an unknown outcome, for example after a timeout. The sink then publishes the message
    again. After 9 minutes this could make a second copy, so `resend_unknown` decides.

    Args:
        server: A URL in the form of a Redis store's URL.
        resend_unknown: If True, the sink publishes the message again even after 9 minutes. If False, it gives the
            message up with the reason `outcome_unknown`.
    """

    keys: Keys

    def __init__(self, server: str | Options, *, resend_unknown: bool) -> None:
        super().__init__(server)
        self._resends_unknown = resend_unknown
        self._unknown: dict[str, float] = {}

    @property
    def place(self) -> str:
        """The server and the namespace of the topics."""
        return place_of(self.options, self.keys)

    @abstractmethod
    async def _publish(self, client: Client, address: str, elements: Sequence[Arg]) -> int | str:
        """Publish pairs of delivery id and element, in order.

        Returns:
            The number of pairs that were published, from the first pair on, or the reason why the topic takes nothing.

        Raises:
            TargetError: No message for this address can ever be sent.
            Fault: The server did not answer, or it refused the call.
        """

    async def _pushed(self, client: Client, address: str, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        given_up = {} if self._resends_unknown else self._given_up(deliveries)
        left = [each for each in deliveries if each.delivery_id not in given_up]
        outcomes: dict[str, SendOutcome] = {**given_up}
        while left:
            part = _first_of(left)
            elements: list[Arg] = [value for each, element in part for value in (each.delivery_id, element)]
            try:
                published = await self._publish(client, address, elements)
            except Fault as fault:
                if fault.kind == "unknown":
                    self._note_unknown(each for each, _ in part)
                raise
            if isinstance(published, str):
                refused = NotTaken(published)
                outcomes |= {each.delivery_id: refused for each in left}
                break
            for each in left[:published]:
                outcomes[each.delivery_id] = Sent()
                self._unknown.pop(each.delivery_id, None)
            left = left[published:]
        return [outcomes[each.delivery_id] for each in deliveries]

    def _note_unknown(self, deliveries: Iterable[Delivery]) -> None:
        now_s = asyncio.get_running_loop().time()
        for each in deliveries:
            self._unknown.setdefault(each.delivery_id, now_s)
        while len(self._unknown) > MOST_UNKNOWN:  # Other processes have sent the oldest deliveries meanwhile.
            del self._unknown[next(iter(self._unknown))]

    def _given_up(self, deliveries: Sequence[Delivery]) -> Mapping[str, SendOutcome]:
        """Return failed outcomes for the deliveries that may no longer be repeated.

        The topic may have forgotten the first attempt, so a second attempt could publish the message twice.
        """
        before_s = asyncio.get_running_loop().time() - REMEMBERED_S
        error = f"it has been unknown for more than {REMEMBERED_S:.0f} s whether the message was published"
        failed = Failed(error, retryable=False, reason="outcome_unknown")
        return {
            each.delivery_id: failed for each in deliveries if self._unknown.get(each.delivery_id, before_s) < before_s
        }


def _first_of(deliveries: Sequence[Delivery]) -> list[tuple[Delivery, bytes]]:
    """Return the first deliveries, as many as one call may carry, each with its element."""
    found: list[tuple[Delivery, bytes]] = []
    size = 0
    for each in deliveries:
        element = encode_element(each)
        size += len(element)
        if found and size > MAX_CLAIM_BYTES:
            break
        found.append((each, element))
    return found

"""Publishing to topics, once in effect: what a topic remembers of is not given to anybody twice."""

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
from aiodelay.core.values import MAX_CLAIM_BYTES, Delivery, Failed, NotTaken, SendOutcome, Sent

__all__ = ["PublishingEnd"]

REMEMBERED_S = 540.0
"""A minute less than a topic remembers what was published from elsewhere."""
MOST_UNKNOWN = 10_000


class PublishingEnd(ConnectedSink):
    """A sink of topics.

    Args:
        server: A URL as of a Redis store.
        resend_unknown: Publish a message again also where the outcome of its first try has been unknown for more than 9
            minutes; otherwise it is given up as `outcome_unknown`.
    """

    def __init__(self, server: str | Options, *, resend_unknown: bool) -> None:
        super().__init__(server)
        self._resends_unknown = resend_unknown
        self._unknown: dict[str, float] = {}

    @abstractmethod
    async def _publish(self, client: Client, address: str, elements: Sequence[Arg]) -> int | str:
        """Publish pairs of delivery id and element; return how many of the first ones, or why none can be.

        Raises:
            TargetError: The address can never work.
            Fault: The server did not answer, or refused.
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
        while len(self._unknown) > MOST_UNKNOWN:  # others have sent them
            del self._unknown[next(iter(self._unknown))]

    def _given_up(self, deliveries: Sequence[Delivery]) -> Mapping[str, SendOutcome]:
        """Return those whose first try the topic may have forgotten, so that another may double them."""
        before_s = asyncio.get_running_loop().time() - REMEMBERED_S
        error = f"whether it was published has been unknown for more than {REMEMBERED_S:.0f} s"
        failed = Failed(error, retryable=False, reason="outcome_unknown")
        return {
            each.delivery_id: failed for each in deliveries if self._unknown.get(each.delivery_id, before_s) < before_s
        }


def _first_of(deliveries: Sequence[Delivery]) -> list[tuple[Delivery, bytes]]:
    """Return the first deliveries with their elements, as many as one call may carry."""
    found: list[tuple[Delivery, bytes]] = []
    size = 0
    for each in deliveries:
        element = encode_element(each)
        size += len(element)
        if found and size > MAX_CLAIM_BYTES:
            break
        found.append((each, element))
    return found

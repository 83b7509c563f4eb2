"""`ConsumerFeed`: takes the messages of one consumer of a topic or log. Retries return to this consumer only."""

from __future__ import annotations

import hashlib
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.faults import Fault
from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.lists.list_consumer import ListConsumer, Store, Taken
from aiodelay.backends.redis.records.elements import encode_record_element
from aiodelay.core.transitions import after_failure
from aiodelay.core.validation import MAX_ID_BYTES
from aiodelay.core.values import Again, Claimed, Dead, Demand, Lane, PutBack
from aiodelay.errors import StoreUnavailableError

from .topic_scripts import Place

__all__ = ["ConsumerFeed"]

log: logging.Logger = logging.getLogger("aiodelay.redis")

AGAIN_AT_ONCE = 100
DIGEST_LENGTH = 32


class ConsumerFeed(ListConsumer):
    """Takes the messages of one consumer for one process.

    Several consumers may give up the same message, and several topics may have messages with the same id. So the id of
    a dead letter ends with the topic and the consumer, and a redrive sends the dead letter to this consumer alone.

    Args:
        client: The client of the topic's server.
        server: The name of the server in error messages.
        place: The topic and the consumer.
        keys: The keys of the scripts, as for `ListConsumer`.
        instance: The name of this process among the processes of the consumer.
        sink: The name of the sink that sends a redriven dead letter to the consumer.
        store: Two functions of the scheduler's store, as for `ListConsumer`.
    """

    def __init__(
        self,
        client: Client,
        server: str,
        place: Place,
        keys: Sequence[str],
        instance: str,
        *,
        sink: str,
        store: Store,
    ) -> None:
        self._place, self._sink = place, sink
        super().__init__(
            client,
            f"consumer {place.consumer} of topic {place.topic} at {server}",
            keys,
            instance,
            store=store,
        )
        self._is_registered, self._is_unknown = False, False

    @abstractmethod
    async def _register(self) -> None:
        """Register the consumer with its topic or log."""

    @abstractmethod
    def _own_address(self) -> str:
        """Return the address of the sink for messages to this consumer alone."""

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        """Claim messages. The first call registers the consumer."""
        if not self._is_registered:
            try:
                await self._register()
            except Fault as fault:
                raise StoreUnavailableError(self._name, fault.reason) from fault
            self._is_registered = True
        return await super().claim(demand, request=request, lease_ms=lease_ms)

    def _note(self, why: bytes, missed: int) -> None:
        if why == b"u" and not self._is_unknown:
            log.warning("%s is no longer registered: it gets no messages", self._name)
        self._is_unknown = why == b"u"
        if missed > 0:
            log.warning("%s missed %d messages, because the topic had dropped them", self._name, missed)
            self._untold += missed

    async def _leave(self, pairs: Sequence[tuple[Again | Dead, Taken]]) -> tuple[list[int], set[int]]:
        """Return retries to the consumer, and store dead letters in the scheduler's store."""
        again = [(why, taken) for why, taken in pairs if isinstance(why, Again)]
        settled: set[int] = set()
        for start in range(0, len(again), AGAIN_AT_ONCE):
            part = again[start : start + AGAIN_AT_ONCE]
            arguments: list[Arg] = []
            for why, taken in part:
                element = encode_record_element(after_failure(taken.record, why))
                arguments += [taken.number, max(why.due_ms - self._now_ms(), 0), element]
            letters = await self._run("again", *arguments)
            settled |= {taken.number for (_, taken), letter in zip(part, letters, strict=True) if letter == ord("s")}
        ended, _ = await super()._leave([(why, taken) for why, taken in pairs if isinstance(why, Dead)])
        return ended, settled

    def _kept(self, message: PutBack) -> PutBack:
        record, address = message.record, self._own_address()
        own = f"@{_within(f'{self._sink}:{address}', MAX_ID_BYTES - DIGEST_LENGTH - len('@'))}"
        letter_id = record.id
        if not letter_id.endswith(own):
            letter_id = f"{_within(letter_id, MAX_ID_BYTES - len(own.encode()))}{own}"
        envelope = replace(record.envelope, id=letter_id, lane=self._sink, address=address)
        return replace(message, record=replace(record, envelope=envelope))


def _within(text: str, most_bytes: int) -> str:
    """Return the text, or its digest if the text has more bytes."""
    data = text.encode()
    return text if len(data) <= most_bytes else hashlib.sha256(data).hexdigest()[:DIGEST_LENGTH]

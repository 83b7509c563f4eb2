"""`Writer`: writes records into topics at least once, and reports the result for each record."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Self

from aiokafka.errors import OutOfOrderSequenceNumber

from aiodelay.backends.kafka.client import TOO_LARGE, ClockCheck, Outgoing, Producer, Written
from aiodelay.backends.kafka.client.options import Cluster

from .targets import refused_topics

__all__ = ["Writer"]

_MOST_REPEATS = 20
_MOST_HALVED = 32


class Writer:
    """Writes with one producer, and after an error with a new producer. It connects at the first write.

    Args:
        cluster: The cluster to write to.
        clock_check: As in `Producer`.
        options: More options of aiokafka's producer.
    """

    _tasks: asyncio.TaskGroup
    """The task group of the open writer. It closes spent producers, while other producers go on."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        clock_check: ClockCheck | None = None,
        **options: Any,  # noqa: ANN401 - aiokafka's
    ) -> None:
        self._cluster, self._clock_check, self._options = cluster, clock_check, options
        self._producer: Producer | None = None
        self._users: Counter[Producer] = Counter()
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._producer is not None:
            self._close(self._producer)
        await self._tasks.__aexit__(None, None, None)

    async def start(self) -> Producer:
        """Return a producer that has had no error yet.

        Raises:
            KafkaError, TimeoutError, OSError: No producer can be started.
        """
        async with self._starting:
            if self._producer is None or self._producer.is_spent:
                producer = Producer(self._cluster, clock_check=self._clock_check, linger_ms=0, **self._options)
                await producer.start()
                self._producer = producer
            return self._producer

    async def write(self, records: Sequence[Outgoing]) -> list[Written]:
        """Write records, and return the result of each record's batch.

        Records of one partition are written in their order. The call may be cancelled.

        Raises:
            KafkaError, TimeoutError, OSError: No producer can be started. Some records may have been written.
        """
        queue = deque([list(range(len(records)))] if records else [])
        found: dict[int, Written] = {}
        repeats = halved = 0
        while queue:
            asked, again = queue.popleft(), list[list[int]]()
            for written in await self._write([records[i] for i in asked]):
                indices = [asked[i] for i in written.indices]
                half = len(indices) // 2
                if isinstance(written.error, TOO_LARGE) and half:
                    # The limit is on batches. Halving finds the records that are too large alone.
                    again += (indices[:half], indices[half:])
                elif isinstance(written.error, OutOfOrderSequenceNumber) and repeats < _MOST_REPEATS:
                    repeats += 1  # this batch failed only because the batch before it was refused (K7)
                    again.append(indices)
                elif half and _is_for_a_record(written) and halved < _MOST_HALVED:
                    # A record is at fault, for example because it has no key and the topic is compacted. If very many
                    # records are at fault, good records in the same batches fail with them.
                    halved += 1
                    again += (indices[:half], indices[half:])
                else:
                    found.update(dict.fromkeys(indices, written))
            queue.extendleft(reversed(again))
        return [found[i] for i in range(len(records))]

    async def _write(self, records: Sequence[Outgoing]) -> Sequence[Written]:
        producer = await self.start()
        self._users[producer] += 1
        try:
            return await producer.write(records)
        finally:
            self._users[producer] -= 1
            if producer.is_spent and not self._users[producer]:
                self._close(producer)

    def _close(self, producer: Producer) -> None:
        del self._users[producer]
        if producer is self._producer:
            self._producer = None
        self._tasks.create_task(producer.close(), name="aiodelay kafka producer closes")


def _is_for_a_record(written: Written) -> bool:
    """Say whether a batch was refused because of one of its records."""
    return written.error is not None and not written.in_doubt and not refused_topics(written.error, "")

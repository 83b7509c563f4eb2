"""The stream reader of `format("aiodelay_kafka")`. A task reads an exact range of offsets of one partition."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, Final

import pyarrow as pa
from aiokafka import TopicPartition
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadLimit

from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.records import readable
from aiodelay.backends.kafka.store.journal_reader import open_journal
from aiodelay.backends.kafka.topics.observing import answering, observer
from aiodelay.backends.kafka.topics.topic import history_partitions
from aiodelay.core.durations import LAST_MS
from aiodelay.errors import ConfigurationError, shortened

from .following import STARTING, Follower, Following, Piece, following_of
from .options import Options
from .places import FORM, read_topic

__all__ = ["MOST_AT_ONCE", "TopicReader", "readable_partitions", "topic_reader_of"]

MOST_AT_ONCE: Final = 100_000
_PURPOSE: Final = "of"
_REFUSAL_MS: Final = 1_000
"""Within this time a broker reports that a topic may not be read."""
_TIME = pa.timestamp("us", tz="UTC")
_HEADER = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])


async def readable_partitions(cluster: Cluster, topic: str) -> int:
    """Check that a topic may be read, and return the number of its partitions.

    Raises:
        StoreMismatchError: There is no such topic.
        StoreUnavailableError: The cluster does not answer, or this user may not read the topic.
    """
    n = await history_partitions(cluster, topic)
    places = [TopicPartition(topic, part) for part in range(n)]
    async with observer(cluster) as consumer:
        with answering(cluster):
            consumer.assign(places)
            await consumer.seek_to_end(*places)
            await consumer.getmany(timeout_ms=_REFUSAL_MS)
    return n


class _Settings(Following, frozen=True, kw_only=True):
    """The options of the stream. The checkpoint stores `purpose`. A checkpoint with another purpose is an error."""

    purpose: str


class TopicReader(Follower):
    """Follows a topic. An offset has the keys that `Follower` describes, and also the purpose of the stream.

    Args:
        settings: The options of the stream.
    """

    def __init__(self, settings: _Settings) -> None:
        super().__init__(settings)
        self._settings = settings

    def spans(self) -> Mapping[int, range]:
        """Return the offsets that the topic has now, by partition."""

        async def ask() -> Mapping[int, range]:
            async with open_journal(*self._place()) as reader:
                return await reader.spans()

        return asyncio.run(ask())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the end of the batch that begins at `start`.

        Raises:
            ConfigurationError: The checkpoint has another purpose.
            EventsLostError: Records at `start` were deleted.
            StoreUnavailableError: The cluster did not answer.
        """
        return super().latestOffset(self._own(start), limit) | {_PURPOSE: self._settings.purpose}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Split the range between two offsets into pieces."""
        return super().partitions(self._own(start), self._own(end))

    def _own(self, offset: dict[str, Any]) -> dict[str, Any]:
        if STARTING in offset:
            return offset
        numbers = dict(offset)
        found = numbers.pop(_PURPOSE, None)
        if found != self._settings.purpose:
            raise ConfigurationError("checkpoint", f"for {shortened(found)}", shortened(self._settings.purpose))
        return numbers

    async def batches(self, piece: Piece) -> AsyncGenerator[pa.RecordBatch]:
        """Yield the records of a piece in record batches."""
        async with open_journal(*self._place()) as reader:
            async for found in reader.records(piece.part, piece.span, lambda gone: self.lost(piece.part, gone)):
                if found:
                    yield _batch(found)

    def _place(self) -> tuple[Cluster, str]:
        return read_topic(self._settings.store, "option 'url'")


def _batch(found: Sequence[Any]) -> pa.RecordBatch:
    headers = [each.headers or () for each in found]
    every = list(chain.from_iterable(headers))
    fields = [
        pa.array([readable(name) for name, _ in every], pa.string()),
        pa.array([v for _, v in every], pa.binary()),
    ]
    offsets = pa.array([0, *accumulate(map(len, headers))], pa.int32())
    arrays = [
        pa.array([each.key for each in found], pa.binary()),
        pa.array([each.value for each in found], pa.binary()),
        pa.array([each.topic for each in found], pa.string()),
        pa.array([each.partition for each in found], pa.int32()),
        pa.array([each.offset for each in found], pa.int64()),
        pa.array([min(max(each.timestamp, 0), LAST_MS) * 1000 for each in found], _TIME),  # some producers give ns
        pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(fields, fields=list(_HEADER))),
    ]
    return pa.RecordBatch.from_arrays(arrays, ["key", "value", "topic", "partition", "offset", "timestamp", "headers"])


def topic_reader_of(given: Mapping[str, str]) -> TopicReader:
    """Return the stream reader of the topic that the options name.

    Raises:
        ConfigurationError: An option is missing, unknown or out of range.
    """
    options = Options(given)
    settings = _Settings(
        store=options.required("url", FORM),
        purpose=options.text("purpose", "") or "",
        **following_of(options, MOST_AT_ONCE),
    )
    options.finish()
    read_topic(settings.store, "option 'url'")
    return TopicReader(settings)

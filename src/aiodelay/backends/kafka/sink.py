"""`to="kafka:<topic>"`: records in topics, from any store, at least once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

from aiokafka.errors import InvalidTopicError, KafkaConnectionError, UnknownTopicOrPartitionError

from aiodelay.core.values import Delivery, Demand, Failed, SendOutcome, Sent
from aiodelay.errors import SinkUnavailableError, TargetError, shortened
from aiodelay.ports.clock import Clock, SystemClock

from .client import PERMANENT, UNAVAILABLE, Outgoing, Written, reason_of
from .client.options import Cluster, read_url
from .records import SINK, delivered, is_topic
from .topics.writer import Writer

__all__ = ["NAMES", "KafkaSink", "check_topic", "open_sink"]

NAMES = "1 to 249 of A-Z a-z 0-9 . _ -, not '.', '..' or beginning with '__'"
"""What can be the name of a topic, or of a member of a group."""
_SENT = Sent()
_FINAL = (*PERMANENT, InvalidTopicError)


def check_topic(topic: str, field: str = "topic in to") -> str:
    """Refuse what cannot be a topic, and Kafka's own.

    Raises:
        TargetError: Says what is allowed.
    """
    if not is_topic(topic):
        raise TargetError(field, shortened(topic), NAMES)
    return topic


class KafkaSink:
    """Takes messages into topics: key, payload and headers as scheduled, by Java's partitioner, `acks=all`, idempotent.

    A record may be written twice if its acknowledgement is lost with the connection, or this process ends before its
    message is settled; consumers drop the second by header `aiodelay-delivery-id`.

    Args:
        cluster: `host:9092`, several with commas, or a `kafka://` URL (docs/reference.md).
        name: What stands before the colon in `to=`.
        messages: Most messages in flight.
        max_bytes: Most bytes in flight.
        clock: For `scheduler-timestamp`.
        options: Further options of aiokafka's client, such as `ssl_context` or `sasl_oauth_token_provider`.

    Raises:
        ConfigurationError: The cluster, or an option in its URL, cannot be read.
    """

    name: str
    limits: Demand
    system: str = "kafka"

    def __init__(
        self,
        cluster: str | Cluster,
        *,
        name: str = SINK,
        messages: int = 2_000,
        max_bytes: int = 8 << 20,
        clock: Clock | None = None,
        **options: Any,  # noqa: ANN401 - aiokafka's
    ) -> None:
        self.cluster: Cluster = read_url(cluster, "KafkaSink") if isinstance(cluster, str) else cluster
        self.name, self.limits = name, Demand(messages, max_bytes)
        self._clock, self._options = clock or SystemClock(), options
        self._writer = Writer(self.cluster, **options)

    def is_at(self, cluster: Cluster) -> bool:
        """Say whether this is surely the same cluster, with the same login."""
        return not self._options and self.cluster.is_same(cluster)

    def check(self, address: str) -> None:
        """Refuse what cannot be a topic.

        Raises:
            TargetError: Says what is allowed.
        """
        check_topic(address)

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            SinkUnavailableError: The cluster does not answer.
        """
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._writer)
            try:
                await self._writer.start()
            except UNAVAILABLE as error:
                raise SinkUnavailableError(self.name, reason_of(error)) from error
            stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._writer.__aexit__(*exc_info)

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        """Write the records. May be cancelled: what was on its way then may be written.

        Raises:
            SinkUnavailableError: Nothing was written, as far as is known.
        """
        now_ms = self._clock.now_ms()
        records = [
            Outgoing(each.envelope.address, *delivered(each.envelope, each.delivery_id, each.attempt, now_ms=now_ms))
            for each in deliveries
        ]
        try:
            written = await self._writer.write(records)
        except UNAVAILABLE as error:
            raise SinkUnavailableError(self.name, reason_of(error)) from error
        if len(written) == 1 and written[0].error is None:
            return [Sent(written[0].partition, written[0].offset)]
        if all(each.error is None for each in written):
            return [_SENT] * len(written)
        outcomes = [_outcome(each, record) for each, record in zip(written, records, strict=True)]
        unknown = (each.error for each, outcome in zip(written, outcomes, strict=True) if outcome is None)
        problem = next((reason_of(error) for error in unknown if error is not None), "")
        if records and not any(outcomes):
            raise SinkUnavailableError(self.name, problem)
        return [outcome or Failed(problem) for outcome in outcomes]


def _outcome(written: Written, record: Outgoing) -> SendOutcome | None:
    """Return what became of a record; None: that is not known."""
    error = written.error
    if error is None:
        return _SENT
    if written.in_doubt or isinstance(error, TimeoutError | KafkaConnectionError):
        return None
    reason = f"no topic {record.topic!r}" if isinstance(error, UnknownTopicOrPartitionError) else reason_of(error)
    return Failed(reason, retryable=not isinstance(error, _FINAL))


def open_sink(url: str) -> KafkaSink:
    """Open `kafka://host:9092`."""
    return KafkaSink(url)

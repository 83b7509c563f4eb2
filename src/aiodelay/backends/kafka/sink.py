"""`KafkaSink`, for `to="kafka:<topic>"`: writes messages of any store as records into topics, at least once."""

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

NAMES = "1 to 249 of the characters A-Z a-z 0-9 . _ -; but not '.', not '..', and no name that begins with '__'"
"""The form of a topic's name, and of the name of a member of a group."""
_SENT = Sent()
_FINAL = (*PERMANENT, InvalidTopicError)


def check_topic(topic: str, field: str = "the topic in to=") -> str:
    """Refuse a name that no topic can have, and the names of Kafka's own topics.

    Raises:
        TargetError: The name is not allowed. The error says which names are allowed.
    """
    if not is_topic(topic):
        raise TargetError(field, shortened(topic), NAMES)
    return topic


class KafkaSink:
    """Writes messages into topics, with key, payload and headers as scheduled.

    It uses Java's partitioner, `acks=all` and an idempotent producer. A record may be written twice if the connection
    is lost before its acknowledgement, or if this process ends before its message is settled. Consumers recognise the
    second record by its header `aiodelay-delivery-id`.

    Args:
        cluster: `host:9092`, several hosts with commas between, or a `kafka://` URL (docs/reference.md).
        name: The name of the sink, which comes before the colon in `to=`.
        messages: Most messages in flight.
        max_bytes: Most bytes in flight.
        clock: The clock for the header `scheduler-timestamp`.
        options: More options of aiokafka's producer, such as `ssl_context` or `sasl_oauth_token_provider`.

    Raises:
        ConfigurationError: The cluster, or an option in its URL, cannot be used.
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
        """Say whether the sink certainly writes to this cluster, with the same login."""
        return not self._options and self.cluster.is_same(cluster)

    def check(self, address: str) -> None:
        """Refuse an address that no topic for messages can have as its name.

        Raises:
            TargetError: The name is not allowed. The error says which names are allowed.
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
        """Write the records. The call may be cancelled: records that were under way may then be written or not.

        Raises:
            SinkUnavailableError: The outcome of every record is unknown. Any record may have been written.
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
    """Return the outcome for a record, or None if the outcome is unknown."""
    error = written.error
    if error is None:
        return _SENT
    if written.in_doubt or isinstance(error, TimeoutError | KafkaConnectionError):
        return None
    reason = f"no topic {record.topic!r}" if isinstance(error, UnknownTopicOrPartitionError) else reason_of(error)
    return Failed(reason, retryable=not isinstance(error, _FINAL))


def open_sink(url: str) -> KafkaSink:
    """Return the sink for a URL such as `kafka://host:9092`."""
    return KafkaSink(url)

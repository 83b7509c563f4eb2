"""All names of spans, attributes and metrics. OpenTelemetry's messaging conventions may still change some of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

__all__ = [
    "DURATION_BUCKETS",
    "METRICS",
    "OTHER",
    "SCHEMA",
    "SCOPE",
    "SYSTEM",
    "Kind",
    "Metric",
]

SCOPE = "aiodelay"
SCHEMA = "https://opentelemetry.io/schemas/1.44.0"
SYSTEM, KAFKA = "aiodelay", "kafka"
OTHER = "_OTHER"
"""The label that destinations share once the greatest number of separate labels is in use."""

# --- attributes -------------------------------------------------------------------------------------------

MESSAGING_SYSTEM = "messaging.system"
OPERATION_NAME, OPERATION_TYPE = "messaging.operation.name", "messaging.operation.type"
DESTINATION = "messaging.destination.name"
MESSAGE_ID = "messaging.message.id"
PARTITION, KAFKA_OFFSET = "messaging.destination.partition.id", "messaging.kafka.offset"
MESSAGE_COUNT = "messaging.batch.message_count"
ERROR_TYPE = "error.type"
DELIVERY_TIMESTAMP = "aiodelay.message.delivery_timestamp"
ATTEMPT, LATENESS = "aiodelay.message.attempt", "aiodelay.message.lateness"
STATE = "aiodelay.message.state"
CANCEL_OUTCOME = "aiodelay.cancel.outcome"
REASON = "aiodelay.reason"
STORE, NAMESPACE = "aiodelay.store", "aiodelay.namespace"

# --- operations: name, type -------------------------------------------------------------------------------

SCHEDULE, CREATE, DELIVER = "schedule", "create", "deliver"
CANCEL, RESCHEDULE, FIRE = "cancel_scheduled", "reschedule", "fire"
PROCESS, RELEASE, DEAD_LETTER = "process", "release", "dead_letter"
CLAIM, SETTLE = "claim", "settle"
TYPES: Mapping[str, str] = {
    SCHEDULE: "send",
    CREATE: "create",
    DELIVER: "send",
    PROCESS: "process",
    RELEASE: "settle",
    DEAD_LETTER: "settle",
    CLAIM: "receive",
    SETTLE: "settle",
}
"""The type that the conventions give to an operation. They have no type for the operations that are missing here."""

# --- metrics ----------------------------------------------------------------------------------------------

DURATION_BUCKETS: tuple[float, ...] = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_LATENESS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)
_DELAY_BUCKETS = (1, 10, 60, 300, 900, 3600, 21_600, 86_400, 604_800, 2_592_000)
_RESTORE_BUCKETS = (0.1, 0.5, 1, 5, 10, 30, 60, 300, 900)

Kind: TypeAlias = Literal["counter", "histogram", "gauge", "up_down_counter"]
"""The kind of an instrument. Gauges and up-down counters call a function when metrics are collected."""


class Metric(NamedTuple):
    """One instrument.

    Attributes:
        name: The name of the metric.
        kind: The kind of the instrument.
        unit: The unit of the values.
        description: A sentence for operators.
        buckets: For a histogram: the advised bucket boundaries.
    """

    name: str
    kind: Kind
    unit: str
    description: str
    buckets: tuple[float, ...] = ()


OPERATION_DURATION = Metric(
    "messaging.client.operation.duration",
    "histogram",
    "s",
    "Duration of a call to the store or the sink.",
    DURATION_BUCKETS,
)
SENT = Metric("messaging.client.sent.messages", "counter", "{message}", "Messages scheduled or delivered to sinks.")
CONSUMED = Metric("messaging.client.consumed.messages", "counter", "{message}", "Messages given to a handler.")
PROCESS_DURATION = Metric(
    "messaging.process.duration", "histogram", "s", "Duration of a handler's run.", DURATION_BUCKETS
)
DELIVERY_LATENESS = Metric(
    "aiodelay.delivery.lateness", "histogram", "s", "Start of the first attempt minus due time.", _LATENESS_BUCKETS
)
SCHEDULE_DELAY = Metric(
    "aiodelay.schedule.delay", "histogram", "s", "Time from scheduling a message to its due time.", _DELAY_BUCKETS
)
DEAD_LETTERED = Metric(
    "aiodelay.messages.dead_lettered", "counter", "{message}", "Messages that handlers and sinks gave up, by reason."
)
RELEASED = Metric(
    "aiodelay.messages.released", "counter", "{message}", "Messages that went back to the store, by reason."
)
LEASES_LOST = Metric("aiodelay.leases.lost", "counter", "{lease}", "Leases that ended before the claim was settled.")
CANCELLATIONS = Metric("aiodelay.cancellations", "counter", "{message}", "Calls of cancel, by outcome.")
WAKEUPS = Metric("aiodelay.dispatcher.wakeups", "counter", "{wakeup}", "Wake-ups of the dispatch loop, by reason.")
OVERDUE_AGE = Metric("aiodelay.overdue.age", "gauge", "s", "Age of the oldest message that is due and not claimed.")
SERVED = Metric(
    "aiodelay.destination.served",
    "gauge",
    "{destination}",
    "1 if a live instance takes the destination's messages, 0 if none does.",
)
MESSAGES = Metric("aiodelay.messages", "up_down_counter", "{message}", "Messages in the store, by lane and state.")
IN_FLIGHT = Metric(
    "aiodelay.handler.in_flight",
    "up_down_counter",
    "{message}",
    "Messages delivered to this process and not yet settled.",
)
DEMAND = Metric("aiodelay.handler.demand", "up_down_counter", "{message}", "Messages requested and not yet received.")
STORE_FILL = Metric("aiodelay.store.fill", "gauge", "{fraction}", "Part of the server's memory limit that is used.")
LIST_LENGTH = Metric("aiodelay.list.length", "gauge", "{message}", "Elements in a Redis list that messages go to.")
PARTITIONS = Metric(
    "aiodelay.assignment.partitions", "gauge", "{partition}", "Kafka partitions that this process owns."
)
RESTORE_DURATION = Metric(
    "aiodelay.restore.duration",
    "histogram",
    "s",
    "Time from owning a Kafka partition until it serves claims.",
    _RESTORE_BUCKETS,
)

METRICS: tuple[Metric, ...] = (
    OPERATION_DURATION,
    SENT,
    CONSUMED,
    PROCESS_DURATION,
    DELIVERY_LATENESS,
    SCHEDULE_DELAY,
    DEAD_LETTERED,
    RELEASED,
    LEASES_LOST,
    CANCELLATIONS,
    WAKEUPS,
    OVERDUE_AGE,
    SERVED,
    MESSAGES,
    IN_FLIGHT,
    DEMAND,
    STORE_FILL,
    LIST_LENGTH,
    PARTITIONS,
    RESTORE_DURATION,
)

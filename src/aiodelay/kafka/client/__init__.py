"""aiokafka as aiodelay uses it: all that reaches into it, and what is done about its faults (decision 7)."""

from .assignor import ASSIGNOR
from .producer import (
    BATCH_BYTES,
    CLOSE_S,
    INVALID_RECORD,
    PERMANENT,
    REQUEST_BYTES,
    TOO_LARGE,
    UNAVAILABLE,
    Outgoing,
    Producer,
    Written,
    consumer_of,
    log_failure,
    missing_right,
    reason_of,
    stop,
    tame,
)
from .topic_ids import NO_TOPIC_IDS, topic_id
from .transactions import AbortedError, FencedError, InDoubtError, Transactions

__all__ = [
    "ASSIGNOR",
    "BATCH_BYTES",
    "CLOSE_S",
    "INVALID_RECORD",
    "NO_TOPIC_IDS",
    "PERMANENT",
    "REQUEST_BYTES",
    "TOO_LARGE",
    "UNAVAILABLE",
    "AbortedError",
    "FencedError",
    "InDoubtError",
    "Outgoing",
    "Producer",
    "Transactions",
    "Written",
    "consumer_of",
    "log_failure",
    "missing_right",
    "reason_of",
    "stop",
    "tame",
    "topic_id",
]

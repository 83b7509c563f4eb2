"""The only code that makes Kafka clients. It subclasses aiokafka's classes and uses their private parts.

Begin with `client`, which all clients share. `_overrides` has the subclasses. docs/decisions/0007-kafka-client.md
describes the faults of aiokafka, K1 to K31.
"""

from .versions import check_version

try:
    from .admin import Admin, admin_of
    from .assignor import ASSIGNOR
    from .client import Client, client_of
    from .clock_check import ClockCheck
    from .consumer import CLOSE_S, Consumer, consumer_of, plain_consumer_of, stop
    from .errors import (
        INVALID_RECORD,
        MAY_NOT_CREATE,
        PERMANENT,
        TOO_LARGE,
        UNAVAILABLE,
        log_failure,
        missing_right,
        reason_of,
    )
    from .outgoing import Outgoing, Written
    from .producer import BATCH_BYTES, REQUEST_BYTES, Producer
    from .topic_ids import NO_TOPIC_IDS, rights_on, topic_id
    from .transactions import AbortedError, FencedError, InDoubtError, Transactions
except (ImportError, AttributeError):
    check_version()  # another version of aiokafka has other private names
    raise

__all__ = [
    "ASSIGNOR",
    "BATCH_BYTES",
    "CLOSE_S",
    "INVALID_RECORD",
    "MAY_NOT_CREATE",
    "NO_TOPIC_IDS",
    "PERMANENT",
    "REQUEST_BYTES",
    "TOO_LARGE",
    "UNAVAILABLE",
    "AbortedError",
    "Admin",
    "Client",
    "ClockCheck",
    "Consumer",
    "FencedError",
    "InDoubtError",
    "Outgoing",
    "Producer",
    "Transactions",
    "Written",
    "admin_of",
    "check_version",
    "client_of",
    "consumer_of",
    "log_failure",
    "missing_right",
    "plain_consumer_of",
    "reason_of",
    "rights_on",
    "stop",
    "topic_id",
]

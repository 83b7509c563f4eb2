"""Kafka's errors: groups of them by what the caller can do, their reasons in words, and how they are logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from aiokafka.errors import (
    BrokerResponseError,
    GroupAuthorizationFailedError,
    InvalidTimestampError,
    KafkaError,
    MessageSizeTooLargeError,
    PolicyViolationError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
)

from aiodelay.errors import cut

__all__ = [
    "INVALID_RECORD",
    "INVALID_RECORD_CODE",
    "MAY_NOT_CREATE",
    "PERMANENT",
    "TOO_LARGE",
    "UNAVAILABLE",
    "log_failure",
    "missing_right",
    "reason_of",
]

RIGHT_S = 60.0
"""So long a missing right is not logged again."""
UNAVAILABLE: tuple[type[Exception], ...] = (KafkaError, TimeoutError, OSError)
INVALID_RECORD_CODE = 87


class _InvalidRecordError(BrokerResponseError):  # type: ignore[misc]  # aiokafka has no types
    """The topic refuses what a record is, such as one without key where it is compacted."""

    errno = INVALID_RECORD_CODE
    message = "INVALID_RECORD"
    description = "the topic refuses such a record (one without key, where it is compacted)"


class _MayNotCreateError(TopicAuthorizationFailedError):  # type: ignore[misc]  # aiokafka has no types
    """This user may not create a topic; the argument names it."""


MAY_NOT_CREATE: type[Exception] = _MayNotCreateError
"""What creating a topic fails with that this user may not create."""
INVALID_RECORD: type[Exception] = _InvalidRecordError
"""A topic refuses a record for what the record is."""
TOO_LARGE: tuple[type[Exception], ...] = (MessageSizeTooLargeError, RecordListTooLargeError)
"""A topic refuses a batch that has too many bytes."""
PERMANENT: tuple[type[Exception], ...] = (*TOO_LARGE, INVALID_RECORD, InvalidTimestampError, PolicyViolationError)
"""A topic refuses a record, and refuses it again if we send it again."""


def log_failure(log: logging.Logger, what: str, reason: str, error: Exception, expected: tuple[type, ...]) -> None:
    """Log why something begins anew; with its traceback, as an error, if it is a fault of our own.

    A right that is missing stops many things many times over: it is logged once a minute.
    """
    now_s = asyncio.get_running_loop().time()
    if not isinstance(error, expected):
        log.error("%s, by a fault of aiodelay itself: %s", what, reason, exc_info=error)
    elif _RIGHT not in reason:
        log.warning("%s: %s", what, reason)
    elif now_s < _quiet_until.get(reason, now_s):
        log.debug("%s: %s", what, reason)
    else:
        _quiet_until[reason] = now_s + RIGHT_S
        log.error("%s, and what needs it is tried again (docs/kafka.md#rights)", reason)


_RIGHT = "the right "
_quiet_until: dict[str, float] = {}
"""Until when a missing right is not logged again."""
_RIGHTS: dict[type[BaseException], tuple[str, str]] = {
    GroupAuthorizationFailedError: ("Read", "Group"),
    MAY_NOT_CREATE: ("Create", "Topic"),
    TransactionalIdAuthorizationFailed: ("Write", "TransactionalId"),
}
"""Which operation on which resource an error is about; of a topic, who asks knows the operation."""


def reason_of(error: BaseException, operation: str = "Write") -> str:
    """Return an error in words, on one line; a missing right is named.

    Args:
        error: Any.
        operation: The operation on a topic that failed.
    """
    if type(error) is TimeoutError:
        return "no answer in time"
    right = (operation, "Topic") if type(error) is TopicAuthorizationFailedError else _RIGHTS.get(type(error))
    if right is not None and error.args:
        return cut(missing_right(right[0], right[1], error.args[0]), 400)
    return cut(str(error) or type(error).__name__, 200)


def missing_right(operation: str, resource: str, names: str | Collection[str]) -> str:
    """Name a missing right in the words of kafka-acls.sh."""
    named = [names] if isinstance(names, str) else sorted(names)
    if resource == "TransactionalId":  # one for each partition, which are granted together
        named = [f"{name.rpartition('.')[0]}. and all names with this prefix" for name in named]
    return f"{_RIGHT}{operation} on {resource} {', '.join(named)} is missing"

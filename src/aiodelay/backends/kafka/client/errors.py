"""Kafka's errors: groups by what the caller can do, their reasons in words, and how they are logged."""

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
"""Pause between two log lines about the same missing right."""
UNAVAILABLE: tuple[type[Exception], ...] = (KafkaError, TimeoutError, OSError)
INVALID_RECORD_CODE = 87


class _InvalidRecordError(BrokerResponseError):  # type: ignore[misc]  # aiokafka has no types
    """The topic refuses this kind of record, such as a record without a key in a compacted topic."""

    errno = INVALID_RECORD_CODE
    message = "INVALID_RECORD"
    description = "the topic refuses this kind of record, for example one without a key in a compacted topic"


class _MayNotCreateError(TopicAuthorizationFailedError):  # type: ignore[misc]  # aiokafka has no types
    """This user may not create a topic. The argument is the topic's name."""


MAY_NOT_CREATE: type[Exception] = _MayNotCreateError
"""The error for a topic that this user may not create."""
INVALID_RECORD: type[Exception] = _InvalidRecordError
"""The error of a topic that refuses this kind of record."""
TOO_LARGE: tuple[type[Exception], ...] = (MessageSizeTooLargeError, RecordListTooLargeError)
"""The errors of a topic that refuses a batch with too many bytes."""
PERMANENT: tuple[type[Exception], ...] = (*TOO_LARGE, INVALID_RECORD, InvalidTimestampError, PolicyViolationError)
"""The errors of a topic that refuses a record now and at each repetition."""


def log_failure(log: logging.Logger, what: str, reason: str, error: Exception, expected: tuple[type, ...]) -> None:
    """Log the failure of an action that will be tried again. An unexpected error is logged with its traceback.

    A missing right makes many actions fail many times. Each missing right is logged as an error once a minute.
    """
    now_s = asyncio.get_running_loop().time()
    if not isinstance(error, expected):
        log.error("%s, because of a bug in aiodelay: %s", what, reason, exc_info=error)
    elif _RIGHT not in reason:
        log.warning("%s: %s", what, reason)
    elif now_s < _quiet_until.get(reason, now_s):
        log.debug("%s: %s", what, reason)
    else:
        _quiet_until[reason] = now_s + RIGHT_S
        log.error("%s; actions that need this right are tried again (docs/kafka.md#rights)", reason)


_RIGHT = "the right "
_quiet_until: dict[str, float] = {}
"""For each missing right: the time in the event loop before which it is not logged as an error again."""
_RIGHTS: dict[type[BaseException], tuple[str, str]] = {
    GroupAuthorizationFailedError: ("Read", "Group"),
    MAY_NOT_CREATE: ("Create", "Topic"),
    TransactionalIdAuthorizationFailed: ("Write", "TransactionalId"),
}
"""For each error: the operation and the kind of resource for which a right is missing.

`TopicAuthorizationFailedError` is not among these errors: only the caller knows the operation that has failed.
"""


def reason_of(error: BaseException, operation: str = "Write") -> str:
    """Return an error in words, on one line. If a right is missing, the words name it.

    Args:
        error: Any error.
        operation: The operation on a topic that has failed.
    """
    if type(error) is TimeoutError:
        return "no answer in time"
    right = (operation, "Topic") if type(error) is TopicAuthorizationFailedError else _RIGHTS.get(type(error))
    if right is not None and error.args:
        return cut(missing_right(right[0], right[1], error.args[0]), 400)
    return cut(str(error) or type(error).__name__, 200)


def missing_right(operation: str, resource: str, names: str | Collection[str]) -> str:
    """Return a text that names a missing right, in the words of kafka-acls.sh."""
    named = [names] if isinstance(names, str) else sorted(names)
    if resource == "TransactionalId":  # each partition has its own id; a grant for the common prefix covers all ids
        named = [f"{name.rpartition('.')[0]}. and all names with this prefix" for name in named]
    return f"{_RIGHT}{operation} on {resource} {', '.join(named)} is missing"

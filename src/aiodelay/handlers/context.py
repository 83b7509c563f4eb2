"""`Context`, which a handler receives with its event, and `Later` and `Reject`, which it may return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from types import NoneType, UnionType
from typing import Generic, TypeVar, Union, get_args, get_origin

from aiodelay.core import transitions
from aiodelay.core.durations import Duration, format_duration, from_epoch_ms, parse_duration
from aiodelay.core.retry import GiveUp, Retry
from aiodelay.core.validation import check_flag
from aiodelay.core.values import Claim
from aiodelay.errors import ConfigurationError, shortened

__all__ = ["Later", "Reject", "RunContext", "is_context"]

S = TypeVar("S")

MILLISECOND = timedelta(milliseconds=1)  # `n * MILLISECOND` takes a quarter of the time of `timedelta(milliseconds=n)`


class RunContext(Generic[S]):
    """One attempt at delivering one message, or a batch of messages. Users see the subclass `Context`.

    `scheduler.py` defines `Context`, because `Context` names the class `Scheduler`. This module cannot import
    `Scheduler`.
    """

    __slots__ = ("_batch", "_claim", "_lateness_ms", "_record", "_retry", "scheduler")

    scheduler: S
    """The scheduler that delivers the message. A handler may schedule messages with it."""

    def __init__(
        self, claim: Claim, lateness_ms: int, retry: Retry, scheduler: S, batch: Sequence[RunContext[S]] = ()
    ) -> None:
        self._claim, self._record, self._lateness_ms, self.scheduler = claim, claim.record, lateness_ms, scheduler
        self._retry = retry
        self._batch = batch

    def of_batch(self, messages: Sequence[RunContext[S]]) -> RunContext[S]:
        """Return the context of a batch. This is the context of its first message."""
        return type(self)(self._claim, self._lateness_ms, self._retry, self.scheduler, tuple(messages))

    @property
    def messages(self) -> Sequence[RunContext[S]]:
        """The contexts of all messages of the run, in the order of the events.

        For a handler of batches, all other properties belong to the first message.
        """
        return self._batch or (self,)

    def __repr__(self) -> str:
        return f"<Context {self.delivery_id} attempt {self.attempt}>"

    @property
    def id(self) -> str:
        """The message id; for an occurrence of a recurring message, the id of the series."""
        return transitions.base_id(self._record.envelope.id)

    @property
    def delivery_id(self) -> str:
        """`id/revision/occurrence-due`: the same for every attempt. Use it to recognise repeated deliveries."""
        return transitions.delivery_id(self._record)

    @property
    def due(self) -> datetime:
        """The due time of the message. Retries do not change it."""
        return from_epoch_ms(self._record.due_ms)

    @property
    def lateness(self) -> timedelta:
        """The start of this attempt minus the due time, never negative."""
        return self._lateness_ms * MILLISECOND

    @property
    def queued_ms(self) -> int | None:
        """Milliseconds that the message waited in the list from which the handler's source took it.

        None if the message came from the store, as retries do, or if the time of its push is not known.
        """
        return self._claim.queued_ms

    @property
    def missed(self) -> int:
        """The number of messages that expired in the source between the previous message and this message.

        The previous message is the last message that this process received from the source.
        """
        return self._claim.missed

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1. Earlier attempts count only if they finished."""
        return self._record.attempt + 1

    @property
    def is_last_attempt(self) -> bool:
        """Whether the retry policy allows no further attempt: if this attempt fails, the message becomes a dead letter.

        `Retry.by_type` may give the raised error a policy with more attempts, or with fewer: see `would_give_up`.
        """
        return self.attempt >= self._retry.attempts

    def would_give_up(self, error: BaseException) -> bool:
        """Return whether the message becomes a dead letter if this attempt raises this error, by the retry policy.

        This counts `Retry.by_type`, too.
        """
        return isinstance(self._retry.decide(self.attempt, error, 0), GiveUp)

    @property
    def headers(self) -> Mapping[str, bytes]:
        """The headers from `schedule`."""
        return self._record.envelope.headers

    @property
    def key(self) -> bytes | None:
        """The key from `schedule`."""
        return self._record.envelope.key

    @property
    def scheduled_at(self) -> datetime:
        """When the message was scheduled or replaced, on the store's clock."""
        return from_epoch_ms(self._record.revision)


def is_context(hint: object) -> bool:
    """Return whether an annotation is `Context`, or `Context | None`."""
    classes = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    (class_, *others) = [each for each in classes if each is not NoneType] or [None]
    return not others and RunContext in getattr(class_, "__bases__", ())


class Later:
    """A handler's result: deliver the message again after `delay`.

    Args:
        delay: The time from now until the next attempt.
        counts: Whether this run counts as an attempt. If it does, and the retry policy allows no further attempt, the
            message becomes a dead letter, as after an exception.

    Raises:
        ConfigurationError: `delay` is not a duration, or `counts` is not a bool.
    """

    __slots__ = ("counts", "delay_ms")

    delay_ms: int
    """The delay in milliseconds."""
    counts: bool
    """Whether the run counts as an attempt."""

    def __init__(self, delay: Duration, *, counts: bool = False) -> None:
        self.delay_ms = parse_duration(delay, field="Later.delay", error=ConfigurationError)
        self.counts = check_flag(counts, "Later.counts")

    def __repr__(self) -> str:
        return f"Later('{format_duration(self.delay_ms)}'{', counts=True' if self.counts else ''})"


class Reject:
    """A handler's result: give the message up. The message becomes a dead letter with this reason.

    Raises:
        ConfigurationError: The reason is not text, or is empty.
    """

    __slots__ = ("reason",)

    reason: str
    """The error text of the dead letter."""

    def __init__(self, reason: str) -> None:
        if not isinstance(reason, str) or not reason:
            raise ConfigurationError("Reject.reason", shortened(reason), "a non-empty str")
        self.reason = reason

    def __repr__(self) -> str:
        return f"Reject({self.reason!r})"

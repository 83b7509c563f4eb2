"""What a handler is given beside its event, and what it may return."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from types import NoneType, UnionType
from typing import Generic, TypeVar, Union, get_args, get_origin

from aiodelay.core import transitions
from aiodelay.core.durations import Duration, format_duration, from_epoch_ms, parse_duration
from aiodelay.core.validation import check_flag
from aiodelay.core.values import Claim
from aiodelay.errors import ConfigurationError, shortened

__all__ = ["Later", "Reject", "RunContext", "is_context"]

S = TypeVar("S")

MILLISECOND = timedelta(milliseconds=1)  # to multiply it takes a quarter of the time of `timedelta(milliseconds=...)`


class RunContext(Generic[S]):
    """One attempt at delivering one message. `Context`, beside `Scheduler`, is this class for users.

    `Context` knows the type of its scheduler, so it cannot stand here: the scheduler imports this module.
    """

    __slots__ = ("_attempts", "_claim", "_lateness_ms", "_record", "scheduler")

    scheduler: S
    """The scheduler that delivers it; schedule from here as from anywhere."""

    def __init__(self, claim: Claim, lateness_ms: int, attempts: int, scheduler: S) -> None:
        self._claim, self._record, self._lateness_ms, self.scheduler = claim, claim.record, lateness_ms, scheduler
        self._attempts = attempts

    def __repr__(self) -> str:
        return f"<Context {self.delivery_id} attempt {self.attempt}>"

    @property
    def id(self) -> str:
        """The message id; of a recurring message, the series'."""
        return transitions.base_id(self._record.envelope.id)

    @property
    def delivery_id(self) -> str:
        """`id/revision/occurrence-due`: the same for every attempt; what to de-duplicate by."""
        return transitions.delivery_id(self._record)

    @property
    def due(self) -> datetime:
        """When it was due; retries do not move it."""
        return from_epoch_ms(self._record.due_ms)

    @property
    def lateness(self) -> timedelta:
        """Start of this attempt minus the due time, never negative."""
        return self._lateness_ms * MILLISECOND

    @property
    def queued_ms(self) -> int | None:
        """Milliseconds it waited in the list that its handler's source took it from; None where it came from none.

        Also None for an attempt that the store gave out, as retries are, and for what does not say when it was pushed.
        """
        return self._claim.queued_ms

    @property
    def missed(self) -> int:
        """How many messages its source's retention dropped since the last one that this process was given."""
        return self._claim.missed

    @property
    def attempt(self) -> int:
        """Which run this is, from 1; only runs that finished count."""
        return self._record.attempt + 1

    @property
    def is_last_attempt(self) -> bool:
        """Whether the retry plan allows no attempt after this one: if it fails, the message is given up.

        `Retry.by_type` may give the error that is raised a plan with more attempts, or with fewer.
        """
        return self.attempt >= self._attempts

    @property
    def headers(self) -> Mapping[str, bytes]:
        """The headers given when it was scheduled."""
        return self._record.envelope.headers

    @property
    def key(self) -> bytes | None:
        """The key given when it was scheduled."""
        return self._record.envelope.key

    @property
    def scheduled_at(self) -> datetime:
        """When it was scheduled, or replaced, on the store's clock."""
        return from_epoch_ms(self._record.revision)


def is_context(hint: object) -> bool:
    """Return whether an annotation asks for the context: `Context`, or `Context | None`."""
    classes = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    (class_, *others) = [each for each in classes if each is not NoneType] or [None]
    return not others and RunContext in getattr(class_, "__bases__", ())


class Later:
    """Returned by a handler: deliver it again after `delay`.

    Args:
        delay: From now on.
        counts: Whether this run counts as an attempt. If it does, and the retry plan allows no attempt after it, the
            message is given up, as after an exception.

    Raises:
        ConfigurationError: The delay is not a duration, or `counts` not a bool.
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
    """Returned by a handler: give the message up, as a dead letter with this reason.

    Raises:
        ConfigurationError: The reason is not text, or empty.
    """

    __slots__ = ("reason",)

    reason: str
    """What the dead letter says."""

    def __init__(self, reason: str) -> None:
        if not isinstance(reason, str) or not reason:
            raise ConfigurationError("Reject.reason", shortened(reason), "a non-empty str")
        self.reason = reason

    def __repr__(self) -> str:
        return f"Reject({self.reason!r})"

"""`Retry`: decides when a failed message runs again, and when it is given up.

A `Retry` is a plan: the delays between attempts, computed once. The decision is a pure function: the random number and
the number of attempts are arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Literal, Self, TypeAlias

from aiodelay.errors import ConfigurationError, shortened

from .durations import Duration, format_duration, parse_duration

__all__ = ["MAX_ATTEMPTS", "GiveUp", "GiveUpReason", "Retry", "RetryAfter", "RetryDecision"]

MAX_ATTEMPTS = 1000
"""Most attempts that a plan may allow."""

GiveUpReason: TypeAlias = Literal["attempts_exhausted", "not_retryable"]
"""Why a message is given up: all attempts are used, or the plan for this error allows only one attempt."""


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """Run the message again.

    Attributes:
        delay_ms: Milliseconds from the failure to the next attempt.
    """

    delay_ms: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Make the message a dead letter.

    Attributes:
        reason: The reason that the dead letter keeps.
    """

    reason: GiveUpReason


RetryDecision: TypeAlias = RetryAfter | GiveUp


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Retry:
    """The plan for a failing handler: the number of attempts, and the waits between them.

    The wait before attempt n + 1 is `first * factor ** (n - 1)`, at most `cap`. Then the wait changes at random by up
    to `± jitter` of itself, so that messages which failed together do not return together. Since jitter comes after the
    cap, a wait lies between 0 and `cap * (1 + jitter)`.

    `by_type` gives plans for some error types. If several of these types fit an error, the most derived type decides.
    Errors of all other types follow the outer plan. Attempts are counted per message, not per error type:

        Retry(attempts=5, by_type={ValueError: Retry.never(), ConnectionError: Retry(attempts=50, first="1s")})

    For an `ExceptionGroup`, the type of the group decides, not the types of the errors in it.

    Attributes:
        delays_ms: The waits between attempts, in milliseconds, before jitter. There is one fewer than `attempts`.
        jitter: The random part of each delay, 0 to 1.
        by_type: Plans for errors of these types.
    """

    delays_ms: tuple[int, ...]
    jitter: float
    by_type: Mapping[type[BaseException], Retry] = field(hash=False)

    def __init__(
        self,
        *,
        attempts: int = 10,
        first: Duration = "5s",
        factor: float = 2.0,
        cap: Duration = "1h",
        jitter: float = 0.1,
        by_type: Mapping[type[BaseException], Retry] | None = None,
    ) -> None:
        """Plan delays that grow by a factor.

        Args:
            attempts: The number of all attempts, the first included: 1 to 1000.
            first: The wait before the second attempt.
            factor: Each wait is the previous wait times this factor; 1 or more.
            cap: Longest wait before jitter; not below `first`.
            jitter: The random part of each wait, 0 to 1.
            by_type: Plans for errors of these types and their subclasses.

        Raises:
            ConfigurationError: A value is out of range. The error names it as `retry.<name>`.
        """
        first_ms = parse_duration(first, field="retry.first", error=ConfigurationError)
        cap_ms = parse_duration(cap, field="retry.cap", error=ConfigurationError)
        if not _is_number(attempts, int) or not 1 <= attempts <= MAX_ATTEMPTS:
            allowed = f"a whole number from 1 to {MAX_ATTEMPTS}; it counts all runs, the first included"
            raise ConfigurationError("retry.attempts", shortened(attempts), allowed)
        if not _is_number(factor, int | float) or not 1 <= factor <= sys.float_info.max:
            raise ConfigurationError("retry.factor", shortened(factor), "a finite number >= 1")
        if cap_ms < first_ms:
            allowed = f"at least retry.first, which is {format_duration(first_ms)}"
            raise ConfigurationError("retry.cap", shortened(cap), allowed)
        self._fill(_growing(attempts - 1, first_ms, factor, cap_ms), jitter, by_type)

    @classmethod
    def intervals(
        cls,
        intervals: Sequence[Duration],
        *,
        jitter: float = 0.1,
        by_type: Mapping[type[BaseException], Retry] | None = None,
    ) -> Self:
        """Return a plan with these waits, in this order. The plan allows one attempt more than there are waits.

        Args:
            intervals: 1 to 999 waits: before the second attempt, before the third attempt, and so on.
            jitter: The random part of each wait, 0 to 1.
            by_type: Plans for errors of these types and their subclasses.

        Raises:
            ConfigurationError: There are no waits or more than 999, a wait is not a duration, or `jitter` or `by_type`
                is wrong.
        """
        if not _is_list(intervals) or not 0 < len(intervals) < MAX_ATTEMPTS:
            allowed = f'1 to {MAX_ATTEMPTS - 1} durations, e.g. ["5s", "1m"]; Retry.never() for a single attempt'
            raise ConfigurationError("retry.intervals", shortened(intervals), allowed)
        delays_ms = tuple(
            parse_duration(interval, field=f"retry.intervals[{i}]", error=ConfigurationError)
            for i, interval in enumerate(intervals)
        )
        self = cls.__new__(cls)
        self._fill(delays_ms, jitter, by_type)
        return self

    @classmethod
    def never(cls) -> Self:
        """Return a plan with a single attempt: its failure is final."""
        return cls(attempts=1)

    def _fill(
        self, delays_ms: tuple[int, ...], jitter: float, by_type: Mapping[type[BaseException], Retry] | None
    ) -> None:
        """Check the settings that all plans share, and set the fields."""
        if not _is_number(jitter, int | float) or not 0 <= jitter <= 1:
            raise ConfigurationError("retry.jitter", shortened(jitter), "a number from 0 to 1")
        object.__setattr__(self, "delays_ms", delays_ms)
        object.__setattr__(self, "jitter", float(jitter) if delays_ms else 0.0)
        object.__setattr__(self, "by_type", _checked_types({} if by_type is None else by_type))

    @property
    def attempts(self) -> int:
        """The number of all attempts that the plan allows, the first included."""
        return len(self.delays_ms) + 1

    def decide(self, attempt: int, error: BaseException, random: float) -> RetryDecision:
        """Return what follows a failed attempt.

        Args:
            attempt: Attempts so far, the failed one included; 1 or more.
            error: The exception of the failed attempt.
            random: A number from 0 to below 1, new for each decision.

        Returns:
            The delay until the next attempt, or the reason to give up.
        """
        plan = next((self.by_type[kind] for kind in type(error).__mro__ if kind in self.by_type), self)
        if attempt < plan.attempts:
            delay_ms = plan.delays_ms[attempt - 1]
            return RetryAfter(int(delay_ms * (1 + plan.jitter * (2 * random - 1))))
        return GiveUp("attempts_exhausted" if plan.delays_ms else "not_retryable")

    def __repr__(self) -> str:
        """Return the call that builds an equal plan."""
        types = ", ".join(f"{kind.__name__}: {plan!r}" for kind, plan in self.by_type.items())
        by_type = f", by_type={{{types}}}" if types else ""
        if not self.delays_ms:
            return f"Retry(attempts=1{by_type})" if by_type else "Retry.never()"
        waits = ", ".join(f"'{format_duration(delay)}'" for delay in self.delays_ms)
        return f"Retry.intervals([{waits}], jitter={self.jitter!r}{by_type})"


def _growing(count: int, first_ms: int, factor: float, cap_ms: int) -> tuple[int, ...]:
    """Return the delays. Each delay is capped before the next delay is computed, so that no number overflows."""
    delay, delays = float(first_ms), []
    for _ in range(count):
        delays.append(round(delay))
        delay = min(delay * factor, float(cap_ms))
    return tuple(delays)


def _is_number(value: object, kind: type | UnionType) -> bool:
    """Return whether a value is a number of this kind. A bool does not count, although Python calls it an int."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_list(value: object) -> bool:
    """Return whether a value is a sequence of items. Text does not count."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_error_type(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _checked_types(by_type: Mapping[type[BaseException], Retry]) -> dict[type[BaseException], Retry]:
    """Check every entry of the mapping, and return a copy."""
    if not isinstance(by_type, Mapping):
        raise ConfigurationError("retry.by_type", shortened(by_type), "a mapping from exception types to Retry")
    for kind, plan in by_type.items():
        if not _is_error_type(kind):
            raise ConfigurationError("a key of retry.by_type", shortened(kind), "an exception type")
        name = f"retry.by_type[{kind.__name__}]"
        if not isinstance(plan, Retry):
            raise ConfigurationError(name, shortened(plan), "a Retry, or Retry.never()")
        if plan.by_type:
            allowed = "a Retry without by_type; put every type into the by_type of the outer Retry"
            raise ConfigurationError(name, "a Retry with a by_type of its own", allowed)
    return dict(by_type)

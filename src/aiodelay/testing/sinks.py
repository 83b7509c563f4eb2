"""`RecordingSink`: takes what it is sent and keeps it, for tests to look at; refuses or breaks when told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

from msgspec import Struct

from aiodelay.core.values import Delivery, Demand, SendOutcome, Sent
from aiodelay.errors import SinkUnavailableError

__all__ = ["RecordingSink"]


class _Answer(Struct):
    """What the sink does instead of taking a message; `left` None = until healed."""

    what: SendOutcome | Exception
    left: int | None
    concerns: Callable[[Delivery], bool]


_LIMITS = Demand(100)


class RecordingSink:
    """A sink for tests: `Scheduler(store, sinks=[RecordingSink("kafka")])`.

    Args:
        name: The part of `to=` before the colon.
        limits: Most messages and bytes in flight to it.
        check: Refuses addresses, as the sink does whose place it takes; None = accepts all.

    Attributes:
        deliveries: What it was sent, attempt by attempt, the refused ones included.
        batches: How many messages each send brought.
    """

    name: str
    limits: Demand

    def __init__(self, name: str, *, limits: Demand = _LIMITS, check: Callable[[str], None] | None = None) -> None:
        self.name, self.limits, self._check = name, limits, check
        self.deliveries: list[Delivery] = []
        self.batches: list[int] = []
        self._answers: list[_Answer] = []

    def inject(
        self,
        what: SendOutcome | Exception,
        *,
        times: int | None = 1,
        concerns: Callable[[Delivery], bool] = lambda delivery: True,
    ) -> None:
        """Have messages refused, or sends broken, from now on.

        Args:
            what: `Failed("...")` is answered for a message; an exception is raised for its whole batch, and
                `SinkUnavailableError` means that nothing was taken.
            times: How often; None = until `heal()`.
            concerns: Which messages; all, unless told.
        """
        self._answers.append(_Answer(what, times, concerns))

    def heal(self) -> None:
        """Take everything again."""
        self._answers.clear()

    def check(self, address: str) -> None:
        """Refuse what the sink would refuse whose place this takes."""
        if self._check is not None:
            self._check(address)

    async def __aenter__(self) -> Self:
        """Do nothing."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Do nothing."""

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        """Keep the messages; answer as told."""
        answers = [self._answer(delivery) for delivery in deliveries]
        raised = [answer for answer in answers if isinstance(answer, Exception)]
        away = [error for error in raised if isinstance(error, SinkUnavailableError)]
        if away:
            raise away[0]
        self.deliveries.extend(deliveries)
        self.batches.append(len(deliveries))
        if raised:
            raise raised[0]
        return [answer for answer in answers if not isinstance(answer, Exception)]

    def _answer(self, delivery: Delivery) -> SendOutcome | Exception:
        for answer in self._answers:
            if answer.left != 0 and answer.concerns(delivery):
                answer.left = None if answer.left is None else answer.left - 1
                return answer.what
        return Sent()

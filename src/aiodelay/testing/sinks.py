"""`RecordingSink`: a sink that keeps the messages it receives, so that a test can check them.

A test can also make the sink refuse messages or raise errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

from msgspec import Struct

from aiodelay.core.values import Delivery, Demand, SendOutcome, Sent
from aiodelay.errors import SinkUnavailableError

__all__ = ["RecordingSink"]


class _Answer(Struct):
    """An injected answer: the outcome or error that a message gets. `left` = uses left; None = until `heal()`."""

    what: SendOutcome | Exception
    left: int | None
    concerns: Callable[[Delivery], bool]


_LIMITS = Demand(100)


class RecordingSink:
    """A sink for tests: `Scheduler(store, sinks=[RecordingSink("kafka")])`.

    Args:
        name: The part of `to=` before the colon.
        limits: The most messages and bytes in flight to the sink.
        check: The address check of the sink that the recording sink replaces; None = accept every address.

    Attributes:
        deliveries: The attempts that the sink received, including refused attempts. A send that raised
            `SinkUnavailableError` is not included.
        batches: The number of messages of each send.
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
        """Refuse messages, or make sends fail, from now on.

        Args:
            what: The answer for a message, such as `Failed("...")`, or an exception. `send` raises the exception for
                the whole batch of the message. `SinkUnavailableError` means that the sink has taken no message.
            times: The number of messages that get this answer; None = until `heal()`.
            concerns: Chooses the messages; all by default.
        """
        self._answers.append(_Answer(what, times, concerns))

    def heal(self) -> None:
        """Accept every message again."""
        self._answers.clear()

    def check(self, address: str) -> None:
        """Refuse the addresses that the replaced sink would refuse."""
        if self._check is not None:
            self._check(address)

    async def __aenter__(self) -> Self:
        """Do nothing."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Do nothing."""

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        """Keep the messages, and answer as `inject` says."""
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

"""`HeldMessage`, the base class of `Received`: a message that a program takes and settles without a handler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

from aiodelay.errors import InputError, kind_of

from .context import Later, Reject, RunContext

__all__ = ["GIVEN_BACK", "HeldMessage"]

T = TypeVar("T")
C = TypeVar("C", bound=RunContext[Any])
GIVEN_BACK: Literal["given back"] = "given back"
"""The result of a message that was given back without an attempt."""


class HeldMessage(Generic[T, C]):
    """A message that a program took without a handler. Until it is settled, the worker renews its lease.

    Users see the subclass `Received`. Used as a context manager, the message settles itself:

    - The block ends normally: the message is done.
    - The block raises: the retry policy decides about another attempt.
    - The block's task is cancelled: the message is given back.

    In the last two cases, the exception also leaves the block.

    Attributes:
        event: The event.
        context: The context of this attempt, as a handler receives it.
        result: The result that settled the message; None until then.
    """

    __slots__ = ("_is_outdated", "_is_over", "_waiter", "context", "event", "result")

    event: T
    context: C
    result: object

    def __init__(self, event: T, context: C, is_outdated: Callable[[], bool] = lambda: False) -> None:
        self.event, self.context = event, context
        self._is_outdated = is_outdated
        self._is_over = False
        self.result = None
        self._waiter: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<Received {self.context.delivery_id} {'settled' if self.is_settled else 'held'}>"

    @property
    def is_settled(self) -> bool:
        """Whether the message was settled or given back, its lease was lost, or the scheduler has ended."""
        return self._is_over or (self._waiter is not None and self._waiter.done())

    @property
    def is_outdated(self) -> bool:
        """Whether this process knows that the message was replaced or cancelled after the claim.

        If so, do not begin to process the message.
        """
        return self._is_outdated()

    def settle(self, result: Later | Reject | Exception | None = None) -> bool:
        """Settle the message. The result means the same as the result of a handler.

        None ends the message. An exception counts as a failed attempt, and the retry policy decides.

        Returns:
            False if the message is no longer held. Then nothing is written, and a message that lost its lease may be
            delivered again.

        Raises:
            InputError: The result has another type. The message is still held.
        """
        if not (result is None or isinstance(result, Later | Reject | Exception)):
            raise InputError("result", kind_of(result), "None, Later, Reject or an exception")
        return self._end(result)

    def give_back(self) -> bool:
        """Give the message back to its store or source, without an attempt. Return False if it was no longer held."""
        return self._end(GIVEN_BACK)

    def _end(self, result: object) -> bool:
        if self.is_settled:
            return False
        self._is_over, self.result = True, result
        if self._waiter is not None:
            self._waiter.set_result(None)
        return True

    def __enter__(self) -> T:
        return self.event

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is None or isinstance(exc, Exception):
            self.settle(exc)
        else:
            self.give_back()

    def over(self) -> asyncio.Future[None]:
        """Return a future that is done when the message is no longer held, and cancelled if its lease was lost."""
        if self._waiter is None:
            self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

"""A message that a program takes without a handler and holds until it is settled: `Received`, for users."""

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
"""Stands for a result: nothing was tried."""


class HeldMessage(Generic[T, C]):
    """One message, held under a lease that is renewed until it is settled. `Received` is this class for users.

    As a context manager it settles itself: done when the block ends, tried again by the retry policy when the block
    raises, given back when the block's task is cancelled. The exception goes on either way.

    Attributes:
        event: The event.
        context: What a handler would be given beside it.
        result: The result that it was settled with; None until then.
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
        """Whether it is held no more: settled, given back, or lost with its lease or the end of the scheduler."""
        return self._is_over or (self._waiter is not None and self._waiter.done())

    @property
    def is_outdated(self) -> bool:
        """Whether it was replaced or cancelled since it was claimed, as far as this process knows: do not begin it."""
        return self._is_outdated()

    def settle(self, result: Later | Reject | Exception | None = None) -> bool:
        """End it, as the result of a handler does: None is done, an exception means another attempt.

        Returns:
            False if it was not held any more: nothing is written, and what lost its lease may be delivered again.

        Raises:
            InputError: The result is something else; it is still held.
        """
        if not (result is None or isinstance(result, Later | Reject | Exception)):
            raise InputError("result", kind_of(result), "None, Later, Reject or an exception")
        return self._end(result)

    def give_back(self) -> bool:
        """Return it to where it came from, unhandled; costs no attempt. False as in `settle`."""
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
        """Return a future that is done once the message is held no more, and cancelled if the message was lost."""
        if self._waiter is None:
            self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

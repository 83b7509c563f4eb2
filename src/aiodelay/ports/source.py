"""`Source`: gives a sink's messages to handlers, in this process or in others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, Self

from aiodelay.core.values import PutBack, Stored

from .feed import Feed

__all__ = ["Source"]


class Source(Protocol):
    """Gives a sink's messages to handlers, in this process or in others, at least once."""

    @property
    def name(self) -> str:
        """The part of `source=` before the colon."""
        ...

    def check(self, address: str) -> None:
        """Refuse an address that can never work.

        Raises:
            TargetError: Says what is allowed.
        """
        ...

    async def __aenter__(self) -> Self:
        """Connect; an error leaves nothing open. After one, here or elsewhere, the source may be entered again.

        Raises:
            StoreUnavailableError, SinkUnavailableError: It cannot be reached; another attempt may succeed.
        """
        ...

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect; idempotent."""
        ...

    def feed(
        self,
        address: str,
        consumer: str,
        put_back: Callable[[Sequence[PutBack]], Awaitable[Sequence[Stored]]],
        now_ms: Callable[[], int],
    ) -> AbstractAsyncContextManager[Feed]:
        """Open the taking of messages from one address.

        A claim asks for one lane, whose handler they are for. `Done` ends a message; `Again` at a later time, and
        `Dead`, put it back into a store first; what is given back unrun returns to where it came from.

        Args:
            address: Where messages are taken from.
            consumer: Names this process among those that take from there.
            put_back: Stores retries and dead letters; repeats are safe.
            now_ms: The store's time, by which tokens tell when leases end.
        """
        ...

"""`Source`: the interface of a source, which gives messages from elsewhere, such as a Redis list, to handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, Self

from aiodelay.core.values import PutBack, Stored

from .feed import Feed

__all__ = ["Source"]


class Source(Protocol):
    """Gives messages from elsewhere, such as a Redis list, to handlers of this process, at least once.

    A source whose dead letters are redriven through the sink of the same name may have an attribute `place`: a `str`
    that names the server and the namespace. The sink has the attribute too. If the two differ, the scheduler warns.
    """

    @property
    def name(self) -> str:
        """The part of `source=` before the colon."""
        ...

    def check(self, address: str) -> None:
        """Refuse an address that can never work.

        Raises:
            TargetError: The address is wrong. The error names the allowed form.
        """
        ...

    async def __aenter__(self) -> Self:
        """Connect. If this fails, nothing stays open. The source may be entered again after any error.

        Raises:
            StoreUnavailableError, SinkUnavailableError: The source does not answer. Another attempt may succeed.
        """
        ...

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect. Repeated calls do nothing."""
        ...

    def feed(
        self,
        address: str,
        consumer: str,
        put_back: Callable[[Sequence[PutBack]], Awaitable[Sequence[Stored]]],
        now_ms: Callable[[], int],
    ) -> AbstractAsyncContextManager[Feed]:
        """Return a context manager that opens a feed of messages from one address.

        A claim of this feed names one lane: the lane of the handler that gets the messages.

        | settlement | effect |
        | --- | --- |
        | `Done` | The message ends. |
        | `Again` at a later time, `Dead` | The feed puts the message into a store, and then ends it in the source. |
        | `Again` without a run (`transitions.is_release`) | The message returns to its address. |

        Args:
            address: The address from which to take messages.
            consumer: The name of this process among the consumers of this address.
            put_back: A function that stores retries and dead letters. Repeats are safe.
            now_ms: The store's time, by which leases end.
        """
        ...

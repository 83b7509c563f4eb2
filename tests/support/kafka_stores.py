"""Open a store whose time limit is shorter than a slow machine needs to open it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from aiodelay.errors import StoreUnavailableError
from aiodelay.kafka import KafkaStore

from .waiting import until

__all__ = ["opened_patiently"]


@asynccontextmanager
async def opened_patiently(url: str) -> AsyncIterator[KafkaStore]:
    """Open the store of a URL. If the broker does not answer within the limit of the URL, try again."""
    async with AsyncExitStack() as stack:

        async def opened() -> KafkaStore | None:
            try:
                return await stack.enter_async_context(KafkaStore(url))
            except StoreUnavailableError:
                return None

        yield await until(opened, "the store is open")

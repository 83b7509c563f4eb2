"""Open a store whose time limit is shorter than a slow machine needs to open it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from aiodelay.errors import StoreUnavailableError
from aiodelay.kafka import KafkaStore

from .waiting import until

__all__ = ["opened_patiently"]


@asynccontextmanager
async def opened_patiently(url: str) -> AsyncIterator[KafkaStore]:
    """Open the store of a URL. If the broker does not answer within the limit of the URL, try again."""
    async with AsyncExitStack() as stack:
        stores: list[KafkaStore] = []

        async def is_open() -> bool:
            with suppress(StoreUnavailableError):
                stores.append(await stack.enter_async_context(KafkaStore(url)))
            return bool(stores)

        await until(is_open, "the store is open")
        yield stores[0]

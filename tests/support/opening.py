"""Open a store whose time limit is shorter than a slow machine needs to open it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import TypeVar

from aiodelay.errors import StoreUnavailableError

from .waiting import until

__all__ = ["opened_patiently"]

S = TypeVar("S")


@asynccontextmanager
async def opened_patiently(make: Callable[[], AbstractAsyncContextManager[S]]) -> AsyncIterator[S]:
    """Make a store and open it. If its server does not answer within its time limit, try again with another one."""
    async with AsyncExitStack() as stack:
        stores: list[S] = []

        async def is_open() -> bool:
            with suppress(StoreUnavailableError):
                stores.append(await stack.enter_async_context(make()))
            return bool(stores)

        await until(is_open, "the store is open")
        yield stores[0]

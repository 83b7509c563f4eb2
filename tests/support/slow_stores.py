"""Open and fill a store whose time limit is shorter than a slow machine needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from aiodelay.backends.redis.store import pulse as pulse_of_store
from aiodelay.core import pulse
from aiodelay.core.values import Put, Refused, Stored, Unknown
from aiodelay.errors import StoreUnavailableError
from aiodelay.ports import Store
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.conformance.stage import WakeUps

from .waiting import until

__all__ = [
    "PATIENT",
    "POLL_MS",
    "let_pulses_stand_still",
    "opened_patiently",
    "stored_patiently",
    "wait_long_for_wake_ups",
]

PATIENT = "timeout_ms=60000&connect_timeout_ms=60000"
"""The time limits of a Redis store in which no slow machine may fail a call, for its URL."""
SOON_S, POLL_MS = 30.0, 120_000
"""How late a wake-up may come, and the safety poll, which is still later."""

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


async def stored_patiently(store: Store, puts: Sequence[Put]) -> None:
    """Store messages. While the store cannot answer, repeat the commands. Any other refusal is an error."""
    async with asyncio.timeout(60):
        while left := [each for each in await store.apply(puts) if not isinstance(each, Stored)]:
            for each in left:
                assert isinstance(each, Unknown) or (isinstance(each, Refused) and each.reason == "unavailable"), each


def wait_long_for_wake_ups(monkeypatch: pytest.MonkeyPatch, *stores: Any) -> None:  # noqa: ANN401 - classes of stores
    """Let the suite's rules about wake-ups hold for a process that stands still. A lost wake-up still fails them."""
    monkeypatch.setattr(WakeUps, "soon_s", SOON_S)
    for store in stores:
        monkeypatch.setattr(store, "traits", replace(store.traits, safety_poll_ms=POLL_MS))


def let_pulses_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a process or a Redis server stands still, the last step is fresh and each answer is in time."""
    monkeypatch.setattr(pulse_of_store, "SystemClock", VirtualClock)
    monkeypatch.setattr(pulse, "ANSWER_MS", 60_000)

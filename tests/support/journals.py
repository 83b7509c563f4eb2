"""Write entries into real journals, for tests of code that reads journals."""

from __future__ import annotations

from contextlib import AsyncExitStack

from aiodelay.backends.registry import open_store
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Envelope, Put
from aiodelay.ports.clock import Clock

__all__ = ["note"]

LANE, ADDRESS = "work", "a"


async def note(url: str, first: int, n: int, *, namespace: str = "default", clock: Clock | None = None) -> None:
    """Store `n` messages due in an hour, from `m<first>` on. Each put adds an entry `stored` to the journal."""
    async with open_store(url, namespace=namespace, clock=clock) as store, AsyncExitStack() as owning:
        if store.traits.lookup == "owner":  # only an owner writes the events to the history topic
            await owning.enter_async_context(store.work("notes", ()))
        for at in range(first, first + n, 500):
            chunk = range(at, min(at + 500, first + n))
            puts = [Put(new_op(), Envelope(f"m{i}", LANE, ADDRESS), After(3_600_000)) for i in chunk]
            await store.apply(puts)

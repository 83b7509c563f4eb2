"""Stores the limits that code declares for handlers, when a scheduler opens or gets another handler."""

from __future__ import annotations

from collections.abc import Sequence

from aiodelay.handlers.spec import HandlerSpec
from aiodelay.ports import Limits, Store

__all__ = ["declare_limits"]


async def declare_limits(store: Store, specs: Sequence[HandlerSpec]) -> None:
    """Store the limits of handlers. If the code no longer declares a limit, end it.

    Raises:
        StoreUnavailableError: The store did not answer. Repeating is safe.
    """
    if specs and isinstance(store, Limits):
        declared = await store.limits(is_declared=True)
        for spec in specs:
            for lane in (spec.name, *spec.aliases):
                if spec.limits or lane in declared:
                    await store.set_limits(lane, spec.limits, is_declared=True)

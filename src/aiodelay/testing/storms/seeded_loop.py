"""`SeededLoop`: a virtual loop on which a seed chooses the order of the tasks that are ready."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial
from typing import TypeVarTuple, Unpack

from aiodelay.testing.loop import VirtualLoop

__all__ = ["SeededLoop"]

_Ts = TypeVarTuple("_Ts")


class SeededLoop(VirtualLoop):
    """A virtual loop on which any ready task may run next.

    asyncio promises an order for callbacks, but not for tasks. So the loop changes only the order of tasks. A ready
    task may wait while others run many steps, but not for ever.

    Args:
        seed: Chooses the order; None = the order of asyncio, first come, first served.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._chance = None if seed is None else random.Random(seed)
        self._ready_steps: list[Callable[[], object]] = []
        super().__init__()

    def call_soon(
        self, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Call `callback` soon; if it is a step of a task, perhaps after steps of other tasks."""
        if self._chance is None or not isinstance(getattr(callback, "__self__", None), asyncio.Task):
            return super().call_soon(callback, *args, context=context)
        self._ready_steps.append(partial((context or copy_context()).run, callback, *args))
        return super().call_soon(self._run_a_step, self._chance)

    def _run_a_step(self, chance: random.Random) -> None:
        self._ready_steps.pop(chance.randrange(len(self._ready_steps)))()

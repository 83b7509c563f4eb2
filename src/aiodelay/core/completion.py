"""Cleanup that runs to its end although its caller is cancelled; for closing, where a half-closed client would leak."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

__all__ = ["run_to_completion"]


async def run_to_completion(
    cleanup: Coroutine[object, object, None], *, name: str, on_cancel: Callable[[], None] = lambda: None
) -> None:
    """Run a bounded cleanup to its end in a task of its own, and raise the caller's cancellation only then.

    anyio's shield does not keep off `Task.cancel()`; a task of its own does.

    Args:
        cleanup: Ends by itself, within a time that it bounds.
        name: The name of its task.
        on_cancel: Called each time that the caller is cancelled, for example to make the cleanup end sooner.

    Raises:
        asyncio.CancelledError: The caller was cancelled meanwhile; the cleanup has ended all the same.
    """
    cancelled: asyncio.CancelledError | None = None
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(cleanup, name=name)
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
                on_cancel()
    if cancelled is not None:
        raise cancelled

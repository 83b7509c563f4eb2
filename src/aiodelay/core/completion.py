"""`run_to_completion`: a cleanup that a cancellation of its caller does not interrupt, such as closing a client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

__all__ = ["run_to_completion"]


async def run_to_completion(
    cleanup: Coroutine[object, object, None], *, name: str, on_cancel: Callable[[], None] = lambda: None
) -> None:
    """Run a bounded cleanup to its end in a task of its own. Raise the caller's cancellation only after that.

    anyio's shield does not stop `Task.cancel()`. A task of its own does: the caller's cancellation does not reach it.

    Args:
        cleanup: A coroutine that ends by itself within a time limit.
        name: The name of its task.
        on_cancel: Called each time that the caller is cancelled, for example to make the cleanup end sooner.

    Raises:
        asyncio.CancelledError: The caller was cancelled meanwhile. The cleanup has ended nevertheless.
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

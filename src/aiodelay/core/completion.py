"""`run_to_completion`: a cleanup that a cancellation of its caller does not interrupt, such as closing a client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

__all__ = ["run_to_completion"]


async def run_to_completion(
    cleanup: Coroutine[object, object, None], *, name: str, on_cancel: Callable[[], None] = lambda: None
) -> None:
    """Run a cleanup to its end in a separate task. If the caller was cancelled, raise the cancellation after that.

    anyio's shield does not protect a cleanup from `Task.cancel()`. A separate task does: the caller's cancellation does
    not reach that task.

    Args:
        cleanup: A coroutine that ends by itself within a time limit.
        name: The name of the cleanup's task.
        on_cancel: Called each time that the caller is cancelled, for example to make the cleanup end sooner.

    Raises:
        asyncio.CancelledError: The caller was cancelled during the cleanup. The cleanup has still run to its end.
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

"""Tasks that run user code. User code may go on although its task is cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

__all__ = ["Runners"]

log: logging.Logger = logging.getLogger("aiodelay")


class Runners:
    """The tasks of one subscription.

    The tasks are not in a task group: a group would wait for ever for a task that does not end. If a task fails
    unexpectedly, the scheduler's group ends with the task's error, as if the group contained the task.

    Args:
        group: The task group of the scheduler.
    """

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self.tasks: set[asyncio.Task[None]] = set()

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine in a task."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):  # these already end the loop
            failing = _raise(error)
            try:
                self._group.create_task(failing)
            except RuntimeError:  # the group is already ending
                failing.close()
                log.error("%s failed", task.get_name(), exc_info=error)  # noqa: TRY400 - it logs `error`, not RuntimeError


async def _raise(error: BaseException) -> None:
    raise error

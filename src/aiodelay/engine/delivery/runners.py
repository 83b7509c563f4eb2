"""Tasks that run code which is not ours, and which may go on although they are cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

__all__ = ["Runners"]

log: logging.Logger = logging.getLogger("aiodelay")


class Runners:
    """The tasks of one subscription.

    No task group owns them, since it would wait for ever for one that does not end. What ends one of them unexpectedly
    ends the group, as if it were the group's.

    Args:
        group: That of the scheduler.
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
        if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):  # these end the loop themselves
            failing = _raise(error)
            try:
                self._group.create_task(failing)
            except RuntimeError:  # the group is ending already
                failing.close()
                log.error("%s failed", task.get_name(), exc_info=error)  # noqa: TRY400 - not the one handled here


async def _raise(error: BaseException) -> None:
    raise error

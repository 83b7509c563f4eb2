"""`StoreTasks`: the background tasks of an open store. All parts of the store start their tasks here."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiodelay.errors import ClosedError

__all__ = ["StoreTasks"]

T = TypeVar("T")


class StoreTasks:
    """The tasks of one store. The store may be opened again after it was closed.

    Args:
        name: The name of the store for error messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def is_open(self) -> bool:
        """Whether the store is open."""
        return self._tasks is not None

    async def open(self) -> None:
        """Open the store's task group."""
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()

    def take(self) -> asyncio.TaskGroup | None:
        """Refuse new tasks. Return the task group, which the caller must end, or None if the store was not open."""
        tasks, self._tasks = self._tasks, None
        return tasks

    def check_open(self) -> None:
        """Refuse use while the store is closed.

        Raises:
            ClosedError: The store is not open.
        """
        if self._tasks is None:
            raise ClosedError(self._name, "closed")

    def start(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task of the open store."""
        assert self._tasks is not None
        return self._tasks.create_task(coroutine, name=name)

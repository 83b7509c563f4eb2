"""`PutBacks`: stores the messages that sources put back after an attempt, for a retry or as dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiodelay.backends.kafka.store.assignment import Lookup
from aiodelay.core.values import PutBack, Stored
from aiodelay.errors import StoreUnavailableError

from .user_writes import UserWrites

__all__ = ["PutBacks"]


class PutBacks:
    """Stores messages that are put back into one store.

    Args:
        name: The name of the store for error messages.
        lookup: Finds the partition of an id.
        writes: Asks other owners to store messages.
    """

    def __init__(self, name: str, lookup: Lookup, writes: UserWrites) -> None:
        self._name, self._lookup, self._writes = name, lookup, writes

    async def put_back(self, messages: Sequence[PutBack]) -> Sequence[Stored]:
        """Store messages that are put back: in own partitions as their owner, elsewhere by requests to the owners.

        Raises:
            StoreUnavailableError: Not all messages are known to be stored.
        """
        answers = [Stored("stored", each.record.revision, each.record.due_ms) for each in messages]
        elsewhere: list[PutBack] = []
        owned: dict[str, list[int]] = {}
        for i, message in enumerate(messages):
            if self._lookup.owner_of(message.record.id) is None:
                elsewhere.append(message)
            else:
                owned.setdefault(message.record.id, []).append(i)

        async def put_back(indices: Sequence[int]) -> None:
            for i in indices:
                answers[i] = await self._as_owner(messages[i])

        try:
            async with asyncio.TaskGroup() as tasks:
                if elsewhere:
                    tasks.create_task(self._writes.put_back(elsewhere))
                for indices in owned.values():
                    tasks.create_task(put_back(indices))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return answers

    async def _as_owner(self, message: PutBack) -> Stored:
        if (owner := self._lookup.owner_of(message.record.id)) is None:
            raise StoreUnavailableError(self._name, "another process owns the partition now")
        return await owner.commands.put_back(message)

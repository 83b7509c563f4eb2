"""`Commands`: carries commands out if this process owns every partition, and otherwise leaves them to the owners."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from aiodelay.backends.kafka.store.assignment import Assignment, Lookup
from aiodelay.backends.kafka.topics.topic import RECORD_BYTES
from aiodelay.core.values import Cancel, Command, Outcome, Put, Refused
from aiodelay.errors import UnsupportedByStoreError

from .remote_cancels import RemoteCancels
from .user_writes import UserWrites

__all__ = ["Commands"]


class Commands:
    """Carries out the commands of one store, or leaves them to the owners.

    Args:
        assignment: The partitions that this process owns.
        lookup: Finds the partition of an id.
        writes: Writes commands as requests to the owners.
        cancels: Asks the owners to cancel, and returns their outcomes.
    """

    def __init__(self, assignment: Assignment, lookup: Lookup, writes: UserWrites, cancels: RemoteCancels) -> None:
        self._assignment, self._lookup, self._writes, self._cancels = assignment, lookup, writes, cancels

    async def apply(self, commands: Sequence[Command]) -> Sequence[Outcome]:
        """Carry out commands. Commands for the same message are carried out in their order."""
        topic = next(iter(self._assignment.counts))
        most = self._assignment.factory.most_bytes(topic)
        large = set() if most is None else {i for i, each in enumerate(commands) if self._is_larger(each, most)}
        if not large:
            return await self._carried_out(commands)
        refused = Refused("too_large", f"a record of at most {most} bytes (max.message.bytes of topic {topic})")
        outcomes = iter(await self._carried_out([each for i, each in enumerate(commands) if i not in large]))
        return [refused if i in large else next(outcomes) for i in range(len(commands))]

    def _is_larger(self, command: Command, most_bytes: int) -> bool:
        """Return whether the topic never takes the record of a command."""
        if not isinstance(command, Put) or command.envelope.size + RECORD_BYTES <= most_bytes:
            return False
        return self._writes.batch_size(command) > most_bytes

    async def _carried_out(self, commands: Sequence[Command]) -> Sequence[Outcome]:
        if self._assignment.is_whole:
            return await self._as_owner(commands)
        return await self._leave_to_owners(commands)

    async def _leave_to_owners(self, commands: Sequence[Command]) -> Sequence[Outcome]:
        if commands and all(_has_verdict(each) for each in commands):
            return await self._cancels.ask(cast("Sequence[Cancel]", commands))
        try:
            return await self._writes.write(commands)
        except UnsupportedByStoreError as error:
            if not self._assignment.groups:
                raise
            # Until just now this process owned all partitions, so the caller could choose such a command.
            return [Refused("unavailable", str(error)) for _ in commands]

    async def _as_owner(self, commands: Sequence[Command]) -> Sequence[Outcome]:
        by_id: dict[str, list[int]] = {}
        full = self._assignment.fullness()
        for i, command in enumerate(commands):
            by_id.setdefault(command.id, []).append(i)
        outcomes: list[Outcome | None] = [None] * len(commands)

        async def carry_out(indices: Sequence[int]) -> None:
            for i in indices:
                outcomes[i] = await self._commanded(commands[i], full)

        async with asyncio.TaskGroup() as tasks:
            for indices in by_id.values():
                tasks.create_task(carry_out(indices))
        return [outcome for outcome in outcomes if outcome is not None]

    async def _commanded(self, command: Command, full: str) -> Outcome:
        """Carry out a command as the owner: a put in the first topic, another command where the message is."""
        places = self._lookup.places(command.id)
        if isinstance(command, Put):
            del places[1:]
        else:
            for each in self._lookup.partitions_of(command.id):
                await each.until_ready()
        try:
            partition = self._lookup.where(places, lambda index: index.knows(command.id, command.op))
        except UnsupportedByStoreError as error:
            return Refused("unavailable", str(error))  # this process has lost a partition since `apply` began
        if full and isinstance(command, Put) and not partition.index.knows(command.id, command.op):
            return Refused("full", full)
        return await partition.commands.command(command)


def _has_verdict(command: Command) -> bool:
    """Say whether a process that does not own the partition can learn the final outcome of a command."""
    return isinstance(command, Cancel) and command.only is not None and command.only[1] is not None

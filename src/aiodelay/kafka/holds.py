"""`Holds`: pauses and resumes lanes and addresses, in every partition."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiokafka import TopicPartition

from aiodelay.errors import StoreUnavailableError
from aiodelay.model import Lane

from . import records
from .client import UNAVAILABLE, Outgoing, reason_of
from .store_parts import StorePort

__all__ = ["Holds"]


class Holds(StorePort):
    """`Holds` over the partitions of a store: the owner of each partition reads there which lanes are held."""

    async def hold(self, lane: Lane, address: str | None = None) -> bool:
        """Pause a lane or an address of it."""
        return await self._set_hold(lane, address, is_held=True)

    async def release(self, lane: Lane, address: str | None = None) -> bool:
        """Resume a lane or an address of it."""
        return await self._set_hold(lane, address, is_held=False)

    async def holds(self) -> Sequence[tuple[Lane, str | None]]:
        """List the lanes and addresses that are held."""
        found = {held for partition in self._parts.lookup.owned() for held in partition.index.inspection.holds()}
        return sorted(found, key=lambda held: (held[0], held[1] is not None, held[1] or ""))

    async def _set_hold(self, lane: Lane, address: str | None, *, is_held: bool) -> bool:
        was_held = (lane, address) in await self.holds()
        wire = records.encode_hold(lane, address, is_held=is_held)
        try:
            async with asyncio.timeout(self._parts.cluster.timeout_ms / 1000):
                await self._write_everywhere(wire)
        except UNAVAILABLE as error:
            raise StoreUnavailableError(
                self._parts.cluster.name, f"held in part, or not: {reason_of(error)}"
            ) from error
        return was_held != is_held

    async def _write_everywhere(self, wire: records.Wire) -> None:
        """Write a record to every partition, and wait until this process has read it in its own partitions."""
        assignment = self._parts.assignment
        places = [TopicPartition(topic, i) for topic, n in assignment.counts.items() for i in range(n)]
        outgoing = [Outgoing(place.topic, *wire, place.partition) for place in places]
        for place, each in zip(places, await self._parts.writer.write(outgoing), strict=True):
            if each.error is not None:
                raise each.error
            if (partition := assignment.partitions.get(place)) is not None:
                await partition.until_read(each.offset)

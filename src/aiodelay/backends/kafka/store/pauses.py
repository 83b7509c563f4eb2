"""`Pauses`: pauses and resumes lanes and addresses, in every partition."""

from __future__ import annotations

from collections.abc import Sequence

from aiodelay.backends.kafka import records
from aiodelay.core.values import Lane

from .broadcast import all_places, write_everywhere
from .store_parts import StorePort

__all__ = ["Pauses"]


class Pauses(StorePort):
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
        await write_everywhere(self._parts, wire, all_places(self._parts), "held")
        return was_held != is_held

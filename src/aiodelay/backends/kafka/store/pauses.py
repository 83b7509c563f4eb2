"""`Pauses`: pauses and resumes lanes and addresses, by a record in every partition."""

from __future__ import annotations

from collections.abc import Sequence

from aiodelay.backends.kafka import records
from aiodelay.core.values import Lane
from aiodelay.ports.control import pause_order

from .broadcast import all_places, write_everywhere
from .store_parts import StorePort

__all__ = ["Pauses"]


class Pauses(StorePort):
    """The port `Pauses` over the partitions of a store. Each owner reads the paused lanes from its partition."""

    async def pause(self, lane: Lane, address: str | None = None) -> bool:
        """Pause a lane, or one of its addresses. Say whether the call changed anything."""
        return await self._set_pause(lane, address, is_paused=True)

    async def resume(self, lane: Lane, address: str | None = None) -> bool:
        """Resume a lane, or one of its addresses. Say whether the call changed anything."""
        return await self._set_pause(lane, address, is_paused=False)

    async def paused(self) -> Sequence[tuple[Lane, str | None]]:
        """List the lanes and addresses that are paused."""
        found = {paused for partition in self._parts.lookup.owned() for paused in partition.index.inspection.paused()}
        return sorted(found, key=pause_order)

    async def _set_pause(self, lane: Lane, address: str | None, *, is_paused: bool) -> bool:
        was_paused = (lane, address) in await self.paused()
        wire = records.encode_hold(lane, address, is_held=is_paused)
        what = "the pause" if is_paused else "the end of the pause"
        await write_everywhere(self._parts, wire, all_places(self._parts), what)
        return was_paused != is_paused

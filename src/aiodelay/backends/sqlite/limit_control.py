"""`LimitControl`: the limits of the SQLite store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiodelay.core.values import Lane, LaneLimits, LimitedKey

from .inspection import Inspection
from .limits import fill, read_limits, set_limits
from .tables import Tables
from .work import STEP_SIZE

__all__ = ["LimitControl"]


class LimitControl(Inspection):
    """Implements `Limits`.

    Args:
        handle: The file of the store.
    """

    async def set_limits(self, lane: Lane, limits: LaneLimits, *, is_declared: bool) -> None:
        await self._handle.write(lambda tables: set_limits(tables, lane, limits, is_declared=is_declared))
        # Fill in steps, so that other writes run between the steps. If this process ends here, claims do the rest.
        while not await self._handle.write(lambda tables: _is_filled(tables, lane), size=STEP_SIZE):
            pass

    async def limits(self, *, is_declared: bool = False) -> Mapping[Lane, LaneLimits]:
        return await self._handle.read(lambda reader: reader.limits("declared" if is_declared else "limits"))

    async def limited_keys(self, lane: Lane, *, limit: int = 100, key: bytes | None = None) -> Sequence[LimitedKey]:
        now = self._handle.clock.now_ms()
        return await self._handle.read(lambda reader: reader.limited_keys(lane, limit, key, now))


def _is_filled(tables: Tables, lane: Lane) -> bool:
    """Fill in the next messages of a lane. Return whether all messages are filled in."""
    limited = read_limits(tables).get(tables.known_lane(lane))
    return limited is None or fill(tables, limited).filled is None

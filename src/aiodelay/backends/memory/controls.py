"""`MemoryControls`: the tables of a `MemoryStore`, its time, its pauses and its limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from aiodelay.core.dict_table.claims import DictClaiming, LaneHeads
from aiodelay.core.dict_table.entries import Entry
from aiodelay.core.dict_table.inspection import DictInspection
from aiodelay.core.dict_table.table import DictTable, Workers
from aiodelay.core.rules import Rules
from aiodelay.core.values import NO_LIMITS, Lane, LaneLimits, LimitedKey
from aiodelay.ports.clock import Clock, SystemClock

__all__ = ["MemoryControls"]


class MemoryControls:
    """The base class of `MemoryStore`: what operators change.

    Args:
        clock: The clock of the store. With None, the store uses the system clock.
        journal: The largest number of journal entries to keep. With 0, the store keeps no journal.
    """

    _table_type: type[DictTable] = DictTable
    _rules_type: type[Rules[Entry]] = Rules
    _order_type: type[LaneHeads] = LaneHeads
    _claiming_type: type[DictClaiming] = DictClaiming

    def __init__(self, *, clock: Clock | None = None, journal: int = 0) -> None:
        self._clock = clock or SystemClock()
        self._table = self._table_type(Workers(), journal=journal)
        self._rules = self._rules_type(self._table)
        order = self._order_type(self._table, self._rules)
        self._claiming = self._claiming_type(self._table, self._rules, order, count(1))
        self._inspection = DictInspection(self._table, self._claiming)
        self._positions: dict[str, int] = {}
        self._limits: dict[Lane, LaneLimits] = {}
        self._declared: dict[Lane, LaneLimits] = {}

    def now_ms(self) -> int:
        """Return the time of the store's clock, in epoch ms."""
        return self._clock.now_ms()

    def seconds_until(self, at_ms: int) -> float:
        """Return the seconds from now until an instant of the store's clock."""
        return self._clock.seconds_until(at_ms)

    # --- pauses -------------------------------------------------------------------------------------------

    async def pause(self, lane: Lane, address: str | None = None) -> bool:
        """Pause a lane, or one address of the lane. Return True if the call changed the state."""
        if (lane, address) in self._inspection.paused():
            return False
        self._inspection.pause(lane, address)
        return True

    async def resume(self, lane: Lane, address: str | None = None) -> bool:
        """Resume a lane, or one address of the lane. Return True if the call changed the state."""
        if (lane, address) not in self._inspection.paused():
            return False
        self._inspection.resume(lane, address)
        return True

    async def paused(self) -> Sequence[tuple[Lane, str | None]]:
        """List the paused lanes and addresses. The address of a paused lane is None."""
        return self._inspection.paused()

    # --- limits -------------------------------------------------------------------------------------------

    async def set_limits(self, lane: Lane, limits: LaneLimits, *, is_declared: bool) -> None:
        """Set the limits of a lane. Limits without any number end them."""
        if is_declared and self._declared.get(lane, NO_LIMITS) == limits:
            return
        if is_declared:
            self._declared[lane] = limits
        if self._limits.get(lane, NO_LIMITS) != limits:
            self._limits[lane] = limits
            self._table.set_limits(lane, limits, self.now_ms())

    async def limits(self, *, is_declared: bool = False) -> Mapping[Lane, LaneLimits]:
        """Return the limits of all lanes that have any, or the limits that code declared last."""
        found = self._declared if is_declared else self._limits
        return {lane: limits for lane, limits in sorted(found.items()) if limits}

    async def limited_keys(self, lane: Lane, *, limit: int = 100, key: bytes | None = None) -> Sequence[LimitedKey]:
        """List keys of a lane that have messages in flight or waiting because of a limit."""
        return self._inspection.limited_keys(lane, limit, key, self.now_ms())

"""`aiodelay top`: a live view of a store."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number
from msgspec import Struct

from aiodelay import ConfigurationError, Scheduler, StoreUnavailableError, UnsupportedByStoreError
from aiodelay.core.durations import format_duration, parse_duration
from aiodelay.core.values import Blocked, Lane, LaneCounts
from aiodelay.errors import cut
from aiodelay.operations.json_shapes import blocked_shape, counts_shape, time_shape
from aiodelay.operations.queries import Lateness, LatenessMeter, oldest_overdue_ms

from .output import moment, print_json, print_table
from .place import Place
from .signals import stop_signals

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["top"]

HEADS = ("lane", "scheduled", "overdue", "in flight", "held", "dead", "")


async def top(
    *,
    every: str = "2s",
    times: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    place: Place = Place(),
) -> None:
    """Show counts, lateness and lanes, live until Ctrl-C.

    If the output is not a terminal, the view is printed once.

    Args:
        every: The time between two updates.
        times: Print the view this number of times, one below the other.
    """
    pause_s = parse_duration(every, field="every", error=ConfigurationError, least_ms=100) / 1000
    is_live = not place.json and times is None and sys.stdout.isatty()
    left = 1 if times is None and not is_live else times
    async with place.opened() as scheduler:
        viewer = _Viewer(scheduler)
        with stop_signals() as stop:
            if is_live:
                await _show_live(viewer, stop, pause_s)
                return
            while left is not None:
                _print(await viewer.inspect(), place)
                left = left - 1 or None
                if left is not None and await _is_set_within(stop, pause_s):
                    return


async def _show_live(viewer: _Viewer, stop: asyncio.Event, pause_s: float) -> None:
    from rich.live import Live  # noqa: PLC0415 - only a terminal needs it
    from rich.text import Text  # noqa: PLC0415

    with Live(Text("reading the store …"), screen=True, auto_refresh=False) as live:
        while not stop.is_set():
            try:
                shown = _rendered(await viewer.inspect())
            except StoreUnavailableError as error:
                shown = Text(f"{cut(str(error), 300)}; trying again", style="red")
            live.update(shown, refresh=True)
            await _is_set_within(stop, pause_s)


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


# --- the view ---------------------------------------------------------------------------------------------


class View(Struct, frozen=True):
    """The state of a store at one time.

    Attributes:
        lateness: The lateness of recent deliveries; None if the store keeps no journal.
    """

    name: str
    now_ms: int
    counts: dict[Lane, LaneCounts]
    overdue_since_ms: int | None
    lateness: Lateness | None
    blocked: list[Blocked]
    paused: list[str]

    @property
    def overdue_ms(self) -> int:
        """The age of the oldest overdue message; 0 = no message is overdue."""
        return 0 if self.overdue_since_ms is None else max(self.now_ms - self.overdue_since_ms, 0)

    def heading(self) -> list[str]:
        """Return the lines above the table."""
        late = "lateness is not known: the store keeps no journal" if self.lateness is None else _late(self.lateness)
        oldest = f"oldest overdue for {format_duration(self.overdue_ms)}" if self.overdue_ms else "nothing overdue"
        return [f"{self.name}  {moment(self.now_ms)}", f"{oldest}; {late}"]

    def rows(self) -> list[tuple[object, ...]]:
        """Return the rows of the table, one per lane. The lane with most overdue messages is first."""
        lanes = sorted(self.counts.items(), key=lambda each: (-each[1].overdue, each[0]))
        return [(lane, n.scheduled, n.overdue, n.in_flight, n.held, n.dead, self._note(lane, n)) for lane, n in lanes]

    def _note(self, lane: Lane, counts: LaneCounts) -> str:
        notes = [f"paused {each.partition(':')[2]}".rstrip() for each in self.paused if each.partition(":")[0] == lane]
        notes += [f"blocked {each.address}: {each.reason}" for each in self.blocked if each.lane == lane]
        return "; ".join([*notes, "read by nobody"] if counts.read_by_nobody else notes)

    def shape(self) -> dict[str, Any]:
        """Return the view in its JSON form."""
        since = self.overdue_since_ms
        return {
            "at": time_shape(self.now_ms),
            "lanes": counts_shape(self.counts),
            "oldest_overdue": None if since is None else time_shape(since),
            "lateness": None if self.lateness is None else msgspec.structs.asdict(self.lateness),
            "blocked": [blocked_shape(each) for each in self.blocked],
            "paused": self.paused,
        }


def _late(lateness: Lateness) -> str:
    if lateness.p50_ms is not None and lateness.p99_ms is not None:
        p50, p99 = format_duration(lateness.p50_ms), format_duration(lateness.p99_ms)
        of = f"{lateness.samples} in the last 5m" if lateness.is_complete else f"the newest {lateness.samples}"
        return f"late p50 {p50}, p99 {p99}, of {of}"
    if lateness.is_complete:
        return "no first attempt in the last 5m"
    return "lateness is not known: the newest entries of the journal hold no first attempt"


class _Viewer:
    """Inspects one store repeatedly. To measure lateness, each inspection reads only new journal entries."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._meter = scheduler, LatenessMeter()

    async def inspect(self) -> View:
        store = self._scheduler.store
        try:
            lateness = await self._meter.measure(self._scheduler)
        except UnsupportedByStoreError:
            lateness = None
        counts = await self._scheduler.counts()
        return View(
            store.name,
            store.now_ms(),
            dict(counts),
            await oldest_overdue_ms(self._scheduler, counts),
            lateness,
            list(await self._scheduler.blocked()),
            list(await self._scheduler.paused()),
        )


def _print(view: View, place: Place) -> None:
    if place.json:
        print_json(view.shape())
        return
    print("\n".join(view.heading()))
    print_table(HEADS, view.rows())


def _rendered(view: View) -> RenderableType:
    from rich.console import Group  # noqa: PLC0415 - only a terminal needs them
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(*HEADS, box=None, pad_edge=False)
    for column in table.columns[1:-1]:
        column.justify = "right"
    for row in view.rows():
        table.add_row(*(Text(cut(str(cell))) for cell in row), style="red" if row[2] else "")
    return Group(*(Text(line, style="bold" if not i else "") for i, line in enumerate(view.heading())), Text(), table)

"""The front page: coming messages, lateness, lanes and instances. Also the strip of counts, which every page shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.responses import Response

from aiodelay.core.values import Blocked, Instance, LaneCounts, LoadBucket
from aiodelay.errors import UnsupportedByStoreError
from aiodelay.operations.activity import MINUTE_MS, Activity, drain_ms
from aiodelay.operations.load_forecast import Asked, LaneForecast, forecasts
from aiodelay.service.api.served import Opened

from .charts import lateness_columns, load_bars, past_stacks
from .rendering import shown
from .requests import screen, store_of, wanted
from .state import SPANS, Facts, Shared, Span, state_of

__all__ = [
    "MOST_LANES",
    "Drain",
    "LaneRow",
    "LateLanes",
    "drain_of",
    "front",
    "given_of_overview",
    "given_of_strip",
    "instances_of",
    "lanes_of",
    "late_lanes",
]

COMING_MINUTES = 10
MOST_LANES = 200
"""The most lanes that a screen lists. With thousands, the service would spend most of its time on the page."""


@dataclass(frozen=True, slots=True)
class LaneRow:
    """A lane in the table of the front page. If this process does not serve the lane, `demand` is None."""

    name: str
    counts: LaneCounts
    demand: int | None
    is_paused: bool
    blocked: Sequence[Blocked]


@screen("read")
async def front(request: Request) -> Response:
    """Show the overview of the store."""
    store = store_of(request)
    span = SPANS.get(wanted(request, "span") or "", SPANS["hour"])
    shared = state_of(request).shared
    given = await given_of_overview(shared, store, span)
    return shown(request, "overview.html", store, spans=SPANS.values(), **given)


async def given_of_strip(shared: Shared, store: Opened) -> dict[str, Any]:
    """Return the template values of the strip."""
    return {"facts": await shared.facts(store)}


async def given_of_overview(shared: Shared, store: Opened, span: Span) -> dict[str, Any]:
    """Return the template values of the front page."""
    try:
        facts = await shared.facts(store)
    except UnsupportedByStoreError as error:
        return {"facts": None, "cannot": str(error), "span": span}
    load = await shared.load(store, span)
    lanes = await lanes_of(store, facts.lanes)
    activity = await shared.activity(store)
    return {
        "facts": facts,
        "cannot": "",
        "span": span,
        "chart": load_bars(load, span, facts.now_ms),
        "coming_late": late_lanes(store, facts, load, span),
        "histogram": None if facts.lateness is None else lateness_columns(facts.lateness),
        "past": None if activity is None else past_stacks(activity),
        "activity": activity,
        "drain": None if activity is None else drain_of(facts, activity, await shared.load(store, SPANS["hour"])),
        "lanes": lanes[:MOST_LANES],
        "more_lanes": len(lanes[MOST_LANES:]),
        "blocked": [blocked for each in lanes for blocked in each.blocked],
        "instances": await instances_of(store),
    }


@dataclass(frozen=True, slots=True)
class LateLanes:
    """The forecast of the lanes whose messages come due.

    Attributes:
        late: The forecasts of lanes whose messages will be late.
        on_time: The names of the other lanes whose dispatch rate was measured.
        unknown: The names of the lanes whose dispatch rate is not known.
    """

    late: Sequence[LaneForecast]
    on_time: Sequence[str]
    unknown: Sequence[str]


def late_lanes(store: Opened, facts: Facts, load: Sequence[LoadBucket], span: Span) -> LateLanes:
    """Return how late the messages of each lane will be, from the counts of the chart and the measured rates."""
    now_ms, given = min([facts.now_ms, *(each.from_ms for each in load)]), Asked()
    shown = range(now_ms, now_ms + span.buckets * span.bucket_ms, span.bucket_ms)
    found = forecasts(load, facts.lanes, store.lateness.rates(), shown, given)
    late = [each for each in found if each.is_late(given.within_ms)]
    on_time = [each.lane or "" for each in found if each.forecast is not None and each not in late]
    return LateLanes(late, on_time, [each.lane or "" for each in found if each.forecast is None])


@dataclass(frozen=True, slots=True)
class Drain:
    """An estimate of the time until no message is overdue.

    Attributes:
        delivered: Messages delivered per minute, in the last five minutes.
        coming: Messages that come due per minute, in the next ten minutes.
        ms: The time until no message is overdue, in ms; None = at this rate, there will always be overdue messages.
    """

    delivered: float
    coming: float
    ms: int | None


def drain_of(facts: Facts, activity: Activity, load: Sequence[LoadBucket]) -> Drain | None:
    """Return the estimate; None if no message is overdue, or if the delivery rate is not known.

    The estimate leaves out lanes that no live process serves: their messages are not delivered.
    """
    served = {lane for lane, each in facts.lanes.items() if not each.read_by_nobody}
    overdue, delivered = sum(facts.lanes[each].overdue for each in served), activity.delivered_per_minute()
    if not overdue or delivered is None:
        return None
    ends_ms = facts.now_ms + COMING_MINUTES * MINUTE_MS
    coming = sum(each.messages for each in load if each.lane in served and each.from_ms < ends_ms) / COMING_MINUTES
    return Drain(delivered, coming, drain_ms(overdue, delivered, coming))


async def lanes_of(store: Opened, counts: Mapping[str, LaneCounts]) -> Sequence[LaneRow]:
    """Return the lanes that have messages or that this process serves, sorted by name."""
    scheduler = store.scheduler
    paused = await scheduler.paused()
    blocked = await scheduler.blocked()
    served = scheduler.demand()
    return [
        LaneRow(
            name,
            counts.get(name, LaneCounts()),
            served.get(name),
            name in paused,
            [each for each in blocked if each.lane == name],
        )
        for name in sorted({*counts, *served})
    ]


async def instances_of(store: Opened) -> Sequence[Instance]:
    """Return the live instances of a store."""
    return await store.scheduler.opened_store().instances()

"""How late messages will be: the answer of `aiodelay load`, of the API and of the page."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, structs

from aiodelay.core.dispatch_rate import DispatchRate
from aiodelay.core.durations import Duration, format_duration, parse_duration
from aiodelay.core.load_forecast import ComingLoad, LoadForecast, Spread
from aiodelay.core.rates import parse_rate
from aiodelay.core.values import Lane, LaneCounts, LoadBucket
from aiodelay.errors import ConfigurationError, UnsupportedByStoreError
from aiodelay.scheduler import Scheduler

from .json_shapes import time_shape
from .queries import LatenessMeter

__all__ = ["Asked", "LaneForecast", "asked", "forecast_shape", "forecast_store", "forecasts", "slot_ms_of"]

WITHIN = "10s"
MOST_SLOTS = 2_000
_SLOTS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 21_600, 43_200, 86_400)
_NO_BACKLOG = "no backlog was measured"


class Asked(Struct, frozen=True):
    """The choices of the caller.

    Attributes:
        per_s: The messages that the processes can start in a second, of all lanes together; None = as measured for
            each lane.
        spread_ms: The window to forecast as `spread`; None = the shortest window that keeps the lateness low.
        within_ms: A message that starts this much after its due time is not late.
    """

    per_s: float | None = None
    spread_ms: int | None = None
    within_ms: int = 10_000


class LaneForecast(Struct, frozen=True):
    """The forecast of a lane, or of all lanes together.

    Attributes:
        lane: The lane; None = all lanes together.
        messages: The number of messages that come due.
        overdue: The number of messages that are overdue now.
        per_s: The messages that start in a second; None = not known.
        measured: The measurement that `per_s` comes from; None = the caller gave the rate, or the rate is not known.
        forecast: The forecast; None if the rate is not known.
        spread: A window for `spread`, and the lateness with it; None if it was not asked for and is not needed, or if
            no window keeps the lateness low.
        text: The forecast in words.
    """

    lane: Lane | None
    messages: int
    overdue: int
    per_s: float | None
    measured: DispatchRate | None
    forecast: LoadForecast | None
    spread: Spread | None
    text: str

    def is_late(self, within_ms: int) -> bool:
        """Return whether messages will be late, even if the messages of each slot are due evenly over the slot."""
        return self.forecast is not None and self.forecast.least_ms > within_ms


def asked(rate: str | None = None, spread: Duration | None = None, within: Duration = WITHIN) -> Asked:
    """Return the choices of a caller.

    Args:
        rate: A rate such as "500/s", "90/min" or "100/hour".
        spread: A window, at least 1 s.
        within: The lateness that does not matter, at least 1 ms.

    Raises:
        ConfigurationError: A value is wrong.
    """
    return Asked(
        None if rate is None else _per_s(rate),
        None if spread is None else parse_duration(spread, field="spread", error=ConfigurationError, least_ms=1_000),
        parse_duration(within, field="within", error=ConfigurationError, least_ms=1),
    )


def _per_s(rate: str) -> float:
    number, span_ms = parse_rate(rate, field="rate")
    return number * 1_000 / span_ms


def slot_ms_of(span_ms: int) -> int:
    """Return the length of the slots in which to count the messages of a span: 1 s or more, at most 2,000 slots."""
    slots = (each * 1_000 for each in _SLOTS_S)
    return next((each for each in slots if span_ms <= each * MOST_SLOTS), -(-span_ms // MOST_SLOTS))


async def forecast_store(
    scheduler: Scheduler, meter: LatenessMeter, span_ms: int, given: Asked, *, lane: Lane | None = None, most: int
) -> tuple[int, Sequence[LaneForecast]]:
    """Count the messages that come due, and return the length of the slots and the forecast of each lane.

    Args:
        scheduler: An open scheduler.
        meter: The meter of this scheduler's journal, which measures the dispatch rates.
        span_ms: How far to look ahead, in ms.
        given: The choices of the caller. With a rate, the journal is not read.
        lane: Only this lane.
        most: The most entries to read of each part of the journal.

    Raises:
        StoreUnavailableError: The store did not answer.
    """
    slot_ms = slot_ms_of(span_ms)
    store = scheduler.opened_store()
    unknown = _NO_BACKLOG
    if given.per_s is None:
        try:
            await meter.measure(scheduler, most=most)
        except UnsupportedByStoreError as error:
            unknown = f"the store keeps no journal ({error.allowed})"
    slots = -(-span_ms // slot_ms)
    load = await store.load(bucket_ms=slot_ms, buckets=slots)
    counts = await store.counts()
    if lane is not None:
        load, counts = [each for each in load if each.lane == lane], {lane: counts.get(lane, LaneCounts())}
    now_ms = min([store.now_ms(), *(each.from_ms for each in load)])
    span = range(now_ms, now_ms + slots * slot_ms, slot_ms)
    return slot_ms, forecasts(load, counts, meter.rates(), span, given, lane=lane, unknown=unknown)


def forecasts(
    coming: Sequence[LoadBucket],
    counts: Mapping[Lane, LaneCounts],
    rates: Mapping[Lane, DispatchRate],
    span: range,
    given: Asked,
    *,
    lane: Lane | None = None,
    unknown: str = _NO_BACKLOG,
) -> Sequence[LaneForecast]:
    """Return the forecast of each lane that has messages, or one forecast for all of them if the rate is given.

    Args:
        coming: The number of messages that come due, by slot and lane.
        counts: The counts of messages, by lane.
        rates: The measured rates, by lane.
        span: The time of the forecast, epoch ms; the step is the length of a slot.
        given: The choices of the caller.
        lane: The lane of the forecast if the rate is given; None = all lanes.
        unknown: The reason if a rate is not known, in words.
    """
    slots: defaultdict[Lane | None, Counter[int]] = defaultdict(Counter)
    overdue: Counter[Lane | None] = Counter()
    for each in coming:
        slots[each.lane if given.per_s is None else lane][each.from_ms] += each.messages
    for each_lane, of_lane in counts.items():
        overdue[each_lane if given.per_s is None else lane] += of_lane.overdue
    found = list[LaneForecast]()
    for name in sorted({*slots, *(+overdue)}, key=lambda each: each or ""):
        measured = rates.get(name or "") if given.per_s is None else None
        per_s = measured.per_s if measured is not None else given.per_s
        if per_s is None:
            text = f"how late messages will be is not known: {unknown}"
            found.append(LaneForecast(name, slots[name].total(), overdue[name], None, None, None, None, text))
        else:
            load = ComingLoad(slots[name], span.step, span.start, span.stop, overdue[name], per_s)
            found.append(_forecast(name, load, measured, given))
    return found


def _forecast(lane: Lane | None, load: ComingLoad, measured: DispatchRate | None, given: Asked) -> LaneForecast:
    forecast, spread = load.forecast(), None
    if given.spread_ms is not None:
        spread = load.spread(given.spread_ms)
    elif forecast.least_ms > given.within_ms:
        spread = load.spread_within(given.within_ms)
    messages = sum(load.slots.values())
    found = LaneForecast(lane, messages, load.overdue, load.per_s, measured, forecast, spread, "")
    return structs.replace(found, text="; ".join(_words(found, forecast, load.slot_ms, given)))


# --- words ------------------------------------------------------------------------------------------------


def _words(found: LaneForecast, forecast: LoadForecast, slot_ms: int, given: Asked) -> Iterator[str]:
    is_late, late = found.is_late(given.within_ms), f"{_at_most(forecast.most_ms)} late, at {_rate(found)}"
    if forecast.worst_ms is None:
        yield "no message comes due"
    elif is_late:
        yield f"at {_at(forecast.worst_ms)} messages will be {late}"
    elif forecast.most_ms > given.within_ms:
        yield f"messages will be on time, or {late}: they are counted per {format_duration(slot_ms)}"
    else:
        yield f"messages will be {late}"
    if is_late and forecast.empty_ms is not None:
        yield f"no message waits any more at {_at(forecast.empty_ms)}"
    if found.overdue:
        at_rate = f", at {_rate(found)}" if forecast.worst_ms is None else ""
        yield f"{found.overdue:,} are overdue now: the last starts in {_about(forecast.overdue_ms)}{at_rate}"
    if found.spread is not None:
        window = format_duration(found.spread.window_ms)
        yield f"with spread={window} messages will be {_at_most(found.spread.late_ms)} late"
    elif is_late:
        yield f"no spread up to 1d keeps the lateness within {format_duration(given.within_ms)}"


def _rate(found: LaneForecast) -> str:
    rate = f"{found.per_s:,.3g} a second" if (found.per_s or 0) < 100 else f"{found.per_s:,.0f} a second"
    if found.measured is None:
        return rate
    starts, busy = found.measured.starts, _about(found.measured.busy_ms)
    return f"{rate} (measured: {starts:,} starts in {busy} of backlog, until {_at(found.measured.until_ms)})"


def _at(ms: int) -> str:
    return f"{time_shape(ms)[:19].replace('T', ' ')}Z"


def _at_most(ms: int) -> str:
    return "less than 1s" if ms < 1_000 else f"up to {_about(ms)}"


def _about(ms: int) -> str:
    """Return a duration, rounded up to whole seconds."""
    return format_duration(-(-ms // 1000) * 1000)


# --- JSON -------------------------------------------------------------------------------------------------


def forecast_shape(found: LaneForecast) -> dict[str, Any]:
    """Return the JSON form of a forecast."""
    forecast, measured, spread = found.forecast, found.measured, found.spread
    return {
        "lane": found.lane,
        "messages": found.messages,
        "overdue": found.overdue,
        "per_s": found.per_s,
        "measured": None
        if measured is None
        else {"starts": measured.starts, "busy_ms": measured.busy_ms, "until": time_shape(measured.until_ms)},
        "worst": None if forecast is None or forecast.worst_ms is None else time_shape(forecast.worst_ms),
        "late_ms": None if forecast is None else forecast.most_ms,
        "least_late_ms": None if forecast is None else forecast.least_ms,
        "overdue_ms": None if forecast is None else forecast.overdue_ms,
        "empty": None if forecast is None or forecast.empty_ms is None else time_shape(forecast.empty_ms),
        "spread": None if spread is None else format_duration(spread.window_ms),
        "spread_late_ms": None if spread is None else spread.late_ms,
        "text": found.text,
    }

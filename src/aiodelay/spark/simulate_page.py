"""The HTML page of `aiodelay spark simulate`: lateness and backlog by hour, with a line for each rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from html import escape
from typing import Any, Final

from msgspec import Struct, structs

from aiodelay.core.durations import format_duration, from_epoch_ms

from .forecast import HOUR_MS, Forecast, Hour, Span
from .pages import folded, notice, page, section, strip, table
from .report_plots import Figures, bar_plot, count_text, line_plot, ms_text

__all__ = ["SimulationPage", "render"]

_LATENESS: Final = {"p50_ms": "p50", "p95_ms": "p95", "p99_ms": "p99", "max_ms": "Latest"}
_OF_RATE: Final = {
    **_LATENESS,
    "backlog": "Longest backlog",
    "worst": "At",
    "drained": "Gone at",
    "left": "Left at the end",
    "utilised": "Utilisation",
}
_HOUR: Final = {"hour": "Hour (UTC)"}
_OF_HOUR: Final = {
    "messages": "Due",
    **_LATENESS,
    "backlog": "Longest backlog",
    "left": "Left",
    "utilised": "Utilisation",
}
_ABOUT = (
    "A simulation of one queue for each rate. The message with the earliest due time is dispatched first. No new "
    "messages are scheduled, and no attempt is retried. An hour shows the lateness of the messages that are due in the "
    "hour, accurate to {slot} plus the time of one message. Backlog is the number of messages that are due and not "
    "dispatched. "
    "Utilisation is the part of the time in which a message is being dispatched. The scales of lateness and backlog "
    "are logarithmic."
)


class SimulationPage(Struct, frozen=True, kw_only=True):
    """The content of a page.

    Attributes:
        source: The store or files from which the messages were read.
        span: The simulated time.
        slot_ms: The length of a slot. Messages that are due within one slot count as due at the start of the slot.
        overdue: The number of messages that were due before the simulated time.
        scale: The factor by which the number of messages was multiplied.
        forecasts: The forecast of each rate.
    """

    source: str
    span: Span
    slot_ms: int
    overdue: int
    scale: float
    forecasts: Sequence[Forecast]


def render(shown: SimulationPage) -> str:
    """Return the page's HTML."""
    scaled = "" if shown.scale == 1 else f", {shown.scale:g} times as many"
    about = (
        f"Messages of <code>{escape(shown.source)}</code>{scaled}, {_at(shown.span.from_ms)} to {_at(shown.span.to_ms)}"
    )
    parts = list(_parts(shown)) if shown.forecasts[0].messages else [_NOTHING]
    return page("Dispatch simulation", about, parts, _ABOUT.format(slot=format_duration(shown.slot_ms)))


_NOTHING = section("Nothing is due", "<p>No message is due in this time, and none was before.</p>")


def _parts(shown: SimulationPage) -> Iterator[str]:
    forecasts = shown.forecasts
    busiest = max(hour.messages for hour in forecasts[0].hours)
    days = (shown.span.to_ms - shown.span.from_ms) / 86_400_000
    figures = {"Messages": count_text(forecasts[0].messages), "Overdue at the start": count_text(shown.overdue)}
    yield strip(figures | {"Days": f"{days:.3g}", "Busiest hour": count_text(busiest)})
    yield from (notice(text) for forecast in forecasts for text in _notices(forecast))
    rates = table("Figures of each rate", {"rate": "Rate"}, _OF_RATE, list(map(_row, forecasts)))
    yield section("By rate", rates)
    yield _plot(forecasts, "Lateness: p99", "p99 of lateness", lambda hour: hour.p99_ms, ms_text)
    yield _plot(forecasts, "Backlog", "Longest backlog", lambda hour: hour.backlog, count_text)
    due = bar_plot("Messages due", "Messages due in each hour.", _rows(forecasts[0]), "hour", {"messages": "Due"})
    yield section("Messages due", due)
    yield section("Every hour", *map(_every_hour, forecasts))


def _every_hour(forecast: Forecast) -> str:
    rate = f"At {_rate(forecast)}"
    return folded(rate, table(f"{rate}, every hour", _HOUR, _OF_HOUR, _rows(forecast)))


def _plot(
    forecasts: Sequence[Forecast],
    title: str,
    what: str,
    value: Callable[[Hour], int | None],
    text_of: Callable[[int], str],
) -> str:
    """Return a section with a plot that has a line for each rate, and with its table."""
    names = {f"rate{number}": _rate(forecast) for number, forecast in enumerate(forecasts, 1)}
    times: list[dict[str, Any]] = [
        {"hour": _hour(hours[0])} | dict(zip(names, map(value, hours), strict=True))
        for hours in zip(*(forecast.hours for forecast in forecasts), strict=True)
    ]
    plot = line_plot(title, f"{what} in each hour, for each rate.", times, "hour", names, text_of=text_of)
    texts = [row | {name: _text(row[name], text_of) for name in names} for row in times]
    return section(title, plot, folded("As a table", table(f"{what} in each hour", _HOUR, names, texts)))


def _text(value: int | None, text_of: Callable[[int], str]) -> str:
    return "-" if value is None else text_of(value)


def _notices(forecast: Forecast) -> Iterator[str]:
    """Yield warnings about a rate: it is too low, or messages are left at the end."""
    rate, left = _rate(forecast), count_text(forecast.left)
    if forecast.load > 1:
        per_s = forecast.load * forecast.rate
        yield (
            f"{rate} is too low: on average {per_s:,.4g} messages a second are due, including overdue messages. "
            f"{left} messages are left at the end. They take {ms_text(forecast.left_ms)} if no more come."
        )
    elif forecast.left:
        yield f"{rate}: {left} messages are left at the end. They take {ms_text(forecast.left_ms)} if no more come."


def _rate(forecast: Forecast) -> str:
    return f"{forecast.rate:,.12g}/s"


def _at(ms: int | None) -> str:
    return "-" if ms is None else f"{from_epoch_ms(ms):%Y-%m-%d %H:%M:%S}"


def _hour(hour: Hour) -> datetime:
    return from_epoch_ms(hour.from_ms // HOUR_MS * HOUR_MS)


def _rows(forecast: Forecast) -> list[Figures]:
    return [structs.asdict(hour) | {"hour": _hour(hour), "utilised": _part(hour)} for hour in forecast.hours]


def _row(forecast: Forecast) -> Figures:
    drained = "never" if forecast.load > 1 and forecast.drained_ms is None else _at(forecast.drained_ms)
    told = {"rate": _rate(forecast), "worst": _at(forecast.worst_ms), "drained": drained, "utilised": _part(forecast)}
    return structs.asdict(forecast) | told


def _part(figures: Forecast | Hour) -> str:
    return f"{figures.utilisation:.1%}"

"""The HTML page of `aiodelay spark report`: key figures, plots with tables, and notices."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from msgspec import Struct

from .pages import folded, notice, page, section, strip, table
from .report_plots import SLOTS_S, Figures, bar_plot, count_text, line_plot, ms_text

__all__ = ["ReportPage", "render"]

_FAILURES: Final = {"again": "Tried again", "dead": "Dead", "dropped": "Dropped", "skipped": "Skipped"}
_HEADS: Final = {
    "lane": "Lane",
    "hour": "Hour (UTC)",
    "day": "Day (UTC)",
    "reason": "Reason",
    "delivered": "Delivered",
    "p50_ms": "p50",
    "p95_ms": "p95",
    "p99_ms": "p99",
    "max_ms": "Latest",
    "early": "Early",
    "unclaimed": "No claim",
    "repeated": "Repeated",
    **_FAILURES,
}
_PERCENTILES: Final = ("p50_ms", "p95_ms", "p99_ms")
_LATENESS: Final = ("delivered", *_PERCENTILES, "max_ms")
_DELIVERIES: Final = ("delivered", "early", "unclaimed", "repeated")
_ALL: Final = (*_LATENESS, *_DELIVERIES[1:], *_FAILURES)
_ABOUT = (
    "Lateness is the start of a delivery minus the due time. The start is the claim or, if the journal has no claim, "
    "the end of the delivery. Each occurrence counts once, at its first success. Percentiles are nearest ranks: exact "
    "up to 10 s, above that rounded up to four digits. The scale of lateness is logarithmic."
)


class ReportPage(Struct, frozen=True, kw_only=True):
    """The content of a page. If a list has more than `most_rows` rows, the list is None.

    Attributes:
        source: The archive from which the events were read.
        within: The time range of the events, in words.
        where: The condition that the events meet.
        by: The columns by which rows are grouped.
        total: The figures of all events.
        lanes: The figures of each lane.
        times: The figures of each hour or day, in order.
        rows: The figures of each combination of values in the columns of `by`.
        most_rows: The most rows of each list.
    """

    source: str
    within: str
    where: str | None
    by: Sequence[str]
    total: Figures
    lanes: Sequence[Figures] | None
    times: Sequence[Figures] | None
    rows: Sequence[Figures] | None
    most_rows: int


def render(shown: ReportPage) -> str:
    """Return the page's HTML."""
    where = f" where <code>{escape(shown.where)}</code>" if shown.where else ""
    has_outcomes = any(shown.total[name] for name in ("delivered", "repeated", *_FAILURES))
    events = f"Events of <code>{escape(shown.source)}</code>{where}, {escape(shown.within)}"
    return page("Delivery report", events, _outcomes(shown) if has_outcomes else [_NOTHING], _ABOUT)


_NOTHING = section("Nothing happened", "<p>No event shows a message that was delivered, tried again or given up.</p>")


def _outcomes(shown: ReportPage) -> list[str]:
    parts = [_strip(shown.total), *map(notice, _notices(shown))]
    unit = next((name for name in shown.by if name in SLOTS_S), None)
    if unit is not None and shown.times is not None:
        parts += _over_time(shown.times, unit)
    if "lane" in shown.by and shown.lanes is not None:
        parts.append(section("By lane", _table("Figures of each lane", ("lane",), _ALL, shown.lanes)))
    reasons = {name.removeprefix("dead_"): n for name, n in shown.total.items() if name.startswith("dead_") and n}
    if reasons:
        dead = [{"reason": name, "dead": n} for name, n in sorted(reasons.items(), key=lambda each: -each[1])]
        parts.append(section("Dead by reason", _table("Why messages were given up", ("reason",), ("dead",), dead)))
    if len(shown.by) > 1 and shown.rows is not None:
        rows = f"{count_text(len(shown.rows))} rows"
        table = _table(f"Figures of each {' and '.join(shown.by)}", shown.by, _ALL, shown.rows)
        parts.append(section(f"By {' and '.join(shown.by)}", folded(rows, table)))
    return parts


def _strip(total: Figures) -> str:
    figures = {"Delivered": count_text(total["delivered"])}
    figures |= {f"Lateness {_HEADS[name]}": ms_text(total[name]) for name in _PERCENTILES}
    figures |= {"Latest": ms_text(total["max_ms"])}
    figures |= {head: count_text(total[name]) for name, head in _FAILURES.items()}
    return strip(figures)


def _notices(shown: ReportPage) -> list[str]:
    total, told = shown.total, []
    if total["early"]:
        told.append(
            f"Early: {count_text(total['early'])}, by up to {ms_text(-total['min_ms'])}. The clocks of the "
            "machines that wrote the events differ, or a program delivers before the due time."
        )
    if total["unclaimed"]:
        told.append(
            f"No claim: {count_text(total['unclaimed'])}. Transfers inside a server and Kafka stores write no "
            "claims. For these deliveries, lateness is measured at their end."
        )
    if total["repeated"]:
        told.append(f"Repeated: {count_text(total['repeated'])} successes after the first of the same occurrence.")
    unit = [name for name in shown.by if name in SLOTS_S]
    levels = ((["lane"], shown.lanes), (unit, shown.times), (list(shown.by), shown.rows))
    missing = {" and ".join(level): None for level, rows in levels if rows is None}
    told += [
        f"By {level}: more than {count_text(shown.most_rows)} rows, which are not shown. Narrow the report down, or "
        "write it as Parquet or CSV."
        for level in missing
    ]
    return told


def _over_time(times: Sequence[Figures], unit: str) -> list[str]:
    each = f"each {unit}"
    heads = {name: _HEADS[name] for name in _PERCENTILES}
    lateness = line_plot("Lateness", f"p50, p95 and p99 of lateness in {each}.", times, unit, heads)
    delivered = bar_plot("Deliveries", f"Deliveries in {each}.", times, unit, {"delivered": "Delivered"})
    parts = [
        section("Lateness", lateness, _as_table(f"Lateness in {each}", unit, _LATENESS, times)),
        section("Deliveries", delivered, _as_table(f"Deliveries in {each}", unit, _DELIVERIES, times)),
    ]
    if any(row[name] for row in times for name in _FAILURES):
        failures = bar_plot("Failures and retries", f"Failures and retries in {each}.", times, unit, _FAILURES)
        table = _as_table(f"Failures and retries in {each}", unit, tuple(_FAILURES), times)
        parts.append(section("Failures and retries", failures, table))
    return parts


def _as_table(caption: str, unit: str, figures: Sequence[str], times: Sequence[Figures]) -> str:
    return folded("As a table", _table(caption, (unit,), figures, times))


def _table(caption: str, names: Sequence[str], figures: Sequence[str], rows: Sequence[Figures]) -> str:
    return table(caption, {name: _HEADS[name] for name in names}, {name: _HEADS[name] for name in figures}, rows)

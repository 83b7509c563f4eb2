"""The tables of "Beside peers" in docs/performance.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .measures import Measured
from .sides import BASE, Peer, Side

__all__ = ["as_markdown", "table"]

MIB = 2**20
DELIVERING = (
    *("speed of a drain", "processor time of the worker", "processor time of the server"),
    *("lateness p50", "lateness p99", "messages delivered"),
)
WAITING = (
    *("server's memory for a message", "worker's memory"),
    *("commands a second", "processor load of the worker", "processor load of the server"),
)


def as_markdown(measured: Mapping[Side, Measured], left_out: Mapping[Peer, str], around: Mapping[str, str]) -> str:
    """Return the tables, the failures, the peers that were left out, and the conditions.

    Args:
        measured: The figures of each side. The base is one of them.
        left_out: Why a peer was not measured.
        around: The machine and the versions.
    """
    base = measured[BASE]
    failures = [f"{side}: {failure}" for side, figures in measured.items() for failure in figures.failures]
    parts = [
        _table(DELIVERING, {side: _delivering(figures, base) for side, figures in measured.items()}),
        _table(WAITING, {side: _waiting(figures, base) for side, figures in measured.items()}),
        _descriptions(dict.fromkeys(side.peer for side in measured)),
        *([f"Failed: {'; '.join(failures)}."] if failures else []),
        *(f"Left out: {peer.name}, because {why}." for peer, why in left_out.items()),
        "Conditions: " + ", ".join(f"{name} {value}" for name, value in around.items()) + ".",
    ]
    return "\n\n".join(parts)


def _table(columns: Sequence[str], rows: Mapping[Side, Sequence[str]]) -> str:
    return table(("peer", "settings", *columns), [(side.peer.name, side.settings, *row) for side, row in rows.items()])


def _descriptions(peers: Iterable[Peer]) -> str:
    return table(
        ("peer", "best settings", "cancel of a pending message"),
        [(peer.name, peer.best, peer.cancel) for peer in peers],
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows))


def _ratio(
    ours: Mapping[int, Any], base: Mapping[int, Any], name: str, unit: str, *, is_speed: bool = False, per: float = 1.0
) -> str:
    """Return the median ratio of the rounds, with the lowest and highest, and the median of the side itself.

    Args:
        ours: The figures of the side by round.
        base: The figures of the base by round.
        name: The attribute to compare.
        unit: The unit of the side's own median.
        is_speed: True for the ratio of the speeds, from times.
        per: The divisor that gives the side's own median its unit.
    """
    if not ours:
        return "failed"
    pairs = [(getattr(ours[number], name), getattr(base[number], name)) for number in ours]
    own = f"{_short(statistics.median(value for value, _ in pairs) / per)} {unit}"
    ratios = [of_base / value if is_speed else value / of_base for value, of_base in pairs if value and of_base]
    if not ratios:
        return own
    spread = f" [{_short(min(ratios))}-{_short(max(ratios))}]" if len(ratios) > 1 else ""
    return f"{_short(statistics.median(ratios))}{spread} x ({own})"


def _short(value: float) -> str:
    """Return a number with three significant digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _delivering(figures: Measured, base: Measured) -> tuple[str, ...]:
    drains, lateness = (figures.drains, base.drains), (figures.lateness, base.lateness)
    deliveries = {f"{each.delivery}" for each in figures.drains.values()}
    deliveries |= {f"{each.delivery}" for each in figures.lateness.values()}
    return (
        _ratio(*drains, "message_us", "µs", is_speed=True),
        _ratio(*drains, "worker_us", "µs"),
        _ratio(*drains, "server_us", "µs"),
        _ratio(*lateness, "p50_ms", "ms"),
        _ratio(*lateness, "p99_ms", "ms"),
        "; ".join(sorted(deliveries)) or "failed",
    )


def _waiting(figures: Measured, base: Measured) -> tuple[str, ...]:
    idles = (figures.idles, base.idles)
    return (
        _ratio(*idles, "server_bytes", "B"),
        _ratio(*idles, "worker_bytes", "MiB", per=MIB),
        _ratio(*idles, "commands_per_s", "/s"),
        _ratio(*idles, "worker_load", "%"),
        _ratio(*idles, "server_load", "%"),
    )

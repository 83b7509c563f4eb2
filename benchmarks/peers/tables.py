"""The tables of the peers in docs/performance.md."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .measures import BACK_WITHIN_S, Measured
from .sides import BASE, Peer, Side

__all__ = ["as_markdown"]

MIB = 2**20


def as_markdown(measured: Mapping[Side, Measured], left_out: Mapping[Peer, str], around: Mapping[str, str]) -> str:
    """Return three tables, the failures, the peers that were left out, and the conditions.

    Args:
        measured: The figures of each side. The base is one of them.
        left_out: Why a peer was not measured.
        around: The machine and the versions.
    """
    base = measured[BASE]
    failures = [f"{side}: {failure}" for side, figures in measured.items() for failure in figures.failures]
    parts = [
        _table(
            (
                "drain",
                "worker's processor time",
                "server's processor time",
                "lateness p50",
                "lateness p99",
                "delivered",
            ),
            {side: _delivering(figures, base) for side, figures in measured.items()},
        ),
        _table(
            ("server's memory a message", "worker's memory", "commands a second", "worker's load", "server's load"),
            {side: _idle(figures, base) for side, figures in measured.items()},
        ),
        _table(
            ("interrupted", "run again after", "doubled", f"not back in {BACK_WITHIN_S:g} s", "redelivery", "cancel"),
            {side: _killed(side, figures) for side, figures in measured.items()},
        ),
        *([f"Failed: {'; '.join(failures)}."] if failures else []),
        *(f"Left out: {peer.name}, because {why}." for peer, why in left_out.items()),
        "Conditions: " + ", ".join(f"{name} {value}" for name, value in around.items()) + ".",
    ]
    return "\n\n".join(parts)


def _table(columns: Sequence[str], rows: Mapping[Side, Sequence[str]]) -> str:
    lines = [("peer", "settings", *columns), ("---",) * (len(columns) + 2)]
    lines += [(side.peer.name, side.settings, *cells) for side, cells in rows.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


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
    own = f"{statistics.median(value for value, _ in pairs) / per:.3g} {unit}"
    ratios = [of_base / value if is_speed else value / of_base for value, of_base in pairs if value and of_base]
    if not ratios:
        return own
    spread = f" [{min(ratios):.3g}-{max(ratios):.3g}]" if len(ratios) > 1 else ""
    return f"{statistics.median(ratios):.3g}{spread} x, {own}"


def _delivering(figures: Measured, base: Measured) -> tuple[str, ...]:
    drains, lates = (figures.drains, base.drains), (figures.lates, base.lates)
    deliveries = {f"{each.delivery}" for each in (*figures.drains.values(), *figures.lates.values())}
    return (
        _ratio(*drains, "message_us", "µs", is_speed=True),
        _ratio(*drains, "worker_us", "µs"),
        _ratio(*drains, "server_us", "µs"),
        _ratio(*lates, "p50_ms", "ms"),
        _ratio(*lates, "p99_ms", "ms"),
        "; ".join(sorted(deliveries)) or "failed",
    )


def _idle(figures: Measured, base: Measured) -> tuple[str, ...]:
    idles = (figures.idles, base.idles)
    return (
        _ratio(*idles, "server_bytes", "B"),
        _ratio(*idles, "worker_bytes", "MiB", per=MIB),
        _ratio(*idles, "commands_per_s", ""),
        _ratio(*idles, "worker_load", "%"),
        _ratio(*idles, "server_load", "%"),
    )


def _killed(side: Side, figures: Measured) -> tuple[str, ...]:
    words = (side.peer.redelivery, side.peer.cancel)
    if not figures.kills:
        return ("failed",) * 4 + words
    of = figures.kills[0]
    return (
        f"{of.interrupted} of {of.messages}",
        "not run again" if of.back_s is None else f"{of.back_s:.1f} s",
        f"{of.doubled}",
        f"{of.not_back}",
        *words,
    )

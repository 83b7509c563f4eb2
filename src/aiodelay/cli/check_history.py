"""`aiodelay check-history`: checks a recorded history against the promises of docs/guarantees.md."""

from __future__ import annotations

from pathlib import Path

import msgspec

from aiodelay import ConfigurationError
from aiodelay.core.durations import parse_duration
from aiodelay.errors import cut
from aiodelay.testing.history import Event, Limits, Report, check, content_of, read
from aiodelay.testing.history.evidence import lines_of

from .errors import FAILED, NOT_UNDERSTOOD, CommandError
from .output import print_json
from .place import Place

__all__ = ["check_history"]

MOST_TEXT = 2_000


async def check_history(
    file: Path,
    /,
    *,
    lateness: str | None = None,
    skew: str = "0ms",
    most: int = 20,
    place: Place = Place(),
) -> int:
    """Check a history that programs have recorded: was a message lost, early, late, doubled or changed?

    The command prints the fewest events that show each violation. With --store, it first reads what the store holds
    now: end the programs before. Without --store, it cannot decide whether a message was lost. The exit code is 1 if a
    promise is broken.

    Args:
        file: The file of the history.
        lateness: The longest time from the moment at which a message could run until its first run, such as 5s.
            Default: any.
        skew: The largest difference between the clocks of the store, such as the clocks of a cluster's nodes.
        most: Most violations to show.
    """
    limits = Limits(
        skew_ms=parse_duration(skew, field="skew", error=ConfigurationError),
        lateness_ms=None if lateness is None else parse_duration(lateness, field="lateness", error=ConfigurationError),
    )
    events = _events_of(file)
    if place.store:
        async with place.opened() as scheduler:
            final = await content_of(scheduler.opened_store())
        final.process = "store"
        events.append(final)
    try:
        report = check(events, limits)
    except msgspec.ValidationError as error:
        raise CommandError(f"{file} is no history: {error}", exit_code=NOT_UNDERSTOOD) from error
    _print(report, most, as_json=place.json)
    return FAILED if report.violations else 0


def _events_of(file: Path) -> list[Event]:
    try:
        events = read(file)
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror}", exit_code=NOT_UNDERSTOOD) from error
    except msgspec.ValidationError as error:
        raise CommandError(f"{file} is no history: {error}", exit_code=NOT_UNDERSTOOD) from error
    if not events:
        raise CommandError(
            f"{file} has no events: record a scheduler, as docs/testing.md shows", exit_code=NOT_UNDERSTOOD
        )
    return events


def _print(report: Report, most: int, *, as_json: bool) -> None:
    if not as_json:
        for line in report.lines(most):
            print(cut(line, MOST_TEXT))
        return
    print_json(
        {"violations": len(report.violations), "delivered": report.delivered, "undecided": report.undecided},
        *(
            {
                "rule": each.rule,
                "text": each.text,
                "ids": each.ids,
                "evidence": [line.strip() for line in lines_of(report.evidence(each))],
            }
            for each in report.violations[:most]
        ),
    )

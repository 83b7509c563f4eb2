"""`check`: check a recorded history against all rules, and show the shortest evidence of each violation.

docs/guarantees.md has the rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .events import Event, read
from .evidence import lines_of, shortest
from .rules import RULES, Limits, causes, first_runs
from .story import Story

__all__ = ["Report", "Violation", "check", "check_file"]

MOST_SHOWN = 20
"""Most violations of which a text shows the evidence."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule.

    Attributes:
        rule: The number of the rule.
        text: A sentence that says how the rule was broken.
        ids: The messages concerned.
    """

    rule: str
    text: str
    ids: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a check.

    Attributes:
        violations: The broken rules.
        undecided: The rules that this history cannot decide, each with the reason.
        operations: The number of commands with each outcome.
        delivered: The number of successful runs.
        duplicates: The number of runs of a message that had run already, or was running.
        lapses: The number of duplicates that only a lapse explains: the process was slow, but there was no fault.
        in_flight_at_faults: The number of claims that processes had when they were killed, stopped or blocked.
        lateness_ms: How late first runs started, in ms: the median, the 99th percentile, and the largest value.
    """

    violations: Sequence[Violation]
    undecided: Mapping[str, str]
    operations: Counter[str]
    delivered: int
    duplicates: int
    lapses: int
    in_flight_at_faults: int
    lateness_ms: tuple[float, float, float]
    _events: Sequence[Event]
    _limits: Limits

    def __str__(self) -> str:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.operations.items()))
        median, p99, most = self.lateness_ms
        return (
            f"{self.delivered} delivered, {self.duplicates} run again ({self.lapses} after a lapse), "
            f"{self.in_flight_at_faults} in flight at faults; commands: {outcomes or 'none'}; "
            f"late by {median:.0f} ms (median), {p99:.0f} ms (99 %), {most:.0f} ms (most); "
            f"{len(self.violations)} violations"
        )

    def evidence(self, violation: Violation) -> Sequence[Event]:
        """Return the fewest events that show a violation, in order, without other messages."""
        rule = RULES[violation.rule]

        def is_shown(events: list[Event]) -> bool:
            story = Story(events)
            return any(text == violation.text for text, *_ in rule(story, self._limits))

        return shortest(self._events, violation.ids, is_shown)

    def lines(self, most: int = MOST_SHOWN) -> Iterator[str]:
        """Yield the lines of a text: the figures, the undecided rules, and each violation with its evidence.

        Args:
            most: Most violations to show.
        """
        yield str(self)
        yield from (f"{rule} is not decided: {reason}" for rule, reason in self.undecided.items())
        for violation in self.violations[:most]:
            yield str(violation)
            yield from lines_of(self.evidence(violation))
        if len(self.violations) > most:
            yield f"and {len(self.violations) - most} more violations"

    def verify(self) -> None:
        """Raise AssertionError if a rule is broken. The message shows the evidence."""
        if not self.violations and self.duplicates - self.lapses > self.in_flight_at_faults:
            raise AssertionError(str(self))
        if self.violations:
            raise AssertionError("\n".join(self.lines()))


def check(events: Iterable[Event], limits: Limits | None = None) -> Report:
    """Check a history against all rules, as far as the history allows.

    Args:
        events: The events, in order, as `read` returns them.
        limits: Limits in addition to the rules that always hold.

    Raises:
        msgspec.ValidationError: An event does not follow from the events before it, such as an answer without a call.
    """
    events = list(events)
    story, limits = Story(events), limits or Limits()
    found = [
        Violation(rule, text, tuple(ids)) for rule, broken in RULES.items() for text, *ids in broken(story, limits)
    ]
    duplicates = causes(story, limits)
    in_flight = sum(story.in_flight(fault) for fault in story.faults) + sum(each.is_in_doubt for each in story.leases)
    return Report(
        found,
        _undecided(story, limits),
        Counter(operation.outcome for operation in story.operations),
        sum(attempt.result == "ok" for attempt in story.attempts),
        len(duplicates),
        duplicates.count("lapse"),
        in_flight + len(story.doubled),
        _lateness(story),
        events,
        limits,
    )


def check_file(path: str | Path, limits: Limits | None = None) -> Report:
    """Check the history in a file, as `check` does.

    Raises:
        OSError: The file cannot be read.
        msgspec.ValidationError: The file is no history.
    """
    return check(read(path), limits)


def _undecided(story: Story, limits: Limits) -> dict[str, str]:
    no_end = "the history does not say what the store held in the end"
    found = dict.fromkeys(("S2", "L1", "L4"), no_end) if story.final is None else {}
    if story.moved and "S2" not in found:
        lanes = ", ".join(sorted(story.moved))
        found["S2"] = f"the store itself has moved messages of {lanes}, and does not name them"
    if not limits.in_order:
        found["S9"] = "between claims and for messages due at once: no lanes are given that have one order"
    asked = {"B2": limits.p99_ms, "L2": limits.lateness_ms, "L3": limits.lane_lateness_ms, "L5": limits.poison}
    found |= {rule: "no limit is given" for rule, limit in asked.items() if limit is None or limit == {}}
    if not story.resources:
        found["R1"] = "the history counts no resources"
    return found


def _lateness(story: Story) -> tuple[float, float, float]:
    late = sorted(max(late_ms, 0.0) for _, late_ms in first_runs(story))
    if not late:
        return 0.0, 0.0, 0.0
    return late[(len(late) - 1) // 2], late[-(-99 * len(late) // 100) - 1], late[-1]

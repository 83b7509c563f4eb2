"""F1, F2: kill -9 at every named failure point; then another process finishes the work, and the history is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.programs.worker import Burst, Plan
from tests.support.checker import Limits
from tests.support.judging import judge, url_of
from tests.support.observed import FailurePoint
from tests.support.processes import Crew

LEASE_MS = 1_000
TAKEOVER_MS = LEASE_MS + 1_000 + 10_000
"""What is promised, and what a busy machine may add."""


def plan_of(crew: Crew, path: Path, name: str, **settings: object) -> Plan:
    return Plan(name=name, store=url_of(path), history=str(crew.history_path), lease_ms=LEASE_MS, **settings)  # type: ignore[arg-type]


POINTS = [
    # F2: before anything was sent
    FailurePoint("apply", "before", 2),
    FailurePoint("apply", "after", 1),
    FailurePoint("apply", "after", 3),
    FailurePoint("apply statement", "before", 3),
    FailurePoint("apply commit", "before", 2),
    FailurePoint("apply commit", "after", 2),
    FailurePoint("claim", "after", 3),
    FailurePoint("claim begin", "after", 12),
    FailurePoint("claim statement", "before", 60),
    FailurePoint("tidy", "before", 1),
    FailurePoint("tidy", "after", 1),
    # F1: after
    FailurePoint("handler", "before", 20),
    FailurePoint("handler", "after", 20),
    FailurePoint("settle", "before", 3),
    FailurePoint("settle", "after", 3),
    FailurePoint("settle statement", "before", 9),
    FailurePoint("settle commit", "before", 3),
    FailurePoint("settle commit", "after", 3),
]


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_f1_f2_a_kill_loses_nothing_and_repeats_only_what_was_in_flight(
    crew: Crew, path: Path, point: FailurePoint
) -> None:
    burst = Burst(messages=60, spread_ms=600, changes=True)
    victim = crew.start(
        "worker", plan_of(crew, path, "victim", point=point, serve=("work",), burst=burst), name="victim"
    )
    heir = crew.start("worker", plan_of(crew, path, "heir", serve=("work",), waits=True), name="heir")
    assert victim.wait() == -9, "the failure point was not reached"
    heir.tell("go")
    heir.ended_well()
    report = judge(crew, path, Limits(takeover_ms=TAKEOVER_MS))
    assert report.duplicates <= report.in_flight_at_faults

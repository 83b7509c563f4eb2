"""F41: SIGTERM under load: claiming stops, messages in flight end or go back, nothing is lost or runs twice."""

from __future__ import annotations

from typing import Any

import pytest

from aiodelay.testing.history import Limits
from tests.faults.programs.worker import Burst, Stream
from tests.faults.scene import Scene

LONG_LEASE_MS = 60_000
"""What had to lapse would keep the heir from ending in time."""
UNHURRIED: dict[str, Any] = {"serve": ("work",), "lease_ms": LONG_LEASE_MS, "is_patient": True}
UNHARMED = Limits(lapses=False)


@pytest.mark.parametrize("how", [pytest.param("program", marks=pytest.mark.nightly), "aiodelay run"])
def test_f41_sigterm_under_load_loses_nothing_and_repeats_nothing(any_scene: Scene, how: str) -> None:
    burst = Burst(messages=300, spread_ms=3_000, special={60: b"end"})
    any_scene.start("producer", burst=burst, until="produced").ended_well()
    start = any_scene.start if how == "program" else any_scene.start_command
    start("worker", run_ms=100, concurrency=16, until="sigterm", **UNHURRIED).ended_well()
    any_scene.start("heir", concurrency=50, **UNHURRIED).ended_well()
    report = any_scene.judge(UNHARMED)
    assert (report.delivered, report.duplicates) == (300, 0)
    at_work = {attempt.start.process for attempt in any_scene.story().attempts}
    assert at_work == {"worker", "heir"}, "it ended in the middle of its work"


def test_f41_what_does_not_end_within_the_drain_time_is_given_back_at_once(any_scene: Scene) -> None:
    burst = Burst(messages=40, spread_ms=0)
    worker = any_scene.start("worker", burst=burst, run_ms=120_000, drain_ms=300, until="sigterm", **UNHURRIED)
    worker.line("running")
    worker.terminate()
    worker.ended_well()
    any_scene.start("heir", **UNHURRIED).ended_well()
    report = any_scene.judge(UNHARMED)
    assert report.delivered == 40
    story = any_scene.story()
    cut_off = [attempt for attempt in story.attempts if attempt.result == "cancelled"]
    assert len(cut_off) == 8
    assert {attempt.start.attempt for attempt in story.attempts} == {1}, "to be cut off costs no attempt"


def test_f41_sigterm_while_others_schedule_and_deliver(any_scene: Scene) -> None:
    """Workers come and go in good order all the time: that costs nothing, not even one duplicate."""
    flow = Stream(seconds=4, rate=80, ids=100, seed=1, until_told=True)
    producer = any_scene.start("producer", stream=flow, until="produced")
    producer.line("ready")
    for number in range(3):
        worker = any_scene.start(f"w{number}", run_ms=100, until="sigterm", **UNHURRIED)
        worker.line("run 20")
        worker.terminate()
        worker.ended_well()
    producer.terminate()
    producer.ended_well()
    any_scene.start("heir", **UNHURRIED).ended_well()
    report = any_scene.judge(UNHARMED)
    assert report.duplicates == 0

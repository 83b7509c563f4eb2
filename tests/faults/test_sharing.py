"""S7: two processes share the due messages about equally, and no message goes to both."""

from __future__ import annotations

from collections import Counter

from aiodelay.testing.history import Limits
from tests.faults.programs.worker import Burst
from tests.faults.scene import Scene

MESSAGES = 600


def test_s7_two_processes_share_hundreds_of_messages_and_none_is_run_twice(any_scene: Scene) -> None:
    workers = [any_scene.start(name, serve=("work",), run_ms=50, waits=True, lease_ms=15_000) for name in ("a", "b")]
    for worker in workers:
        worker.line("waiting")
    any_scene.start("producer", burst=Burst(messages=MESSAGES, spread_ms=0), until="produced").ended_well()
    for worker in workers:
        worker.tell("go")
    for worker in workers:
        worker.ended_well()
    report = any_scene.judge(Limits(lapses=False))
    assert (report.delivered, report.duplicates) == (MESSAGES, 0)
    starts = {
        name: [a.start.at_ns for a in any_scene.story().attempts if a.start.process == name] for name in ("a", "b")
    }
    assert all(starts.values()), "one of them ran nothing"
    begins = max(map(min, starts.values()))  # before, one of them was not at work yet
    ends = min(map(max, starts.values()))
    shares = Counter(name for name, times in starts.items() for at_ns in times if begins <= at_ns <= ends)
    assert all(0.3 <= share / shares.total() <= 0.7 for share in shares.values()), shares

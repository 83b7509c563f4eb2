"""S7: two processes share what is due, about equally, and no message comes to both."""

from __future__ import annotations

from collections import Counter

from tests.faults.programs.worker import Burst
from tests.faults.scene import Scene
from tests.support.checker import Limits


def test_s7_two_processes_share_a_thousand_messages_and_none_is_run_twice(any_scene: Scene) -> None:
    workers = [any_scene.start(name, serve=("work",), run_ms=50, waits=True, lease_ms=15_000) for name in ("a", "b")]
    for worker in workers:
        worker.line("waiting")
    any_scene.start("producer", burst=Burst(messages=1_000, spread_ms=0), until="produced").ended_well()
    for worker in workers:
        worker.tell("go")
    for worker in workers:
        worker.ended_well()
    report = any_scene.judge(Limits(lapses=False))
    assert (report.delivered, report.duplicates) == (1_000, 0)
    shares = Counter(attempt.start.process for attempt in any_scene.story().attempts)
    assert all(300 <= share <= 700 for share in shares.values()), shares

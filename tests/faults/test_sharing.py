"""S7: two processes share the due messages about equally, and no message goes to both."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from aiodelay.testing.history import Attempt, Limits
from tests.faults.programs.worker import Burst
from tests.faults.scene import Scene
from tests.support.processes import PATIENCE_S
from tests.support.waiting import until_sync

MESSAGES = 600
SLICE_S = 0.2
MOST_ROUNDS = 10


def test_s7_two_processes_share_hundreds_of_messages_and_none_is_run_twice(any_scene: Scene) -> None:
    """A process that stands still leaves its share to the other one: only times in which both begin runs count."""
    settings: dict[str, Any] = {"serve": ("work",), "run_ms": 50, "lease_ms": 60_000, "is_patient": True}
    workers = [any_scene.start(name, until="sigterm", **settings) for name in ("a", "b")]
    for worker in workers:
        worker.line("ready")
    shares: Counter[str] = Counter()
    scheduled = 0
    while shares.total() < MESSAGES // 2:
        assert scheduled < MOST_ROUNDS * MESSAGES, "they hardly ever work at the same time"
        burst = Burst(messages=MESSAGES, spread_ms=0, prefix=f"m{scheduled}")
        any_scene.start(f"producer of {burst.prefix}", burst=burst, until="produced").ended_well()
        scheduled += MESSAGES
        until_sync(lambda: len(any_scene.story().attempts) >= scheduled, "all have begun", PATIENCE_S)  # noqa: B023
        shares = shared(any_scene.story().attempts)
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.ended_well()
    report = any_scene.judge(Limits(lapses=False))
    assert (report.delivered, report.duplicates) == (scheduled, 0)
    assert all(0.3 <= share / shares.total() <= 0.7 for share in shares.values()), shares


def shared(attempts: Sequence[Attempt]) -> Counter[str]:
    """Return how many runs each process has begun in those slices of time in which all of them have begun some."""
    slices: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for each in attempts:
        slices[int(each.start.at_ns / (SLICE_S * 1e9))][each.start.process] += 1
    return sum((each for each in slices.values() if len(each) == 2), Counter())

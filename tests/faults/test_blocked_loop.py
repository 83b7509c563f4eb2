"""F4: a handler blocks its event loop for longer than a lease; the other process takes over what lapsed.

L5: if it does so in each process that takes it, it is not taken for a killer, and is delivered.
"""

from __future__ import annotations

from tests.faults.programs.worker import Burst
from tests.faults.scene import TAKEOVER_MS, Scene
from tests.support.checker import Limits

BLOCKED_MS = 4_000


def test_f4_what_a_blocked_process_holds_is_taken_over_and_afterwards_both_work(any_scene: Scene) -> None:
    burst = Burst(messages=240, spread_ms=6_000, special={25: f"block:{BLOCKED_MS}".encode()})
    blocked = any_scene.start("blocked", serve=("work",), burst=burst, run_ms=100, blocks=True, waits=True)
    other = any_scene.start("other", serve=("work",), run_ms=100, waits=True)
    other.line("waiting")
    blocked.tell("go")
    blocked.line("blocking")
    other.tell("go")
    blocked.ended_well()
    other.ended_well()
    report = any_scene.judge(Limits(takeover_ms=TAKEOVER_MS))
    assert report.duplicates >= 1, "nothing was in flight, so nothing was tested"
    assert "the event loop ran " in blocked.errors
    story = any_scene.story()
    freed_ns = story.faults[0].at_ns + BLOCKED_MS * 1_000_000
    at_work_since = {attempt.start.process for attempt in story.attempts if attempt.start.at_ns > freed_ns}
    assert at_work_since == {"blocked", "other"}


def test_l5_who_blocks_the_loop_of_each_process_for_many_leases_is_delivered(any_scene: Scene) -> None:
    burst = Burst(messages=1, spread_ms=0, special={0: b"hog:6000"})
    any_scene.start("producer", burst=burst, until="produced").ended_well()
    workers = [any_scene.start(f"w{i}", serve=("work",)) for i in range(2)]
    for worker in workers:
        worker.ended_well()
    any_scene.judge(Limits(takeover_ms=TAKEOVER_MS))
    assert any(attempt.result == "ok" for attempt in any_scene.story().attempts)

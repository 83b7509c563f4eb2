"""Overload of a real store: ten times as many messages come as a handler can run, and then no more."""

from __future__ import annotations

import msgspec

from aiodelay.engine.delivery.claim_ahead import MOST_AHEAD
from tests.faults.programs.overload import CONCURRENCY, PAYLOAD_BYTES, STORE_TIMEOUT_MS, Plan, Result
from tests.faults.scene import Scene

ALL_S = 240.0
SLACK_BYTES = 16 << 20
"""The most by which the memory of the process may grow in the second half of the load."""


def test_l3_l4_an_overload_waits_in_the_store_and_not_in_the_process(any_scene: Scene) -> None:
    plan = Plan(any_scene.url)
    process = any_scene.crew.start("overload", plan, name="overload", forks=False)  # its memory is measured
    result = msgspec.json.decode(process.line("result", ALL_S), type=Result)
    process.ended_well()
    print(result)
    assert result.waiting >= 0.9 * result.stored, "the load was ten times too high"
    assert result.waiting // 2 * PAYLOAD_BYTES > 2 * SLACK_BYTES, "the memory would show a backlog in the process"
    assert result.grown_bytes < SLACK_BYTES
    most = CONCURRENCY + MOST_AHEAD
    assert result.most_in_flight <= most
    assert result.displaced <= most, "oldest first"
    assert result.busy > 0
    assert result.waited_ms >= STORE_TIMEOUT_MS
    assert result.delivered_though_busy == 0
    assert result.lost == 0, "after the load, each stored message is delivered"

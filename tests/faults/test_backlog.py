"""F36: a big backlog after an outage is delivered oldest first, each message once, in memory bounded by demand."""

from __future__ import annotations

import msgspec
import pytest

from tests.faults.programs.backlog import SPAN_MS, Plan, Result
from tests.faults.scene import Scene

MOST_BYTES = 110 << 20
"""The page caches of two SQLite connections, 32 MiB each, and room; 100,000 messages take twice as much."""
MOST_BLOCKS = 60_000
"""20,000 messages at once would take 200,000 and more."""


@pytest.mark.parametrize("messages", [20_000, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_f36_a_big_backlog_is_delivered_oldest_first_in_bounded_memory(any_scene: Scene, messages: int) -> None:
    fill = Plan(what="fill", store=any_scene.url, messages=messages)
    any_scene.crew.start("backlog", fill, name="fill").ended_well()
    drain = Plan(what="drain", store=any_scene.url, messages=messages)
    process = any_scene.crew.start("backlog", drain, name="drain", forks=False)  # its memory is measured
    result = msgspec.json.decode(process.line("result"), type=Result)
    process.ended_well()
    print(result)
    assert (result.runs, result.different) == (messages, messages)
    in_flight_ms = SPAN_MS // messages * drain.concurrency
    assert result.displaced_ms <= 2 * in_flight_ms
    assert result.grown_bytes < MOST_BYTES
    assert result.grown_blocks < MOST_BLOCKS

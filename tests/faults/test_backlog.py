"""F36: 100,000 messages that came due during an outage: oldest first, each once, in memory bounded by demand."""

from __future__ import annotations

import msgspec

from tests.faults.programs.backlog import SPAN_MS, Plan, Result
from tests.faults.scene import Scene

MESSAGES = 100_000
MOST_BYTES = 110 << 20
"""The page caches of two SQLite connections, 32 MiB each, and room; all messages at once would take twice as much."""
MOST_BLOCKS = 60_000
"""All messages at once would take a million and more."""


def test_f36_a_big_backlog_is_delivered_oldest_first_in_bounded_memory(any_scene: Scene) -> None:
    fill = Plan(what="fill", store=any_scene.url, messages=MESSAGES)
    any_scene.crew.start("backlog", fill, name="fill").ended_well()
    drain = Plan(what="drain", store=any_scene.url, messages=MESSAGES)
    process = any_scene.crew.start("backlog", drain, name="drain")
    result = msgspec.json.decode(process.line("result"), type=Result)
    process.ended_well()
    print(result)
    assert (result.runs, result.different) == (MESSAGES, MESSAGES)
    in_flight_ms = SPAN_MS // MESSAGES * drain.concurrency
    assert result.displaced_ms <= 2 * in_flight_ms
    assert result.grown_bytes < MOST_BYTES
    assert result.grown_blocks < MOST_BLOCKS

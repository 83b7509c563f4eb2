"""BK9: the lateness of healthy messages among refused messages, compared with a run without refused messages."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from functools import partial

from aiodelay import Message, Scheduler
from tests.support.kafka import create_topic, new_name

from .bk5_kafka_lateness import AHEAD_S, paced
from .harness import Benchmark, Goal, Plan, Row, check, in_turn, quantile
from .lateness import PER_S, SPAN_S

__all__ = ["BENCHMARK"]

LARGE, LARGE_BYTES, LIMIT = 100, 5_000, 2_000
GOAL = Goal("at most", 1.2)
POLL_S = 0.1
LONGEST_S = 60.0


def run(plan: Plan) -> list[Row]:
    n, large = plan.size(round(PER_S * SPAN_S)), plan.size(LARGE)
    p99 = in_turn(plan, {"control": partial(_p99, plan, n, 0), "beside": partial(_p99, plan, n, large)})
    what = f"Kafka -> Kafka: {n:,} messages at {PER_S}/s beside {large} that are too large, p99 of the lateness"
    beside = f"{quantile(p99['beside'], 0.5):.1f} ms, without the large messages {quantile(p99['control'], 0.5):.1f} ms"
    values = tuple(a / b for a, b in zip(p99["beside"], p99["control"], strict=True))
    return [Row("BK9", what, "x lateness without the large messages", values, GOAL, beside)]


def _p99(plan: Plan, n: int, large: int) -> float:
    return quantile(plan.run(healthy(plan, n, large)), 0.99)


async def healthy(plan: Plan, n: int, large: int) -> list[float]:
    """Move healthy messages, and messages that their topic refuses. Return the lateness of healthy messages, in ms."""
    small = await create_topic(plan.kafka, new_name("small"), max_message_bytes=LIMIT)
    async with paced(plan, n) as (owner, lateness_ms):
        since, span_s = datetime.now(UTC) + timedelta(seconds=AHEAD_S), SPAN_S * plan.scale
        await owner.schedule_many(
            Message(b"x" * LARGE_BYTES, at=since + timedelta(seconds=span_s * i / large), to=f"kafka:{small}")
            for i in range(large)
        )
        async with asyncio.timeout(LONGEST_S):
            while await _dead(owner) < large:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(POLL_S)
    check(len(lateness_ms) == n, f"{len(lateness_ms)} of {n} healthy messages came")
    return list(lateness_ms.values())


async def _dead(owner: Scheduler) -> int:
    return sum(each.dead for each in (await owner.counts()).values())


BENCHMARK = Benchmark("BK9", "messages that their Kafka topic never takes", run, needs_kafka=True)

"""BF12: the processor time of a storm."""

from __future__ import annotations

import statistics
import time
from datetime import timedelta

from aiodelay import Context, Scheduler
from aiodelay.testing import storm

from .harness import Benchmark, Goal, Order, Plan, Row, check, order

__all__ = ["BENCHMARK"]

MESSAGES, SEEDS = 10, 200
CALM_RUNS = 2
GOAL = Goal("at most", 5)


def run(plan: Plan) -> list[Row]:
    seeds = plan.size(SEEDS)
    seconds = tuple(storm_s(seeds) for _ in range(plan.runs))
    what = f"`@storm`: {MESSAGES} messages to a handler, {seeds} seeds"
    beside = f"{1000 * statistics.median(seconds) / (seeds + CALM_RUNS):.0f} ms a run"
    return [Row("BF12", what, "s of processor time", seconds, GOAL, beside)]


def storm_s(seeds: int) -> float:
    """Run a test with a correct handler in a storm. Return the processor time in seconds. No run waits in real time."""
    runs = deliveries = 0

    @storm(seeds=seeds)
    async def each_order_is_booked(scheduler: Scheduler) -> list[int]:
        nonlocal runs
        runs += 1
        booked: dict[str, int] = {}

        @scheduler.handler
        async def book(event: Order, context: Context) -> None:
            nonlocal deliveries
            deliveries += 1
            booked.setdefault(context.delivery_id, event.number)

        async with scheduler:
            for number in range(MESSAGES):
                await scheduler.schedule(order(number), delay=timedelta(seconds=number + 1), id=f"order-{number}")
            await scheduler.run_until_idle()
        return sorted(booked.values())

    began = time.process_time()
    each_order_is_booked()
    took = time.process_time() - began
    check(runs == seeds + CALM_RUNS, f"{runs} runs, not {seeds + CALM_RUNS}")
    check(deliveries >= MESSAGES * runs, "not all messages were delivered")
    check(seeds < SEEDS or deliveries > MESSAGES * runs, "no delivery was repeated")
    return took


BENCHMARK = Benchmark("BF12", "storms", run)

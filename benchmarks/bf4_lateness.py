"""BF4: how late messages of a SQLite file begin, beside timers of the loop."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from aiodelay import Context, Scheduler
from aiodelay.sqlite import SqliteStore

from .harness import Benchmark, Goal, Order, Plan, Row, check, check_once_each, order, quantile

__all__ = ["BENCHMARK"]

PER_S = 200
SPAN_S = 20.0
DELAYS_S = (1.0, 10.0)
GOALS = {0.5: Goal("at most", 1.0), 0.99: Goal("at most", 3.0)}


class Lateness(NamedTuple):
    """Of each message, in ms."""

    ours: list[float]
    bare: list[float]


def run(plan: Plan) -> list[Row]:
    rounds = [plan.run(measure(plan.directory / f"bf4-{number}.db", plan.scale)) for number in range(plan.runs)]
    n = len(rounds[0].ours)
    rows = []
    for part, goal in GOALS.items():
        ours = [quantile(lateness.ours, part) for lateness in rounds]
        bare = [quantile(lateness.bare, part) for lateness in rounds]
        what = f"SQLite: p{part * 100:.0f} of the lateness of {n:,} messages at {PER_S}/s, above that of bare timers"
        beside = f"{quantile(ours, 0.5):.2f} ms, bare {quantile(bare, 0.5):.2f} ms"
        rows.append(Row("BF4", what, "ms", tuple(o - b for o, b in zip(ours, bare, strict=True)), goal, beside))
    return rows


async def measure(file: Path, scale: float) -> Lateness:
    """Schedule messages and set timers, one of each every 5 ms, with the same range of delays."""
    loop = asyncio.get_running_loop()
    n = max(1, round(PER_S * SPAN_S * scale))
    chance = random.Random(n)
    due_ns: dict[int, int] = {}
    begun: list[tuple[int, int]] = []
    bare: list[float] = []
    all_begun, all_rung = loop.create_future(), loop.create_future()
    scheduler = Scheduler(SqliteStore(file))

    @scheduler.handler(timeout="30s")
    async def handle(event: Order, context: Context) -> None:
        begun.append((event.number, time.time_ns()))
        if len(begun) == n:
            all_begun.set_result(None)

    def ring(lateness_ms: float) -> None:
        bare.append(lateness_ms)
        if len(bare) == n:
            all_rung.set_result(None)

    async def schedule(number: int, delay_s: float) -> None:
        scheduled = await scheduler.schedule(order(number), delay=timedelta(seconds=delay_s))
        due_ns[number] = scheduled.due_ms * 1_000_000

    async with scheduler, asyncio.TaskGroup() as tasks:
        since = loop.time()
        for number in range(n):
            await asyncio.sleep(max(0.0, since + number / PER_S - loop.time()))
            set_timer(loop, _delay_s(chance, scale), ring)
            tasks.create_task(schedule(number, _delay_s(chance, scale)))
        await all_begun
        await all_rung
    check_once_each((number for number, _ in begun), n)
    ours = [(at_ns - due_ns[number]) / 1e6 for number, at_ns in begun]
    check(min(ours) >= 0, f"a message began {-min(ours):.3f} ms early")
    return Lateness(ours, bare)


def _delay_s(chance: random.Random, scale: float) -> float:
    return chance.uniform(*DELAYS_S) * scale


def set_timer(loop: asyncio.AbstractEventLoop, delay_s: float, note: Callable[[float], None]) -> None:
    """The bare limit: a timer of the loop that lives in this process alone."""
    due_ns = time.time_ns() + round(delay_s * 1e9)
    loop.call_at(loop.time() + delay_s, lambda: note((time.time_ns() - due_ns) / 1e6))


BENCHMARK = Benchmark("BF4", "lateness", run)

"""BF5: the processor time of an idle process."""

from __future__ import annotations

import asyncio
import time

from aiodelay import Message, Scheduler
from aiodelay.memory import MemoryStore
from aiodelay.ports import Store
from aiodelay.sqlite import SqliteStore

from .harness import Benchmark, Goal, Order, Plan, Row, check, order

__all__ = ["BENCHMARK"]

PENDING = 10_000
SPAN_S = 20.0
OPENING_S = 2.0
GOAL = Goal("at most", 0.5)


def run(plan: Plan) -> list[Row]:
    n, span_s = plan.size(PENDING), SPAN_S * plan.scale
    stores: dict[str, Store] = {"SQLite": SqliteStore(plan.directory / "bf5.db"), "memory": MemoryStore()}
    rows = []
    for name, store in stores.items():
        plan.run(fill(store, n))
        loads = tuple(plan.run(idle(store, span_s)) for _ in range(plan.runs))
        what = f"{name}: processor time while idle, {n:,} messages pending, due far ahead"
        rows.append(Row("BF5", what, "% of a core", loads, GOAL, f"all threads together, over {span_s:g} s"))
    return rows


async def fill(store: Store, n: int) -> None:
    async with Scheduler(store, dispatch=False) as producer:
        stored = await producer.schedule_many(Message(order(i), delay="30d") for i in range(n))
    check(stored == n, "not all were scheduled")


async def idle(store: Store, span_s: float) -> float:
    """Dispatch for a time without messages. Return the processor time of all threads, in % of one core."""
    delivered: list[int] = []
    scheduler = Scheduler(store)

    @scheduler.handler(timeout="30s")
    async def handle(event: Order) -> None:
        delivered.append(event.number)

    async with scheduler:
        await asyncio.sleep(min(OPENING_S, span_s))
        since, used = time.perf_counter(), time.process_time()
        await asyncio.sleep(span_s)
        load = (time.process_time() - used) / (time.perf_counter() - since)
    check(not delivered, "a message was delivered early")
    return load * 100


BENCHMARK = Benchmark("BF5", "idle", run)

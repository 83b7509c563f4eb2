"""BF1: the rate at which due messages of the memory store reach a handler."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator
from datetime import UTC, datetime

from aiodelay import Context, Message, Scheduler
from aiodelay.memory import MemoryStore

from .harness import (
    DEFAULT_CONCURRENCY,
    Benchmark,
    Goal,
    Order,
    Plan,
    Row,
    Stopwatch,
    check,
    check_once_each,
    in_turn,
    number_of,
    order,
    per_message_us,
    ratios,
    raw_payload,
)

__all__ = ["BENCHMARK"]

MESSAGES = 100_000
CONCURRENCY = 500
BARE_SLICE = 500
GOAL = Goal("at least", 0.5)


def run(plan: Plan) -> list[Row]:
    n = plan.size(MESSAGES)
    times = in_turn(
        plan,
        {
            "bare loop": lambda: plan.run(bare(n, at_once=n)),
            "bare loop in slices": lambda: plan.run(bare(n, at_once=BARE_SLICE)),
            "typed": lambda: plan.run(typed(n, CONCURRENCY)),
            "bytes": lambda: plan.run(untyped(n, CONCURRENCY)),
            "typed 16": lambda: plan.run(typed(n, DEFAULT_CONCURRENCY)),
        },
    )

    def row(what: str, ours: str, limit: str, goal: Goal | None) -> Row:
        beside = f"{per_message_us(times[ours], n)} a message, {limit} {per_message_us(times[limit], n)}"
        return Row("BF1", what, f"x speed of the {limit}", ratios(times[limit], times[ours]), goal, beside)

    of = f"memory: {n:,} messages due at once, to an empty handler"
    return [
        row(f"{of} of typed events, concurrency {CONCURRENCY}", "typed", "bare loop", GOAL),
        row(f"{of} of bytes, concurrency {CONCURRENCY}", "bytes", "bare loop", GOAL),
        row(f"{of} of typed events, concurrency {DEFAULT_CONCURRENCY} (default)", "typed 16", "bare loop", None),
        row(f"{of} of typed events, concurrency {CONCURRENCY}", "typed", "bare loop in slices", None),
    ]


async def bare(n: int, *, at_once: int) -> float:
    """Measure the bare limit: a heap, a task per message, strong references, and a wait for all of them.

    Args:
        n: Number of messages.
        at_once: Number of tasks that are created before they may run. A plain loop uses `n`. Then all tasks live at
            the same time, and the garbage collector takes half of the time.
    """
    heap = [(1, number, raw_payload(number)) for number in range(n)]
    heapq.heapify(heap)
    now_ms = 1
    delivered: list[int] = []

    async def handle(number: int, payload: bytes) -> None:
        delivered.append(number)

    with Stopwatch() as watch:
        loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        while heap and heap[0][0] <= now_ms:
            _, number, payload = heapq.heappop(heap)
            task = loop.create_task(handle(number, payload))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if len(tasks) >= at_once:
                await asyncio.sleep(0)
        while tasks:  # noqa: ASYNC110 - `asyncio.wait` costs another callback per task
            await asyncio.sleep(0)
    check_once_each(delivered, n)
    return watch.seconds


async def typed(n: int, concurrency: int) -> float:
    """Measure our side, from the open of the scheduler to its close, with all messages settled."""
    at = datetime.now(UTC)
    store, scheduler, delivered, all_delivered = await _loaded(n, (Message(order(i), at=at) for i in range(n)))

    @scheduler.handler(concurrency=concurrency, timeout="30s")
    async def handle(event: Order, context: Context) -> None:
        _ = context.attempt, context.lateness
        delivered.append(event.number)
        if len(delivered) == n:
            all_delivered.set_result(None)

    return await _drained(store, scheduler, delivered, all_delivered, n)


async def untyped(n: int, concurrency: int) -> float:
    """Measure our side with a handler of bytes."""
    at = datetime.now(UTC)
    messages = (Message(raw_payload(i), at=at, to="handler:raw") for i in range(n))
    store, scheduler, delivered, all_delivered = await _loaded(n, messages)

    @scheduler.handler(concurrency=concurrency, timeout="30s", name="raw")
    async def handle(payload: bytes, context: Context) -> None:
        _ = context.attempt, context.lateness
        delivered.append(number_of(payload))
        if len(delivered) == n:
            all_delivered.set_result(None)

    return await _drained(store, scheduler, delivered, all_delivered, n)


async def _loaded(
    n: int, messages: Iterator[Message]
) -> tuple[MemoryStore, Scheduler, list[int], asyncio.Future[None]]:
    store = MemoryStore()
    async with Scheduler(store, dispatch=False) as producer:
        check(await producer.schedule_many(messages) == n, "not all were scheduled")
    return store, Scheduler(store), [], asyncio.get_running_loop().create_future()


async def _drained(
    store: MemoryStore, scheduler: Scheduler, delivered: list[int], all_delivered: asyncio.Future[None], n: int
) -> float:
    with Stopwatch() as watch:
        async with scheduler:
            await all_delivered
    check_once_each(delivered, n)
    check(not await store.counts(), "something is left in the store")
    return watch.seconds


BENCHMARK = Benchmark("BF1", "dispatch from memory", run)

"""For BF4 and BP4: the lateness of messages, compared with timers of the same loop."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from datetime import timedelta
from typing import NamedTuple

from aiodelay import Context, Scheduler
from aiodelay.ports import Store

from .harness import Goal, Order, Row, check, check_once_each, order, quantile

__all__ = ["DELAYS_S", "PER_S", "SPAN_S", "Lateness", "check_all", "measure", "rows_of"]

PER_S = 200
SPAN_S = 20.0
DELAYS_S = (1.0, 10.0)


class Lateness(NamedTuple):
    """The numbers of delivered messages, and the lateness of each message and each timer, in ms."""

    begun: list[int]
    ours: list[float]
    bare: list[float]


async def measure(
    store: Store,
    numbers: Sequence[int],
    per_s: float,
    scale: float,
    beside: Callable[[Scheduler], AbstractAsyncContextManager[None]] = lambda _: nullcontext(),
) -> Lateness:
    """Schedule `per_s` messages and set `per_s` timers a second, with the same range of delays.

    Args:
        store: The store. If other processes share it, this process may deliver messages of other processes.
        numbers: The numbers of the messages.
        per_s: Messages in a second.
        scale: Part of the full delays.
        beside: Other work in this process.
    """
    loop = asyncio.get_running_loop()
    chance = random.Random(len(numbers))
    begun, ours, bare = list[int](), list[float](), list[float]()
    all_rung = loop.create_future()
    scheduler = Scheduler(store)

    @scheduler.handler(timeout="30s")
    async def handle(event: Order, context: Context) -> None:
        ours.append(time.time_ns() / 1e6 - round(context.due.timestamp() * 1000))
        begun.append(event.number)

    def ring(lateness_ms: float) -> None:
        bare.append(lateness_ms)
        if len(bare) == len(numbers):
            all_rung.set_result(None)

    async with scheduler, beside(scheduler), asyncio.TaskGroup() as tasks:
        since = loop.time()
        for at, number in enumerate(numbers):
            await asyncio.sleep(max(0.0, since + at / per_s - loop.time()))
            set_timer(loop, _delay_s(chance, scale), ring)
            delay = timedelta(seconds=_delay_s(chance, scale))
            tasks.create_task(scheduler.schedule(order(number), delay=delay))
        await all_rung
        await scheduler.run_until_idle()
    return Lateness(begun, ours, bare)


def _delay_s(chance: random.Random, scale: float) -> float:
    return chance.uniform(*DELAYS_S) * scale


def set_timer(loop: asyncio.AbstractEventLoop, delay_s: float, note: Callable[[float], None]) -> None:
    """Set the timer of the bare limit: a timer of the loop, in this process alone."""
    due_ns = time.time_ns() + round(delay_s * 1e9)
    loop.call_at(loop.time() + delay_s, lambda: note((time.time_ns() - due_ns) / 1e6))


def check_all(parts: Sequence[Lateness], n: int) -> Lateness:
    """Merge the results of the processes, and check that each message began once, and no message began early."""
    begun = [number for part in parts for number in part.begun]
    ours = [lateness_ms for part in parts for lateness_ms in part.ours]
    check_once_each(begun, n)
    check(min(ours) >= 0, f"a message began {-min(ours):.3f} ms early")
    return Lateness(begun, ours, [lateness_ms for part in parts for lateness_ms in part.bare])


def rows_of(id_: str, where: str, rounds: Sequence[Lateness], goals: Mapping[float, Goal]) -> list[Row]:
    """Return a row for each quantile: the lateness of messages minus the lateness of timers."""
    n = len(rounds[0].ours)
    rows = []
    for part, goal in goals.items():
        ours = [quantile(lateness.ours, part) for lateness in rounds]
        bare = [quantile(lateness.bare, part) for lateness in rounds]
        what = f"{where}: {n:,} messages at {PER_S}/s, p{part * 100:g} of the lateness minus that of bare timers"
        beside = f"{quantile(ours, 0.5):.2f} ms, bare timers {quantile(bare, 0.5):.2f} ms"
        rows.append(Row(id_, what, "ms", tuple(o - b for o, b in zip(ours, bare, strict=True)), goal, beside))
    return rows

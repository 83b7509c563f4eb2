"""BF9: the cost of `Conflict.debounce`: many calls with one id, compared with calls that only replace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import timedelta

from aiodelay import Conflict, Message, Scheduler
from aiodelay.ports import Store
from aiodelay.redis import RedisStore
from aiodelay.sqlite import SqliteStore

from .harness import Benchmark, Goal, Order, Plan, Row, Stopwatch, check, in_turn, order, per_message_us, ratios
from .redis_server import emptied
from .sqlite_files import new_file

__all__ = ["BENCHMARK"]

CALLS = 100_000
QUIET, MAX_WAIT = timedelta(seconds=1), timedelta(minutes=10)
GOAL = Goal("at most", 1.2)


def run(plan: Plan) -> list[Row]:
    n = plan.size(CALLS)

    async def on_redis(conflict: Conflict) -> float:
        async with emptied(plan.redis):
            return await _calls(RedisStore(plan.redis), n, conflict)

    async def on_sqlite(conflict: Conflict) -> float:
        return await _calls(SqliteStore(new_file(plan.directory / "bf9.db")), n, conflict)

    return [_row(plan, "SQLite", on_sqlite, n), _row(plan, "Redis", on_redis, n)]


def _row(plan: Plan, store: str, calls: Callable[[Conflict], Coroutine[None, None, float]], n: int) -> Row:
    modes = {"replace": Conflict.replace(), "debounce": Conflict.debounce(QUIET, MAX_WAIT)}
    times = in_turn(plan, {name: lambda mode=mode: plan.run(calls(mode)) for name, mode in modes.items()})  # type: ignore[misc]
    beside = f"{per_message_us(times['debounce'], n)} a call, replace {per_message_us(times['replace'], n)}"
    what = f"{store}: `schedule_many` of {n:,} messages with one id, debounced"
    return Row("BF9", what, "x time with replace", ratios(times["debounce"], times["replace"]), GOAL, beside)


async def _calls(store: Store, n: int, conflict: Conflict) -> float:
    """Return the seconds of the calls. Then check that the newest message alone is delivered."""
    delivered: list[int] = []
    scheduler = Scheduler(store)

    @scheduler.handler(timeout="30s")
    async def handle(event: Order) -> None:
        delivered.append(event.number)

    delay = QUIET if conflict.quiet_ms is None else None
    async with Scheduler(store, dispatch=False) as sender:
        messages = (Message(order(i), delay=delay, id="m", conflict=conflict) for i in range(n))
        with Stopwatch() as watch:
            stored = await sender.schedule_many(messages)
        pending = await sender.get("m")
    check(stored == n and pending is not None, "not all calls were carried out")
    async with scheduler:
        await asyncio.sleep(QUIET.total_seconds())
        await scheduler.run_until_idle()
    check(delivered == [n - 1], f"{len(delivered)} messages were delivered")
    return watch.seconds


BENCHMARK = Benchmark("BF9", "many debounced calls with one id", run, needs_redis=True)

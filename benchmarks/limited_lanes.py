"""For BF11 and BP11: the rate of a drain with limits, and the turns of the keys beside a key with most messages."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from itertools import chain

from aiodelay import Limit, Message, Scheduler
from aiodelay.ports import Store

from .harness import Goal, Order, Plan, Row, Stopwatch, check, check_once_each, in_turn, order, per_message_us, ratios

__all__ = ["Emptied", "rows_of"]

MESSAGES, KEYS = 100_000, 1_000
CROWD, PER_OTHER = 1_000_000, 20
"""The messages of the key with most messages, and the messages of each other key, due later."""
CONCURRENCY, AT_ONCE = 1_000, 10
CALL_S = 0.001
"""How long a handler waits that calls another service nearby."""
OTHERS, CROWD_KEY = KEYS - 1, -1
LIMIT = Limit("number", AT_ONCE)
LONG_AGO, LATER = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
RATE_GOAL, JAIN_GOAL, FLAT_GOAL = Goal("at least", 0.9), Goal("at least", 0.95), Goal("at most", 1.25)
FEW_KEYS, MANY_KEYS, AMONG = 10, 100_000, 20_000
"""The numbers of keys that have a message far away, and the number of the messages that are measured beside these."""
FAR_AWAY = datetime.now(UTC) + timedelta(days=365)
Emptied = Callable[[], AbstractAsyncContextManager[Callable[[], Store]]]
"""Empties a database for a block, and yields a function that makes a store of it."""


def rows_of(plan: Plan, id_: str, what: str, emptied: Emptied) -> list[Row]:
    """Measure limits on one kind of store.

    Args:
        plan: The sizes and the rounds.
        id_: The id of the rows.
        what: The name of the store in the rows.
        emptied: Gives the store.
    """
    return [
        _rate(plan, id_, what, emptied, takes_s=CALL_S, goal=RATE_GOAL),
        _rate(plan, id_, what, emptied, takes_s=0, goal=None),
        _turns(plan, id_, what, emptied),
        *_growth(plan, id_, what, emptied),
    ]


# --- the rate ---------------------------------------------------------------------------------------------


def _rate(plan: Plan, id_: str, store: str, emptied: Emptied, *, takes_s: float, goal: Goal | None) -> Row:
    n = plan.size(MESSAGES)

    def measured(limits: Sequence[Limit]) -> float:
        return plan.run(_drained(emptied, n, limits, takes_s))

    times = in_turn(plan, {"free": lambda: measured([]), "limited": lambda: measured([LIMIT])})
    beside = f"{per_message_us(times['limited'], n)} a message, without limits {per_message_us(times['free'], n)}"
    handler = f"a handler that waits {takes_s * 1000:g} ms" if takes_s else "an empty handler"
    what = f"{store}: {n:,} messages of {KEYS:,} keys, due at once, each key limited to {AT_ONCE} in flight, {handler}"
    return Row(id_, what, "x speed without limits", ratios(times["free"], times["limited"]), goal, beside)


async def _drained(emptied: Emptied, n: int, limits: Sequence[Limit], takes_s: float) -> float:
    """Return the seconds in which all messages are delivered."""
    delivered: list[int] = []
    all_delivered = asyncio.get_running_loop().create_future()

    async def handle(event: Order) -> None:
        if takes_s:
            await asyncio.sleep(takes_s)
        delivered.append(event.number)
        if len(delivered) == n:
            all_delivered.set_result(None)

    async with emptied() as store:
        scheduler = Scheduler(store(), overdue_alarm="1h")
        scheduler.add_handler(handle, concurrency=CONCURRENCY, timeout="30s", limit=limits)
        await _filled(store, (Message(order(i), at=LONG_AGO, key=b"%d" % (i % KEYS)) for i in range(n)), limits)
        with Stopwatch() as watch:
            async with scheduler:
                await all_delivered
    check_once_each(delivered, n)
    return watch.seconds


# --- the number of keys -----------------------------------------------------------------------------------


def _growth(plan: Plan, id_: str, store: str, emptied: Emptied) -> Iterable[Row]:
    n, many = plan.size(AMONG), plan.size(MANY_KEYS)
    rounds = [[plan.run(_beside(emptied, n, keys)) for keys in (FEW_KEYS, many)] for _ in range(plan.runs)]
    for i, step in enumerate(("put", "drain")):
        few, more = ([each[side][i] for each in rounds] for side in (0, 1))
        what = f"{store}: {step} {n:,} messages of a lane with limits, beside {many:,} keys with a message far away"
        beside = f"{per_message_us(more, n)} a message, beside {FEW_KEYS} keys {per_message_us(few, n)}"
        yield Row(id_, what, f"x time beside {FEW_KEYS} keys", ratios(more, few), FLAT_GOAL, beside)


async def _beside(emptied: Emptied, n: int, others: int) -> tuple[float, float]:
    """Return the seconds to put messages and to deliver them, while other keys have messages far away."""
    delivered: list[int] = []
    all_delivered = asyncio.get_running_loop().create_future()

    async def handle(event: Order) -> None:
        delivered.append(event.number)
        if len(delivered) == n:
            all_delivered.set_result(None)

    async with emptied() as store:
        far = (Message(order(n + i), at=FAR_AWAY, key=b"other %d" % i) for i in range(others))
        await _filled(store, far, [LIMIT])
        with Stopwatch() as putting:
            await _filled(store, (Message(order(i), at=LONG_AGO, key=b"%d" % (i % KEYS)) for i in range(n)), [LIMIT])
        scheduler = Scheduler(store(), overdue_alarm="1h")
        scheduler.add_handler(handle, concurrency=CONCURRENCY, timeout="30s", limit=LIMIT)
        with Stopwatch() as draining:
            async with scheduler:
                await all_delivered
    check_once_each(delivered, n)
    return putting.seconds, draining.seconds


async def _filled(store: Callable[[], Store], messages: Iterable[Message], limits: Sequence[Limit]) -> None:
    """Store these messages, which are scheduled after the limits were set."""
    async with Scheduler(store(), dispatch=False) as producer:
        await producer.set_limits(Order, *limits)
        await producer.schedule_many(messages)


# --- the turns --------------------------------------------------------------------------------------------


def _turns(plan: Plan, id_: str, store: str, emptied: Emptied) -> Row:
    crowd = plan.size(CROWD)
    indices = [plan.run(_jain(emptied, crowd)) for _ in range(plan.runs)]
    what = (
        f"{store}: {crowd:,} messages of one key, then {PER_OTHER} of each of {OTHERS} keys, at most {AT_ONCE} of a "
        "key in flight: Jain's index of the other keys when half of their messages are delivered"
    )
    return Row(id_, what, "", tuple(indices), JAIN_GOAL, "1 = all keys have got the same; no key exceeded its limit")


async def _jain(emptied: Emptied, crowd: int) -> float:
    """Deliver until the keys beside the crowd have half of their messages. Return Jain's index of their numbers."""
    half, delivered, running = OTHERS * PER_OTHER // 2, Counter[int](), Counter[int]()
    has_half = asyncio.get_running_loop().create_future()

    async def handle(event: Order) -> None:
        key = CROWD_KEY if event.number < crowd else event.number % OTHERS
        running[key] += 1
        check(running[key] <= AT_ONCE, f"{running[key]} messages of a key are in flight")
        await asyncio.sleep(0)
        running[key] -= 1
        delivered[key] += 1
        if delivered.total() - delivered[CROWD_KEY] >= half and not has_half.done():
            has_half.set_result(None)

    messages = chain(
        (Message(order(i), at=LONG_AGO, key=b"crowd") for i in range(crowd)),
        (Message(order(crowd + i), at=LATER, key=b"%d" % ((crowd + i) % OTHERS)) for i in range(OTHERS * PER_OTHER)),
    )
    async with emptied() as store:
        scheduler = Scheduler(store(), overdue_alarm="1h")
        scheduler.add_handler(handle, concurrency=CONCURRENCY, timeout="30s", limit=LIMIT)
        await _filled(store, messages, [LIMIT])
        async with scheduler:
            await has_half
            shares = [delivered[key] for key in range(OTHERS)]
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))

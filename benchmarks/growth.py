"""For BF6 and BP7: the growth of the times of put, claim and cancel with the pending messages."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

from aiodelay.core.ids import new_id, new_op
from aiodelay.core.values import LEASE_MS, At, Cancel, Command, Demand, Done, Envelope, Put, SettleOutcome, Stored
from aiodelay.ports import Store, Work

from .harness import Goal, Plan, Row, Stopwatch, check, quantile, raw_payload

__all__ = ["LANE", "MANY", "VERY_MANY", "ahead", "apply", "fill", "grown"]

FEW, MANY, VERY_MANY = 10_000, 1_000_000, 10_000_000
AT_ONCE = 100
OPERATIONS = 100
LANE = "orders"
DAY_MS = 86_400_000
GOAL = Goal("at most", 1.5)


class Filled(NamedTuple):
    """A store with many messages, and its times in ms."""

    store: Store
    work: Work
    single_puts: list[float]
    puts: list[float]
    claims: list[float]
    cancels: list[float]


def grown(plan: Plan, id_: str, name: str, make: Callable[[str], Store], many: int) -> list[Row]:
    """Return the growth of the p50 of each operation, from few to many pending messages.

    Args:
        plan: The plan of the run.
        id_: The id of the benchmark.
        name: The name of the store in the table.
        make: Returns an empty store for a name.
        many: The larger number of pending messages.
    """
    few, many = plan.size(FEW), plan.size(many)
    rounds = plan.run(measure(plan, make("few"), few, make("many"), many))
    rows = []
    operations: dict[str, Callable[[Filled], list[float]]] = {
        "put of 1 message": lambda filled: filled.single_puts,
        f"put of {AT_ONCE} messages": lambda filled: filled.puts,
        f"claim of {AT_ONCE} messages": lambda filled: filled.claims,
        f"cancel of {AT_ONCE} messages": lambda filled: filled.cancels,
    }
    for what, pick in operations.items():
        before = [quantile(pick(small), 0.5) for small, _ in rounds]
        after = [quantile(pick(large), 0.5) for _, large in rounds]
        growth = tuple(a / b for a, b in zip(after, before, strict=True))
        beside = f"{quantile(after, 0.5):.2f} ms, with {few:,} pending {quantile(before, 0.5):.2f} ms"
        text = f"{name}: {what} with {many:,} pending"
        rows.append(Row(id_, text, f"x time with {few:,} pending", growth, GOAL, beside))
    return rows


async def measure(plan: Plan, small: Store, few: int, large: Store, many: int) -> list[tuple[Filled, Filled]]:
    """Fill both stores, then use them in turn, so that other processes disturb both alike."""
    chance = random.Random(few)
    rounds: list[tuple[Filled, Filled]] = []
    async with AsyncExitStack() as stack:
        works = []
        for store, n in ((small, few), (large, many)):
            await stack.enter_async_context(store)
            await fill(store, n, chance)
            works.append(await stack.enter_async_context(store.work("bench", [LANE])))
        for _ in range(plan.runs):
            pair = Filled(small, works[0], [], [], [], []), Filled(large, works[1], [], [], [], [])
            rounds.append(pair)
            for number in range(plan.size(OPERATIONS)):
                for filled in pair if number % 2 else pair[::-1]:
                    await use(filled, chance)
        for store, n in ((small, few), (large, many)):
            await check_count(store, n + plan.runs * plan.size(OPERATIONS))
    return rounds


async def fill(store: Store, n: int, chance: random.Random) -> None:
    """Put messages that are due within a month, but not today."""
    for at in range(0, n, 500):
        await apply(store, [ahead(store, chance) for _ in range(min(500, n - at))])


async def use(filled: Filled, chance: random.Random) -> None:
    """Measure put, claim and cancel once.

    Put 1 message, then 100 messages, among the pending messages, and cancel the 100. Then put 100 due messages, and
    claim and settle them.
    """
    store, work = filled.store, filled.work
    single, pending = [ahead(store, chance)], [ahead(store, chance) for _ in range(AT_ONCE)]
    cancels = [Cancel(new_op(), put.id) for put in pending]
    for commands, times in ((single, filled.single_puts), (pending, filled.puts), (cancels, filled.cancels)):
        with Stopwatch() as watch:
            await apply(store, commands)
        times.append(watch.seconds * 1000)
    now = store.now_ms()
    due = [due_at(now - chance.randrange(1000)) for _ in range(AT_ONCE)]
    await apply(store, due)
    with Stopwatch() as watch:
        claimed = await work.claim({LANE: Demand(AT_ONCE)}, request=new_id(), lease_ms=LEASE_MS)
    filled.claims.append(watch.seconds * 1000)
    records = [claim.record for claim in claimed.claims]
    check({record.id for record in records} == {each.id for each in due}, "claimed and due messages are not the same")
    check([r.due_ms for r in records] == sorted(r.due_ms for r in records), "claimed out of order")
    done = [Done(claim.record.id, claim.record.revision, claim.token) for claim in claimed.claims]
    check(set(await work.settle(done)) == {SettleOutcome.SETTLED}, "a claim could not be settled")


async def apply(store: Store, commands: Sequence[Command]) -> None:
    """Carry out commands, and check that all succeed."""
    outcomes = await store.apply(commands)
    check(all(isinstance(outcome, Stored) for outcome in outcomes), "a command was not carried out")


def ahead(store: Store, chance: random.Random) -> Put:
    """Return a message due within the next month, but not today."""
    return due_at(store.now_ms() + chance.randrange(DAY_MS, 30 * DAY_MS))


def due_at(due_ms: int) -> Put:
    """Return a message due at an instant."""
    return Put(new_op(), Envelope(new_id(), LANE, payload=raw_payload(0)), At(due_ms))


async def check_count(store: Store, n: int) -> None:
    """Check the number of pending messages, and that the store has nothing else."""
    counts = (await store.counts())[LANE]
    check((counts.scheduled, counts.overdue, counts.in_flight) == (n, 0, 0), f"{counts} instead of {n} scheduled")

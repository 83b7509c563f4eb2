"""Overload: ten times as many messages come as a handler can run, and then no more. The last line is a `Result`.

The handler may run one message for every ten that are stored. So the load is ten times too high on any machine.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from contextlib import suppress

import msgspec

from aiodelay import Context, Message, OutcomeUnknownError, Scheduler, StoreBusyError, StoreUnavailableError
from tests.faults.programs.backlog import resident_bytes
from tests.support.producing import instant
from tests.support.waiting import until

__all__ = ["CONCURRENCY", "PAYLOAD_BYTES", "STORE_TIMEOUT_MS", "Plan", "Result"]

CONCURRENCY = 8
ROUNDS, ROUND = 10, 500
"""The rounds of the load, and the messages that each round stores in the overloaded lane."""
PAYLOAD_BYTES = 16_384
TOO_MUCH = 10
"""How many times more messages are stored than the handler can run."""
STORE_TIMEOUT_MS = 200
"""The `store_timeout` of the scheduler that is called too often."""
PATIENCE_S = 60
MOST_CALLS = 1 << 20


class Plan(msgspec.Struct, frozen=True):
    store: str


class Result(msgspec.Struct, frozen=True):
    """The observations.

    Attributes:
        stored: The number of messages in the overloaded lane.
        waiting: How many of them waited for their runs when the load ended.
        most_in_flight: The most messages of the overloaded lane in flight.
        displaced: By how many messages at most a message was behind a message that was due later.
        grown_bytes: By how much the memory of this process grew at most in the second half of the load.
        others: The number of messages in the other lane. Each was delivered before the next round of the load.
        busy: The number of calls that `StoreBusyError` refused.
        waited_ms: The shortest time for which a refused call had waited.
        lost: The number of stored messages that were not delivered in the end.
        delivered_though_busy: The number of refused messages that were delivered.
    """

    stored: int
    waiting: int
    most_in_flight: int
    displaced: int
    grown_bytes: int
    others: int
    busy: int
    waited_ms: int
    lost: int
    delivered_though_busy: int


class Load:
    """The scheduler under load, and the observations of its handlers."""

    def __init__(self, store: str) -> None:
        self.scheduler = Scheduler(store)
        self.runs: Counter[str] = Counter()
        self.ended = self.newest = self.displaced = 0
        self.may_run = asyncio.Semaphore(0)
        self.random = random.Random(ROUNDS)

        @self.scheduler.handler(name="work", concurrency=CONCURRENCY)
        async def work(payload: bytes, context: Context) -> None:
            number = int(context.id.removeprefix("work-"))
            self.displaced = max(self.displaced, self.newest - number)
            self.newest = max(self.newest, number)
            await self.may_run.acquire()
            self.runs[context.id] += 1
            self.ended += 1

        @self.scheduler.handler(name="other")
        async def other(payload: bytes, context: Context) -> None:
            self.runs[context.id] += 1

    async def add_round(self, i: int, first_due_ms: int) -> None:
        """Store a round of the load, let a tenth of it run, and wait for a message of the other lane."""
        numbers = range(i * ROUND, (i + 1) * ROUND)
        await self.scheduler.schedule_many(
            Message(
                self.random.randbytes(PAYLOAD_BYTES), at=instant(first_due_ms + n), to="handler:work", id=f"work-{n}"
            )
            for n in numbers
        )
        self.allow(ROUND // TOO_MUCH)
        allowed = (i + 1) * ROUND // TOO_MUCH
        await self.scheduler.schedule(b"", to="handler:other", delay="0s", id=f"other-{i}")
        await until(lambda: self.runs[f"other-{i}"], "a run in the other lane", PATIENCE_S)
        await until(lambda: self.ended == allowed, "the runs that the handler can do", PATIENCE_S)

    async def in_flight(self) -> int:
        """Return how many messages of the overloaded lane are in flight, once the store answers."""
        while True:
            with suppress(StoreUnavailableError):
                return (await self.scheduler.counts())["work"].in_flight

    def allow(self, runs: int) -> None:
        for _ in range(runs):
            self.may_run.release()


async def called_too_often(store: str) -> tuple[list[str], list[StoreBusyError]]:
    """Call `schedule()` more and more often at once, until a call is refused. Return the stored ids, and the errors."""
    stored: list[str] = []
    busy: list[StoreBusyError] = []
    calls = 1_000
    store_timeout, open_timeout = f"{STORE_TIMEOUT_MS}ms", f"{PATIENCE_S}s"
    async with Scheduler(store, dispatch=False, store_timeout=store_timeout, open_timeout=open_timeout) as producer:
        while not busy:
            assert calls <= MOST_CALLS, "schedule() refuses no call"
            ids = [f"call-{calls}-{i}" for i in range(calls)]
            each = (producer.schedule(b"", to="handler:other", delay="0s", id=id_) for id_ in ids)
            for id_, answer in zip(ids, await asyncio.gather(*each, return_exceptions=True), strict=True):
                if isinstance(answer, StoreBusyError):
                    busy.append(answer)
                elif not isinstance(answer, BaseException):
                    stored.append(id_)
                elif not isinstance(answer, OutcomeUnknownError | StoreUnavailableError):
                    raise answer
            calls *= 2
    return stored, busy


async def main(plan: Plan) -> None:
    load = Load(plan.store)
    first_due_ms = time.time_ns() // 1_000_000 - ROUNDS * ROUND
    in_flight: list[int] = []
    resident: list[int] = []
    async with load.scheduler as scheduler:
        for i in range(ROUNDS):
            await load.add_round(i, first_due_ms)
            in_flight.append(await load.in_flight())
            resident.append(resident_bytes())
        called, busy = await called_too_often(plan.store)
        waiting = ROUNDS * ROUND - load.ended
        load.allow(waiting)
        await scheduler.run_until_idle()
    stored = [f"work-{n}" for n in range(ROUNDS * ROUND)] + [f"other-{i}" for i in range(ROUNDS)] + called
    result = Result(
        stored=ROUNDS * ROUND,
        waiting=waiting,
        most_in_flight=max(in_flight),
        displaced=load.displaced,
        grown_bytes=max(resident[ROUNDS // 2 :]) - resident[ROUNDS // 2 - 1],
        others=ROUNDS,
        busy=len(busy),
        waited_ms=min(error.waited_ms for error in busy),
        lost=sum(not load.runs[id_] for id_ in stored),
        delivered_though_busy=sum(load.runs[error.message_id] > 0 for error in busy),
    )
    print("result", msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Plan)))

"""A process that schedules, handles, or does both, as its plan says, and writes its history.

It says `ready` when its scheduler is open, `running`, `run 20`, `run 40` and `run 60` as runs begin, `produced` when it
has scheduled all it should, `idle` when nothing is left to deliver, and `closed` at its end. What a handler does with a
message is in the message's header `do`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

import msgspec

from aiodelay import Conflict, Context, Received, Retry, Scheduler
from aiodelay.backends.registry import open_store
from aiodelay.backends.sqlite import writer
from aiodelay.core import features, pulse
from aiodelay.core.values import Delivery, Demand, SendOutcome, Sent
from aiodelay.engine import lifecycle, subscriptions
from aiodelay.ports import Sink
from aiodelay.redis import RedisFanoutSink, RedisFanoutSource, RedisListSink, RedisListSource, RedisLog
from aiodelay.testing import history as h
from tests.support import sqlite_points
from tests.support.bugs import BUGS
from tests.support.little_memory import listen_for_memory_faults
from tests.support.observed import FailurePoint, FailurePoints, ObservedSource, ObservedStore, kill_oneself
from tests.support.producing import Producer
from tests.support.server_clock import FileClock

__all__ = ["Burst", "Plan", "Stream"]


BULK, BULK_BYTES = 50, 20_000
DOWN_MS = 5_000
"""More than ten attempts with a pause of 200 ms take, so a message whose destination is down becomes a dead letter."""
PATIENT_MS = 60_000
NOTED_S = 30.0
LOOKS = 300
SOURCES = {"redis-list": RedisListSource, "redis-fanout": RedisFanoutSource, "redis-log": RedisLog}


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """Schedule so many messages at once, due over a span of time; then change one in six of them.

    Attributes:
        spread_ms: Due times lie evenly from now to so far ahead.
        headers: Given to every message.
        special: What single messages, by number, do with their handler.
        changes: Also replace, cancel and reschedule some.
        to: A sink's destination instead of the handler.
    """

    messages: int
    spread_ms: int = 1_000
    prefix: str = "m"
    headers: dict[str, bytes] = {}
    special: dict[int, bytes] = {}
    changes: bool = False
    to: str | None = None


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """Give random commands, about so many per second, to ids that other processes use as well.

    Attributes:
        seconds: The time for which commands are given. A slow machine gives fewer commands in this time.
        all_kinds: Also load in bulk, fire, redrive, send to a sink, and schedule messages that become dead letters.
        until_told: After this time, go on until SIGTERM. Tests that need an amount of messages send it.
    """

    seconds: float
    rate: int
    ids: int
    seed: int
    all_kinds: bool = False
    until_told: bool = False


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker does.

    Attributes:
        point: Where it kills itself.
        serve: Lanes that it handles.
        pulls: Takes their messages by `async for` instead.
        sink: Also serve the sink `sink:`.
        source: Where they are taken from too: a list of Redis, or a topic's consumer.
        moves: Only move messages into lists and topics, as the store does by itself.
        run_ms: How long a handler takes.
        waits: Open the scheduler only once told `go`.
        stuck_after_ms: How long a blocked event loop keeps its claims.
        misbehaves: Where a message says so, once: block the event loop until told `go`, or fork a child.
        is_patient: Wait for a minute, not for seconds, for a store or a process that stands still: when the scheduler
            closes, and before another process counts as dead.
        bug: Break a promise, as the store of this name in `tests/support/bugs.py` does.
        clock: A file with the offset of the store's clock; "" = the store's usual clock.
        knows: Be a version that knows these features too.
        until: End when nothing is left to deliver, when told by SIGTERM, once it has scheduled all it should, or when
            no message and no dead letter is left; it redrives dead letters.
    """

    name: str
    store: str
    history: str
    lease_ms: int = 1_000
    point: FailurePoint | None = None
    serve: tuple[str, ...] = ()
    pulls: bool = False
    sink: bool = False
    source: str = ""
    moves: bool = False
    concurrency: int = 8
    run_ms: int = 0
    drain_ms: int = 30_000
    burst: Burst | None = None
    stream: Stream | None = None
    waits: bool = False
    misbehaves: bool = False
    is_patient: bool = False
    stuck_after_ms: int = 300_000
    bug: str = ""
    clock: str = ""
    knows: tuple[str, ...] = ()
    until: Literal["idle", "sigterm", "produced", "empty"] = "idle"


class Handling:
    """Runs messages as their headers say."""

    def __init__(self, lane: str, plan: Plan, history: h.History, points: FailurePoints) -> None:
        self._lane, self._plan, self._history, self._points = lane, plan, history, points
        self._has_misbehaved, self._runs = False, 0

    async def handle(self, payload: bytes, context: Context) -> None:
        digest = h.digest_of(payload, context.key, context.headers)
        delivery_id, attempt, token = context.delivery_id, context.attempt, context._claim.token
        started = h.RunStarted(
            id=context.id, delivery_id=delivery_id, attempt=attempt, lane=self._lane, digest=digest, token=token
        )
        self._history.write(started)
        self._runs += 1
        if self._runs in (1, 20, 40, 60):
            say("running" if self._runs == 1 else f"run {self._runs}")
        result: Literal["ok", "failed", "cancelled"] = "failed"
        try:
            with self._points.around("handler"):
                await self._do(context)
            result = "ok"
        except asyncio.CancelledError:
            result = "cancelled"
            raise
        finally:
            self._history.write(h.RunEnded(delivery_id=delivery_id, attempt=attempt, token=token, result=result))

    async def _do(self, context: Context) -> None:
        """Do what a message says.

        It is one of `die:<ms>`, `end`, `fail:<times>`, `down:<until epoch ms>`, `block`, `spin`, `hog:<ms>`,
        `fork:<how>`, `sleep:<ms>`, `note:<folder>`, and `await:<number>:<folder>`.
        """
        what, _, number = context.headers.get("do", b"").decode().partition(":")
        if what == "die":
            await asyncio.sleep(int(number or 0) / 1000)
            kill_oneself(self._history)
        elif what == "end":
            os.kill(os.getpid(), signal.SIGTERM)
        elif what == "note":
            (Path(number) / context.id).touch()
        elif what == "await":
            await until_noted(*number.split(":", 1))
            return
        elif (what == "fail" and context.attempt <= int(number)) or (
            what == "down" and time.time() * 1000 < int(number)
        ):
            raise RuntimeError("as told")
        elif what in ("block", "spin") and self._may_misbehave():
            self._history.write(h.Blocked())
            say("blocking")
            block_until_told(is_busy=what == "spin")
            return
        elif what == "fork" and self._may_misbehave():
            say(f"child {fork_child(number)}")
        elif what == "hog":  # in each run, where `block` does so once
            time.sleep(int(number) / 1000)  # noqa: ASYNC251 - the fault
        # A run takes real time, and so does what a producer pauses for below: processes share no virtual clock.
        await asyncio.sleep(int(number) / 1000 if what == "sleep" else self._plan.run_ms / 1000)

    def _may_misbehave(self) -> bool:
        if not self._plan.misbehaves or self._has_misbehaved:
            return False
        self._has_misbehaved = True
        return True


async def until_noted(messages: str, folder: str) -> None:
    """Wait until so many different messages have been noted in a folder, but at most `NOTED_S`."""
    clock = asyncio.get_running_loop().time
    ends_s = clock() + NOTED_S
    while len(os.listdir(folder)) < int(messages) and clock() < ends_s:  # noqa: ASYNC110 - other processes note them
        await asyncio.sleep(0.02)


def block_until_told(*, is_busy: bool) -> None:
    """Block the event loop until told `go`, with the GIL released, or in Python."""
    if not is_busy:
        sys.stdin.readline()
        return
    told = threading.Thread(target=sys.stdin.readline)
    told.start()
    while told.is_alive():
        pass


def fork_child(how: str) -> int:
    """Fork a child that does nothing until it is killed. Return its pid.

    Args:
        how: `python`, or `c`: as a library in C forks, so that Python does not notice.
    """
    library = ctypes.PyDLL(None)
    fork, close, pause = library.fork, library.close, library.pause
    # The child of a C library has one thread and the state of all. It would wait for ever for a thread that had asked
    # for the GIL before the fork. With a long interval no thread asks, and after a short sleep none has asked.
    sys.setswitchinterval(3600)
    time.sleep(0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads
        child = int(fork()) if how == "c" else os.fork()
    if not child:
        for descriptor in range(3):
            close(descriptor)  # the supervisor waits for their end
        while True:
            pause()
    sys.setswitchinterval(0.005)
    return child


class RecordingSink:
    """Takes everything, and writes it down."""

    name = "sink"
    limits = Demand(20)

    def __init__(self, history: h.History, points: FailurePoints) -> None:
        self._history, self._points = history, points

    def check(self, address: str) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        self._points.passes("send", "before")
        for each in deliveries:
            envelope = each.envelope
            digest = h.digest_of(envelope.payload, envelope.key, envelope.headers)
            started = h.RunStarted(
                id=envelope.id, delivery_id=each.delivery_id, attempt=each.attempt, lane="sink", digest=digest
            )
            self._history.write(started)
            self._history.write(h.RunEnded(delivery_id=each.delivery_id, attempt=each.attempt, result="ok"))
        self._points.passes("send", "after")
        return [Sent()] * len(deliveries)


# --- producing --------------------------------------------------------------------------------------------


async def burst(producer: Producer, plan: Burst) -> None:
    """Schedule all at once; then touch every sixth."""
    start = time.time_ns() // 1_000_000
    step = plan.spread_ms / max(plan.messages, 1)

    async def one(i: int, version: int) -> None:
        await producer.schedule(
            f"{plan.prefix}-{i}",
            random.randbytes(20 + version),
            at_ms=start + int(i * step),
            headers=plan.headers | ({"do": plan.special[i]} if i in plan.special else {}),
            key=b"k" if i % 2 else None,
            to=plan.to,
        )

    await asyncio.gather(*(one(i, 0) for i in range(plan.messages)))
    if plan.changes:
        await asyncio.gather(*(one(i, 1) for i in range(2, plan.messages, 6)))
        await asyncio.gather(*(producer.cancel(f"{plan.prefix}-{i}") for i in range(3, plan.messages, 6)))
        moved = range(4, plan.messages, 6)
        await asyncio.gather(*(producer.reschedule(f"{plan.prefix}-{i}", start + int(i * step) + 300) for i in moved))


async def stream(producer: Producer, plan: Stream, name: str, told: asyncio.Event) -> None:
    """Give random commands until the time is over; each waits for no other.

    With `until_told`, give more commands until told, one at a time: a slow machine gets no growing backlog.
    """
    rng = random.Random(f"{plan.seed} {name}")
    give = any_command if plan.all_kinds else command
    loop = asyncio.get_running_loop()
    ends = loop.time() + plan.seconds
    number = 0
    async with asyncio.TaskGroup() as group:
        while loop.time() < ends:
            number += 1
            group.create_task(give(producer, rng, f"{name}-{number}", plan.ids))
            await asyncio.sleep(rng.expovariate(plan.rate))
    while plan.until_told and not told.is_set():
        number += 1
        await give(producer, rng, f"{name}-{number}", plan.ids)
        await asyncio.sleep(rng.expovariate(plan.rate))


async def command(producer: Producer, rng: random.Random, fresh: str, ids: int) -> None:
    """Give one random command."""
    now = time.time_ns() // 1_000_000
    shared = f"shared-{rng.randrange(ids)}"
    chosen = rng.random()
    payload = rng.randbytes(rng.choice((0, 20, 200, 2_000)))
    headers = {"do": b"fail:1"} if rng.random() < 0.05 else {"x": rng.randbytes(4)}
    if chosen < 0.5:
        await producer.schedule(fresh, payload, at_ms=now + rng.randrange(-100, 2_000), headers=headers)
    elif chosen < 0.6:
        await producer.schedule(fresh, payload, delay_ms=3_600_000, lane="far")
    elif chosen < 0.75:
        await producer.schedule(shared, payload, at_ms=now + rng.randrange(2_000), headers=headers, key=b"k")
    elif chosen < 0.8:
        await producer.schedule(shared, payload, delay_ms=rng.randrange(500), conflict=Conflict.keep())
    elif chosen < 0.9:
        await producer.cancel(shared)
    else:
        await producer.reschedule(shared, now + rng.randrange(1_500))


async def any_command(producer: Producer, rng: random.Random, fresh: str, ids: int) -> None:
    """Give one random command, of any kind."""
    now = time.time_ns() // 1_000_000
    chosen, soon_ms = rng.random(), now + rng.randrange(1_500)
    if chosen < 0.01:
        payloads = {f"{fresh}-{i}": rng.randbytes(BULK_BYTES) for i in range(BULK)}
        await producer.schedule_many(payloads, at_ms=soon_ms)
    elif chosen < 0.06:
        await producer.fire(f"shared-{rng.randrange(ids)}")
    elif chosen < 0.14:
        await producer.schedule(fresh, rng.randbytes(20), at_ms=soon_ms, to="sink:a")
    elif chosen < 0.16:  # its destination is down for longer than it is tried
        await producer.schedule(fresh, b"down", at_ms=soon_ms, headers={"do": f"down:{now + DOWN_MS}".encode()})
    elif chosen < 0.18:
        await redrive(producer, limit=20)
    else:
        await command(producer, rng, fresh, ids)


async def redrive(producer: Producer, *, limit: int) -> int:
    """Redrive up to so many dead letters. Return the number of letters that were found."""
    letters = await producer.dead_letters(limit)
    for letter in letters:
        await producer.redrive(letter)
    return len(letters)


# --- the process ------------------------------------------------------------------------------------------


def say(line: str) -> None:
    """Write a line for the supervisor."""
    print(line, flush=True)


def be_patient() -> None:
    """Let a machine stand still for seconds without a message that is not settled, or a process that counts as dead."""
    lifecycle.CLOSE_S = subscriptions.CLOSE_S = PATIENT_MS / 1000  # type: ignore[attr-defined]
    pulse.DEATH_MS, pulse.BEGIN_MS = PATIENT_MS, PATIENT_MS - (pulse.DEATH_MS - pulse.BEGIN_MS)
    writer.ANSWER_MS = PATIENT_MS  # type: ignore[attr-defined]


async def returned_resources(baseline: h.Resources) -> h.Resources:
    """Count what might leak. A thread may end a little later than the scheduler closes."""
    for _ in range(LOOKS):
        found = h.count_resources("end")
        if found.threads <= baseline.threads:
            break
        await asyncio.sleep(0.01)
    return found


def scheduler_of(plan: Plan, history: h.History, points: FailurePoints) -> Scheduler:
    """Make the scheduler, with a lease as short as the plan says."""
    real = (
        BUGS[plan.bug](plan.store.removeprefix("sqlite:///"))
        if plan.bug
        else open_store(plan.store, namespace="default", clock=FileClock(Path(plan.clock)) if plan.clock else None)
    )
    if plan.is_patient:
        be_patient()
    if plan.moves:
        return Scheduler(plan.store, lanes=list(SOURCES))
    on_redis: list[Sink] = []
    if plan.store.startswith(("redis://", "redis+")):
        on_redis = [RedisListSink(plan.store), RedisFanoutSink(plan.store), RedisLog(plan.store)]
    source = plan.source.partition(":")[0]
    scheduler = Scheduler(
        ObservedStore(real, history, points),
        sinks=[RecordingSink(history, points), *on_redis],
        sources=[ObservedSource(SOURCES[source](plan.store), history, points)] if source else [],
        dispatch=bool(plan.serve or plan.sink),
        lanes=[*([] if plan.pulls else plan.serve), *(["sink"] if plan.sink else [])],
        retry=Retry(attempts=10, first="200ms", factor=1),
        drain=f"{plan.drain_ms}ms",
        open_timeout="2m",  # a producer too may start while its server is away
    )
    times = {"lease_ms": plan.lease_ms, "stuck_after_ms": plan.stuck_after_ms}
    scheduler._options = msgspec.structs.replace(scheduler._options, **times)
    for lane in () if plan.pulls else plan.serve:
        handling = Handling(source or lane, plan, history, points)
        scheduler.add_handler(handling.handle, name=lane, concurrency=plan.concurrency, source=plan.source or None)
    return scheduler


async def pull(scheduler: Scheduler, lane: str, plan: Plan, history: h.History, points: FailurePoints) -> None:
    """Take a lane's messages until the scheduler closes, each in a task of its own."""
    handling = Handling(plan.source.partition(":")[0] or lane, plan, history, points)

    async def take(message: Received[bytes]) -> None:
        with contextlib.suppress(RuntimeError), message as payload:
            await handling.handle(payload, message.context)

    async with asyncio.TaskGroup() as tasks:
        source = plan.source or None
        async for message in scheduler.messages(lane, concurrency=plan.concurrency, source=source):
            tasks.create_task(take(message))


async def main(plan: Plan) -> None:
    logging.basicConfig(level=logging.WARNING)
    features.KNOWN |= {*plan.knows}
    history = h.History(plan.history, plan.name)
    points = FailurePoints(plan.point, lambda: kill_oneself(history))
    if plan.point is not None:
        sqlite_points.install(points)
    scheduler = scheduler_of(plan, history, points)
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    listen_for_memory_faults(asyncio.get_running_loop())
    if plan.waits:
        say("waiting")
        await asyncio.to_thread(sys.stdin.readline)
    else:
        await asyncio.to_thread(int)  # the default executor's thread is no leak
    history.write(baseline := h.count_resources("baseline"))
    async with asyncio.TaskGroup() as pulling, scheduler:
        for lane in plan.serve if plan.pulls else ():
            pulling.create_task(pull(scheduler, lane, plan, history, points))
            for _ in range(10):  # until it has subscribed: nothing would be served, and all would look idle
                await asyncio.sleep(0)
        history.write(h.Process(what="ready"))
        say("ready")
        producer = Producer(scheduler, history)
        if plan.burst is not None:
            await burst(producer, plan.burst)
        if plan.stream is not None:
            await stream(producer, plan.stream, plan.name, told)
        say("produced")
        if plan.until == "sigterm":
            await told.wait()
        elif plan.until == "idle":
            await scheduler.run_until_idle()
            say("idle")
        elif plan.until == "empty":
            await scheduler.run_until_idle()
            while await redrive(producer, limit=500):
                await scheduler.run_until_idle()
    history.write(await returned_resources(baseline))
    history.close()
    say("closed")


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Plan)))

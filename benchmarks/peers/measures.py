"""Measure one side: drain, lateness, memory and load while idle, and the cost of a kill."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import redis

from benchmarks.harness import Plan, check, quantile
from benchmarks.redis_server import empty

from .environments import Environment
from .processes import Record, Run, Worker, schedule, variables, wait_until
from .sides import AIODELAY, Side

__all__ = ["Delivery", "Drain", "Idle", "Kill", "Late", "Measured", "delivery_of", "drain", "idle", "kill", "late"]

DRAINED = 20_000
PER_S, LATE_S = 100, 20.0
PENDING, IDLE_S, LEAST_IDLE_S = 20_000, 20.0, 2.0
KILLED, RUN_S, INTO_RUN_S, BACK_WITHIN_S = 10, 1.0, 0.3, 120.0
TRAFFIC, TRAFFIC_EVERY_MS = 40, 5_000
START_S, STALLED_S = 90.0, 90.0
STARTED_S = 2.0
"""The time for all processes of a worker to start, after the first of them has handled a message."""
SETTLE_S = 20.0
"""The time for a worker to fetch messages ahead, if it does."""
LEADS, LEAD_A_MESSAGE_MS = 4, 2
"""The time allowed for scheduling: the time of one message, times the first number, plus some ms for each message."""
HOUR_MS = 3_600_000
PROBE = -1
"""The number of the message that shows that a worker handles messages."""


class Delivery(NamedTuple):
    """The messages that were not delivered as they should: numbers of messages."""

    lost: int
    doubled: int
    early: int

    def __str__(self) -> str:
        faults = ((self.lost, "not delivered"), (self.doubled, "delivered twice or more"), (self.early, "early"))
        return ", ".join(f"{n:,} {fault}" for n, fault in faults if n) or "each once, none early"


def delivery_of(side: Side, began: Sequence[Run], due_ms: dict[int, int]) -> Delivery:
    """Compare the begun runs with the scheduled messages. A fault of aiodelay is an error, not a finding."""
    times = Counter(run.number for run in began)
    check(set(times) <= set(due_ms), f"unknown messages were delivered: {sorted(set(times) - set(due_ms))[:5]}")
    lost = sum(1 for number in due_ms if not times[number])
    doubled = sum(1 for count in times.values() if count > 1)
    early = {run.number for run in began if run.at_ns < due_ms[run.number] * 1_000_000}
    delivery = Delivery(lost, doubled, len(early))
    check(side.peer != AIODELAY or not any(delivery), f"aiodelay: {delivery}")
    return delivery


class Drain(NamedTuple):
    """Times of one message, in µs: wall time, processor time of the worker, and of the server."""

    message_us: float
    worker_us: float
    server_us: float
    delivery: Delivery


class Late(NamedTuple):
    """The lateness in ms."""

    p50_ms: float
    p99_ms: float
    delivery: Delivery


class Idle(NamedTuple):
    """The memory and the load of a side while nothing is due.

    Attributes:
        pending: Number of pending messages.
        server_bytes: Memory of the server for a pending message.
        worker_bytes: Memory of the worker.
        commands_per_s: Commands that the server counts.
        worker_load: Processor time of the worker, in % of a core.
        server_load: Processor time of the server, in % of a core.
    """

    pending: int
    server_bytes: float
    worker_bytes: float
    commands_per_s: float
    worker_load: float
    server_load: float


class Kill(NamedTuple):
    """The outcome of messages whose worker was killed while it ran them.

    Attributes:
        messages: Number of messages.
        interrupted: Messages whose run the kill interrupted.
        back_s: Seconds from the kill to the begin of the last run of an interrupted message; None if none ran again.
        not_back: Messages that did not run to their end within the time limit.
        doubled: Messages that ran to their end more than once.
    """

    messages: int
    interrupted: int
    back_s: float | None
    not_back: int
    doubled: int


@dataclass
class Measured:
    """The figures of one side by round, and its failures in words."""

    drains: dict[int, Drain] = field(default_factory=dict)
    lateness: dict[int, Late] = field(default_factory=dict)
    idles: dict[int, Idle] = field(default_factory=dict)
    kills: dict[int, Kill] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


class _Stage:
    """One side on an empty server, with a folder of its own."""

    def __init__(self, side: Side, environment: Environment, url: str, folder: Path, handler_s: float) -> None:
        self._environment, self._folder = environment, folder
        self._settings = variables(environment, side.settings, url, folder, handler_s)
        self._record = Record(folder)
        self.probe_ms = 0
        self.server: Any = redis.Redis.from_url(url, decode_responses=True)

    def schedule(self, due_ms: dict[int, int]) -> None:
        schedule(self._environment, self._settings, self._folder, due_ms)

    @contextmanager
    def working(self) -> Iterator[Worker]:
        with Worker(self._environment, self._settings, self._folder) as worker:
            yield worker

    @contextmanager
    def ready(self) -> Iterator[Worker]:
        """Run a worker that has handled one message."""
        since_ms = _now_ms()
        self.schedule({PROBE: since_ms})
        self.probe_ms = _now_ms() - since_ms
        with self.working() as worker:
            self.wait_for_first(worker)
            yield worker

    def began(self) -> list[Run]:
        return [run for run in self._record.began() if run.number != PROBE]

    def ended(self) -> list[Run]:
        return self._record.ended()

    def wait_for_first(self, worker: Worker) -> None:
        """Wait until a worker has begun to handle a message."""
        has_begun = wait_until(lambda: self._record.lines() > 0 or worker.has_ended(), START_S)
        check(has_begun and not worker.has_ended(), f"the worker handled nothing in {START_S:g} s: {worker.log}")

    def wait_for(self, n: int) -> None:
        """Wait until n messages have begun, or nothing has happened for a long time."""
        while len({run.number for run in self.began()}) < n:
            before = self._record.lines()
            if not wait_until(partial(self._has_more_lines, before), STALLED_S):
                return
            wait_until(partial(self._has_more_lines, n - 1), STALLED_S)

    def _has_more_lines(self, than: int) -> bool:
        return self._record.lines() > than

    def server_s(self) -> float:
        info = self.server.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

    def commands(self) -> int:
        return int(self.server.info("stats")["total_commands_processed"])

    def dataset_bytes(self) -> int:
        return int(self.server.info("memory")["used_memory_dataset"])


@contextmanager
def _stage(plan: Plan, side: Side, environment: Environment, handler_s: float = 0.0) -> Iterator[_Stage]:
    empty(plan.redis)
    with tempfile.TemporaryDirectory(dir=plan.directory) as folder:
        stage = _Stage(side, environment, plan.redis, Path(folder), handler_s)
        try:
            yield stage
        finally:
            stage.server.close()
            empty(plan.redis)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def drain(plan: Plan, side: Side, environment: Environment) -> Drain:
    """Schedule messages for later, wait until all are due, and then start a worker.

    The time runs from the begin of the first handler to the begin of the last one, so the start of the worker does not
    count. Its processor time does not count either: a worker that handles one message shows it.
    """
    n = plan.size(DRAINED)
    with _stage(plan, side, environment) as stage, stage.ready() as worker:
        time.sleep(STARTED_S)
        start_s = worker.processor_s()
    with _stage(plan, side, environment) as stage:
        due_ms = _scheduled_ahead(plan, stage, n)
        time.sleep(max(0.0, (max(due_ms.values()) - _now_ms()) / 1000))
        server_s = stage.server_s()
        with stage.working() as worker:
            stage.wait_for_first(worker)
            stage.wait_for(n)
            worker_s, server_s = worker.processor_s() - start_s, stage.server_s() - server_s
        began = stage.began()
    wall_us = (began[-1].at_ns - began[0].at_ns) / 1000 / max(len(began) - 1, 1)
    each_us = 1e6 / len(began)
    return Drain(wall_us, worker_s * each_us, server_s * each_us, delivery_of(side, began, due_ms))


def _scheduled_ahead(plan: Plan, stage: _Stage, n: int) -> dict[int, int]:
    """Schedule n messages that are all due at one instant, after the last of them has been scheduled."""
    lead_ms = 1_000
    while True:
        due_ms = dict.fromkeys(range(n), _now_ms() + lead_ms)
        stage.schedule(due_ms)
        if _now_ms() <= due_ms[0]:
            return due_ms
        empty(plan.redis)
        lead_ms *= 3


def late(plan: Plan, side: Side, environment: Environment) -> Late:
    """Schedule messages at a rate, all before the first is due, for a worker that is ready."""
    n = plan.size(round(PER_S * LATE_S))
    with _stage(plan, side, environment) as stage, stage.ready():
        lead_ms = LEADS * stage.probe_ms + n * LEAD_A_MESSAGE_MS
        first_ms = _now_ms() + lead_ms
        due_ms = {number: first_ms + number * 1000 // PER_S for number in range(n)}
        stage.schedule(due_ms)
        check(_now_ms() <= first_ms, f"scheduling {n:,} messages took more than {lead_ms:,} ms")
        time.sleep((max(due_ms.values()) - _now_ms()) / 1000)
        stage.wait_for(n)
        began = stage.began()
    first_runs = {run.number: run.at_ns for run in reversed(began)}
    lateness_ms = [at_ns / 1e6 - due_ms[number] for number, at_ns in first_runs.items()]
    return Late(quantile(lateness_ms, 0.5), quantile(lateness_ms, 0.99), delivery_of(side, began, due_ms))


def idle(plan: Plan, side: Side, environment: Environment) -> Idle:
    """Keep messages pending that are due in an hour, while a worker waits."""
    n, settle_s, span_s = plan.size(PENDING), SETTLE_S * plan.scale, max(IDLE_S * plan.scale, LEAST_IDLE_S)
    with _stage(plan, side, environment) as stage, stage.ready() as worker:
        empty_bytes = stage.dataset_bytes()
        stage.schedule(dict.fromkeys(range(n), _now_ms() + HOUR_MS))
        time.sleep(settle_s)
        since, worker_s, server_s, commands = time.monotonic(), worker.processor_s(), stage.server_s(), stage.commands()
        time.sleep(span_s)
        asked_by_us = 1
        commands = stage.commands() - commands - asked_by_us
        seconds = time.monotonic() - since
        worker_s, server_s = worker.processor_s() - worker_s, stage.server_s() - server_s
        check(not stage.began(), f"{len(stage.began()):,} of {n:,} messages were delivered an hour early")
        server_bytes = (stage.dataset_bytes() - empty_bytes) / n
        return Idle(
            n,
            server_bytes,
            worker.memory_bytes(),
            commands / seconds,
            worker_s / seconds * 100,
            server_s / seconds * 100,
        )


def kill(plan: Plan, side: Side, environment: Environment) -> Kill:
    """Kill a worker while it runs messages, and start another one at once.

    Other messages come due meanwhile: some peers look for interrupted messages only when there is a new message.
    """
    with _stage(plan, side, environment, RUN_S) as stage:
        now_ms = _now_ms()
        messages = set(range(KILLED))
        later = {KILLED + n: now_ms + n * TRAFFIC_EVERY_MS for n in range(1, TRAFFIC)}
        stage.schedule({**dict.fromkeys(messages, now_ms + 1_000), **later})
        with stage.working() as worker:
            stage.wait_for_first(worker)
            time.sleep(INTO_RUN_S)
            worker.kill()
        killed_ns = time.time_ns()
        interrupted = messages & ({run.number for run in stage.began()} - {run.number for run in stage.ended()})
        with stage.working():
            wait_until(lambda: {run.number for run in stage.ended()} >= messages, BACK_WITHIN_S)
        began, times = stage.began(), Counter(run.number for run in stage.ended())
    back = [run.at_ns for run in began if run.number in interrupted and run.number in times and run.at_ns > killed_ns]
    return Kill(
        KILLED,
        len(interrupted),
        (max(back) - killed_ns) / 1e9 if back else None,
        sum(1 for number in messages if not times[number]),
        sum(1 for number in messages if times[number] > 1),
    )

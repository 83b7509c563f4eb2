"""Measure one side: drain, lateness, memory and load while idle."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.harness import Plan, check, quantile
from benchmarks.redis_server import empty

from .environments import Environment
from .processes import Run
from .sides import AIODELAY, Side
from .stage import Stage, now_ms, staged

__all__ = ["Delivery", "Drain", "Idle", "Late", "Measured", "delivery_of", "drain", "idle", "late"]

DRAINED = 20_000
PER_S, LATE_S = 100, 20.0
PENDING, IDLE_S, LEAST_IDLE_S = 20_000, 20.0, 2.0
STARTED_S = 2.0
"""The time for all processes of a worker to start, after the first of them has handled a message."""
SETTLE_S = 20.0
"""The time for a worker to fetch messages ahead, if it does."""
LEADS, LEAD_A_MESSAGE_MS = 4, 2
"""The time allowed for scheduling: the time of one message, times the first number, plus some ms for each message."""
HOUR_MS = 3_600_000


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


@dataclass
class Measured:
    """The figures of one side by round, and its failures in words."""

    drains: dict[int, Drain] = field(default_factory=dict)
    lateness: dict[int, Late] = field(default_factory=dict)
    idles: dict[int, Idle] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def drain(plan: Plan, side: Side, environment: Environment) -> Drain:
    """Schedule messages for later, wait until all are due, and then start a worker.

    The time runs from the begin of the first handler to the begin of the last one, so the start of the worker does not
    count. Its processor time does not count either: a worker that handles one message shows it.
    """
    n = plan.size(DRAINED)
    with staged(plan, side, environment) as stage, stage.ready() as worker:
        time.sleep(STARTED_S)
        start_s = worker.processor_s()
    with staged(plan, side, environment) as stage:
        due_ms = _scheduled_ahead(plan, stage, n)
        time.sleep(max(0.0, (max(due_ms.values()) - now_ms()) / 1000))
        server_s = stage.server_s()
        with stage.working() as worker:
            stage.wait_for_first(worker)
            stage.wait_for(n)
            worker_s, server_s = worker.processor_s() - start_s, stage.server_s() - server_s
        began = stage.began()
    wall_us = (began[-1].at_ns - began[0].at_ns) / 1000 / max(len(began) - 1, 1)
    each_us = 1e6 / len(began)
    return Drain(wall_us, worker_s * each_us, server_s * each_us, delivery_of(side, began, due_ms))


def _scheduled_ahead(plan: Plan, stage: Stage, n: int) -> dict[int, int]:
    """Schedule n messages that are all due at one instant, after the last of them has been scheduled."""
    lead_ms = 1_000
    while True:
        due_ms = dict.fromkeys(range(n), now_ms() + lead_ms)
        stage.schedule(due_ms)
        if now_ms() <= due_ms[0]:
            return due_ms
        empty(plan.redis)
        lead_ms *= 3


def late(plan: Plan, side: Side, environment: Environment) -> Late:
    """Schedule messages at a rate, all before the first is due, for a worker that is ready."""
    n = plan.size(round(PER_S * LATE_S))
    with staged(plan, side, environment) as stage, stage.ready():
        lead_ms = LEADS * stage.probe_ms + n * LEAD_A_MESSAGE_MS
        first_ms = now_ms() + lead_ms
        due_ms = {number: first_ms + number * 1000 // PER_S for number in range(n)}
        stage.schedule(due_ms)
        check(now_ms() <= first_ms, f"scheduling {n:,} messages took more than {lead_ms:,} ms")
        time.sleep((max(due_ms.values()) - now_ms()) / 1000)
        stage.wait_for(n)
        began = stage.began()
    first_runs = {run.number: run.at_ns for run in reversed(began)}
    lateness_ms = [at_ns / 1e6 - due_ms[number] for number, at_ns in first_runs.items()]
    return Late(quantile(lateness_ms, 0.5), quantile(lateness_ms, 0.99), delivery_of(side, began, due_ms))


def idle(plan: Plan, side: Side, environment: Environment) -> Idle:
    """Keep messages pending that are due in an hour, while a worker waits."""
    n, settle_s, span_s = plan.size(PENDING), SETTLE_S * plan.scale, max(IDLE_S * plan.scale, LEAST_IDLE_S)
    with staged(plan, side, environment) as stage, stage.ready() as worker:
        empty_bytes = stage.dataset_bytes()
        stage.schedule(dict.fromkeys(range(n), now_ms() + HOUR_MS))
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

"""`Health`: tells whether the service is ready, and the reasons if not.

`Health` reads from each store, and writes a message to it as a test: the probe message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from aiodelay.core.durations import MAX_HORIZON_MS, format_duration
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Cancel, Envelope, Put
from aiodelay.errors import AiodelayError, ClosedError
from aiodelay.ports import Bounded
from aiodelay.scheduler import Scheduler

from .config import Limits

__all__ = ["PROBE", "Health", "Report", "StoreReport"]

PROBE = "aiodelay:probe"
"""The id of the probe message. A store has at most one. `Health` cancels it at once, so it never becomes due."""
PROBE_LANE = "aiodelay.probe"
AGAIN_S = 1.0
"""Seconds for which the answer of a store is reused."""


@dataclass(slots=True)
class StoreReport:
    """The state of one store.

    Attributes:
        phase: `loading`, `ready` or `ended`.
        loaded: The number of partitions that have been read.
        of: The number of partitions in all.
        overdue_ms: The age of the oldest overdue message.
        fill: The used part of the server's memory limit, 0 to 1; None if the server has no limit, or does not tell it.
        reasons: The reasons why the store is not ready; empty if it is ready.
    """

    phase: str
    loaded: int
    of: int
    overdue_ms: int = 0
    fill: float | None = None
    reasons: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """The state of the service: the state of each store, and the reasons why the service is not ready."""

    reasons: list[str]
    stores: Mapping[str, StoreReport]

    @property
    def is_ready(self) -> bool:
        """Whether the service is ready: there is no reason why it is not."""
        return not self.reasons


class Health:
    """Checks the stores. Each store is checked at most once a second, however many callers ask.

    Args:
        schedulers: The schedulers by name, open or not.
        limits: The limits above which a store is not ready.
    """

    def __init__(self, schedulers: Mapping[str, Scheduler], limits: Limits) -> None:
        self._stores = {name: _StoreHealth(scheduler, limits) for name, scheduler in schedulers.items()}
        self.opening: set[str] = set(schedulers)
        """The stores whose scheduler and intakes are not open yet."""
        self.is_leaving = False
        """Whether the service has received the signal to end."""

    async def report(self) -> Report:
        """Check all stores at the same time, and return the state of the service."""
        found = dict(
            zip(self._stores, await asyncio.gather(*(each.report() for each in self._stores.values())), strict=True)
        )
        reasons = ["the service is ending"] if self.is_leaving else []
        for name, store in found.items():
            if name in self.opening and not store.reasons:
                store.reasons.append("its intakes are being opened")
            reasons += [f"{name}: {reason}" for reason in store.reasons]
        return Report(reasons, found)


class _StoreHealth:
    def __init__(self, scheduler: Scheduler, limits: Limits) -> None:
        self._scheduler, self._limits = scheduler, limits
        loop = asyncio.get_running_loop()
        self._time = loop.time
        self._asking = asyncio.Lock()
        self._answers: list[str] = []
        self._fill: float | None = None
        self._asked_s = self._written_s = -AGAIN_S
        self._write_again = True

    async def report(self) -> StoreReport:
        status = self._scheduler.status()
        report = StoreReport(status.phase, status.done, status.of, self._scheduler.overdue_age_ms)
        if status.phase == "loading":
            read = f": {status.done} of {status.of} partitions are read" if status.of else ""
            report.reasons.append("it is being opened" + read)
        if status.why:
            report.reasons.append(status.why)
        elif status.phase == "ended":
            report.reasons.append("it has ended")
        if status.phase == "ready":
            async with self._asking:
                if self._time() - self._asked_s >= AGAIN_S:
                    await self._ask()
            report.fill = self._fill
            report.reasons += self._answers
        return report

    async def _ask(self) -> None:
        answers: list[str] = []
        try:
            async with asyncio.timeout(self._limits.probe_timeout.total_seconds()):
                await self._measure(answers)
                await self._write(answers)
        except TimeoutError:
            answers.append(f"no answer within {_shown(self._limits.probe_timeout)}")
        except ClosedError:
            return
        except AiodelayError as error:
            answers.append(str(error))
        finally:
            self._asked_s = self._time()
        self._answers, self._write_again = answers, bool(answers)

    async def _measure(self, answers: list[str]) -> None:
        store = self._scheduler.opened_store()
        self._fill = await store.fill() if isinstance(store, Bounded) else None
        if self._fill is not None and self._fill > self._limits.memory:
            answers.append(f"{self._fill:.0%} of its memory is used, more than {self._limits.memory:.0%}")

    async def _write(self, answers: list[str]) -> None:
        """Store a probe message and cancel it, in one step if the store can.

        If a crash leaves the message behind, the next probe replaces and cancels it.
        """
        if not self._write_again and self._time() - self._written_s < self._limits.probe_every.total_seconds():
            return
        put = Put(new_op(), Envelope(PROBE, PROBE_LANE), After(MAX_HORIZON_MS))
        for answer in await self._scheduler.carry_out([put, Cancel(new_op(), PROBE)]):
            if isinstance(answer, AiodelayError):
                raise answer
        self._written_s = self._time()


def _shown(length: timedelta) -> str:
    return format_duration(length // timedelta(milliseconds=1))

"""Stores that break a promise on purpose. If the fault tests did not notice them, those tests would prove nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace

from aiodelay.core.values import (
    At,
    Cancel,
    Claimed,
    Command,
    Demand,
    Done,
    Lane,
    Outcome,
    Put,
    Settlement,
    SettleOutcome,
    SourcePosition,
    Stored,
)
from aiodelay.ports import Work
from aiodelay.sqlite import SqliteStore

__all__ = ["BUGS", "AcknowledgesEarly", "DeliversEarly", "IgnoresCancels", "SettlesFirst"]


class SettlesFirst(SqliteStore):
    """A store that settles a message when it is claimed, so that delivery is at most once."""

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Any]:
        async with super().work(worker, lanes) as work:
            yield _SettlesFirst(work)


class _SettlesFirst:
    def __init__(self, work: Work) -> None:
        self._work = work

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - an attribute of any type
        return getattr(self._work, name)

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        claimed = await self._work.claim(demand, request=request, lease_ms=lease_ms)
        await self._work.settle([Done(each.record.id, each.record.revision, each.token) for each in claimed.claims])
        return claimed

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        return [SettleOutcome.SETTLED] * len(settlements)


class AcknowledgesEarly(SqliteStore):
    """A store that acknowledges a command before it stores it."""

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        self._later = asyncio.create_task(self._apply_later(commands))
        now = self.now_ms()
        return [Stored("stored", now, now) for _ in commands]

    async def _apply_later(self, commands: Sequence[Command]) -> None:
        await asyncio.sleep(0.05)  # the time from the answer until the command is stored
        await super().apply(commands)


class IgnoresCancels(SqliteStore):
    """A store that answers `cancelled` to a cancel and does nothing."""

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        kept = [command for command in commands if not isinstance(command, Cancel)]
        outcomes = iter(await super().apply(kept))
        return [Stored("cancelled", 1, 1) if isinstance(command, Cancel) else next(outcomes) for command in commands]


EARLY_MS = 2_000


class DeliversEarly(SqliteStore):
    """A store that stores each due time two seconds early, and answers with the right one."""

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        early = [
            replace(each, due=At(each.due.ms - EARLY_MS))
            if isinstance(each, Put) and isinstance(each.due, At)
            else each
            for each in commands
        ]
        outcomes = await super().apply(early, source=source)
        return [
            replace(outcome, due_ms=outcome.due_ms + EARLY_MS) if isinstance(outcome, Stored) else outcome
            for outcome in outcomes
        ]


BUGS: dict[str, type[SqliteStore]] = {
    class_.__name__: class_ for class_ in (SettlesFirst, AcknowledgesEarly, IgnoresCancels, DeliversEarly)
}

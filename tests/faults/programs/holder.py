"""Take messages one at a time, with open claims on the next messages, which have not begun.

It says `claimed <id>`, `renewed <outcome> <epoch ms>` of each claim but that on the message which it has begun, and
`begun <payload>`; it ends a message, and goes on to the next, once it is told to by a line.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Mapping, Sequence

import msgspec

from aiodelay import Scheduler
from aiodelay.core.values import Claimed, Demand, Lane, Renewal, RenewOutcome
from aiodelay.ports import Work

__all__ = ["LANE", "Plan"]

LANE = "held"


class Plan(msgspec.Struct, frozen=True):
    """From where it takes messages."""

    store: str
    namespace: str


def say(line: str) -> None:
    print(line, flush=True)


class Told:
    """Says what a store's dispatching side answers."""

    def __init__(self, work: Work) -> None:
        self.begun = ""
        self._claim, self._renew = work.claim, work.renew
        work.claim, work.renew = self.claim, self.renew  # type: ignore[method-assign]

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        claimed = await self._claim(demand, request=request, lease_ms=lease_ms)
        for claim in claimed.claims:
            say(f"claimed {claim.record.id}")
        return claimed

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        outcomes = await self._renew(renewals)
        for renewal, outcome in zip(renewals, outcomes, strict=True):
            if renewal.id != self.begun:
                say(f"renewed {outcome.value} {time.time_ns() // 1_000_000}")
        return outcomes


async def main(plan: Plan) -> None:
    logging.basicConfig(level=logging.INFO)
    scheduler = Scheduler(plan.store, namespace=plan.namespace)
    async with scheduler:
        assert scheduler._running is not None
        assert scheduler._running._loops is not None
        told = Told(scheduler._running._loops._work)
        async for message in scheduler.messages(LANE, concurrency=4):
            with message as payload:
                told.begun = message.context.id
                say(f"begun {payload.decode()}")
                await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Plan)))

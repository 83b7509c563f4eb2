"""A delay box that kills or stops itself (SIGKILL, SIGSTOP) right before or after one of its steps.

It takes small batches, and its sessions are short: few messages are many batches, and others wait little.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from aiodelay.backends.kafka.client import Transactions
from aiodelay.backends.kafka.topics import intake, positions
from aiodelay.backends.kafka.topics.intake import Intake
from aiodelay.backends.redis.sharded import intakes
from aiodelay.delay_box import DelayBox
from tests.support.sessions import shorten_sessions

__all__ = ["BATCH", "LEASE_MS", "STEPS", "Plan", "with_short_lease"]

BATCH, LEASE_MS = 40, 3_000


class IntakeTransactions(Transactions):
    """Those of intakes, apart from those of partitions."""


class Parts:
    """The calls to single shards of a Redis namespace: here one after another, so that a box can end between two."""

    @staticmethod
    async def call(part: Awaitable[Any]) -> Any:  # noqa: ANN401 - whatever it returns
        """Make one call."""
        return await part

    @staticmethod
    async def call_all(parts: Sequence[Awaitable[Any]]) -> list[Any]:
        """Make all calls of a batch, or of the beginning."""
        return [await Parts.call(each) for each in parts]


STEPS: dict[str, tuple[type, str]] = {
    "take": (Intake, "_take_some"),
    "bury": (Intake, "_bury"),
    "apply": (Intake, "_apply"),
    "part": (Parts, "call"),
    "begin": (IntakeTransactions, "begin"),
    "commit": (IntakeTransactions, "commit"),
}


class Plan(Struct):
    """What a box does, and where it ends.

    Attributes:
        store: URL.
        source: URL.
        allow: Topics.
        namespace: In the store.
        step: Of `STEPS`, "": none.
        when: `before` or `after` it.
        nth: Which time.
        signal: By what.
        has_short_lease: Keeps what it delivers for a short time only.
    """

    store: str
    source: str
    allow: list[str]
    namespace: str
    step: str = ""
    when: str = "before"
    nth: int = 1
    signal: int = signal.SIGKILL
    has_short_lease: bool = False


def end_at(plan: Plan) -> None:
    """Let this process end, or stand still, there."""
    setattr(positions, "Transactions", IntakeTransactions)  # noqa: B010 - it is no public name
    owner, name = STEPS[plan.step]
    original: Callable[..., Awaitable[Any]] = getattr(owner, name)
    times = 0

    async def watched(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - whatever it takes and returns
        nonlocal times
        times += 1
        is_it = times == plan.nth
        if is_it and plan.when == "before":
            os.kill(os.getpid(), plan.signal)
        answer = await original(*arguments, **options)
        if is_it and plan.when == "after":
            os.kill(os.getpid(), plan.signal)
        return answer

    setattr(owner, name, watched)


def with_short_lease(box: DelayBox) -> DelayBox:
    """Return the box, which keeps what it delivers for a short time only."""
    box._scheduler._options = msgspec.structs.replace(box._scheduler._options, lease_ms=LEASE_MS)
    return box


async def main(plan: Plan) -> None:
    """Run the box."""
    intake.MAX_CLAIM_MESSAGES = BATCH  # type: ignore[attr-defined]
    shorten_sessions()
    if plan.step == "part":
        setattr(intakes, "all_of", Parts.call_all)  # noqa: B010 - it is no public name
    if plan.step:
        end_at(plan)
    box = DelayBox(plan.store, plan.source, allow=plan.allow, namespace=plan.namespace)
    async with with_short_lease(box) if plan.has_short_lease else box:
        print("open", flush=True)
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("aiokafka").setLevel(logging.WARNING)
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Plan)))

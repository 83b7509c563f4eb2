"""A Kafka owner with its index on disk: it ends at a step of writing a checkpoint, or finds the disk full.

Says `n` and how many messages stand, `in file` and whether its index still is, `closed`.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from aiodelay.backends.kafka.pending.far_index import FarIndex
from aiodelay.backends.kafka.store.partition import index_checkpoints
from aiodelay.core.values import Query
from aiodelay.kafka import KafkaStore
from tests.faults.programs.worker import say
from tests.faults.test_kafka_store import now_ms, put
from tests.support.waiting import until

__all__ = ["Plan"]

N, FAR_MS = 300, 3_600_000


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What it does.

    Attributes:
        store: The store's URL.
        step: Of a checkpoint, before which it ends: the start of a statement, `flush` or `end`; `full`, or `none`.
    """

    store: str
    step: str


def die_at(step: str) -> None:
    """End as `kill -9` does before a step."""
    run, commit = FarIndex._run, FarIndex.commit

    def dying_run(far: FarIndex, statement: str, values: Sequence[Any] = ()) -> Any:  # noqa: ANN401 - a cursor
        if statement.startswith(step):
            os.kill(os.getpid(), signal.SIGKILL)
        return run(far, statement, values)

    def dying_commit(far: FarIndex, state: bytes) -> None:
        far._flush()
        if step == "flush":
            os.kill(os.getpid(), signal.SIGKILL)
        commit(far, state)
        if step == "end":
            os.kill(os.getpid(), signal.SIGKILL)

    patched: Any = FarIndex
    patched._run, patched.commit = dying_run, dying_commit


async def main(plan: Plan) -> None:
    index_checkpoints.PAUSE_S = index_checkpoints.LONGEST_PAUSE_S = 1000.0
    async with KafkaStore(plan.store) as store, store.work("w", ["kafka"]):
        (owned,) = store.partitions.values()
        await store.apply([put(i, "t", now_ms() + 2 * FAR_MS) for i in range(5_000, 5_000 + N)])
        if plan.step == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
            owned._checkpoints.write()
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            await until(lambda: owned.is_ready and not owned.index.state.far.is_in_file, "the index has left its file")
        say(f"n {len(await store.search(Query(limit=2000)))}")
        say(f"in file {owned.index.state.far.is_in_file}")
        if plan.step not in ("full", "none"):
            die_at(plan.step)
            owned._checkpoints.write()
    say("closed")


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Plan)))

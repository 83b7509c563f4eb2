"""The commands of a Kafka partition's owner, if the session ends while a command waits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aiodelay.backends.kafka.client import FencedError
from aiodelay.backends.kafka.pending.pending_index import PendingIndex
from aiodelay.backends.kafka.pending.placement import Placement
from aiodelay.backends.kafka.store.partition.commands import OwnerCommands
from aiodelay.backends.kafka.store.partition.horizon import Horizon
from aiodelay.backends.kafka.store.partition.ownership import Ownership
from aiodelay.backends.kafka.store.partition.read_progress import ReadProgress
from aiodelay.backends.kafka.store.partition.stall_watch import StallWatch
from aiodelay.core.dict_table.table import Worker
from aiodelay.core.transitions import NO_OP
from aiodelay.core.values import Demand, Envelope, Record
from aiodelay.core.wakeup import WakeUp
from aiodelay.kafka.records import Read, encode_record
from aiodelay.testing.clock import VirtualClock

pytestmark = pytest.mark.asyncio

HORIZON_MS = 10_000


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends"])
async def test_b1_a_session_that_ends_while_far_messages_come_near_claims_nothing(*, ends: bool) -> None:
    clock = VirtualClock()
    due_ms = clock.now_ms() + 2 * HORIZON_MS
    far = Read(0, clock.now_ms(), *encode_record(Record(Envelope("m", "work"), 0, due_ms, NO_OP)))
    index = PendingIndex(clock=clock, placement=Placement("t/0"), claims=count(1))
    index.far.look_ahead(clock.now_ms() + HORIZON_MS)
    index.reader.read(far)
    clock.move(2 * HORIZON_MS)

    progress, to_write = ReadProgress(index, patience_s=60), WakeUp()
    cluster = cast("Any", SimpleNamespace(name="kafka", timeout_ms=1_000))
    ownership = Ownership("t/0", cluster, progress, lambda: "", to_write)
    ownership.serve()

    async def fetch(offsets: Sequence[int]) -> list[Read]:
        assert offsets == [0]
        if ends:
            ownership.end_at_once(FencedError())
            ownership.end()
        return [far]

    commands = OwnerCommands(
        cast("Any", SimpleNamespace(clock=clock, cluster=cluster)),
        progress=progress,
        ownership=ownership,
        horizon=Horizon(lambda: index, fetch, clock, on_near=lambda: None, ms=HORIZON_MS, name="kafka"),
        stalls=StallWatch(ownership),
        to_write=to_write,
    )
    claimed = await commands.claim({"work": Demand(10)}, 8_000, 1, Worker("worker", (), 0))
    assert [claim.record.id for claim in claimed.claims] == ([] if ends else ["m"])

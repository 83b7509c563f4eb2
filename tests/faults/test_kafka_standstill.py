"""S5, S7: an owner that may have lost its partition begins no more messages, claimed or not."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from threading import Event, Thread

import pytest
from msgspec.structs import replace

from aiodelay import Context, Scheduler
from aiodelay.backends.kafka import KafkaStore
from aiodelay.backends.kafka.store import store as store_module
from aiodelay.backends.kafka.store.partition import Partition
from aiodelay.backends.kafka.topics import group
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Cancel, Demand, Envelope, Put, Stored
from tests.support.kafka import new_name
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

LEASE_MS = 1_000


def put(message_id: str) -> Put:
    return Put(new_op(), Envelope(message_id, "work"), After(0))


def only_partition(store: KafkaStore) -> Partition:
    (partition,) = store.partitions.values()
    return partition


async def cancelled(store: KafkaStore, message_id: str) -> str:
    (outcome,) = await store.apply([Cancel(new_op(), message_id)])
    assert isinstance(outcome, Stored)
    return outcome.answer


async def test_s7_an_owner_that_has_read_another_ones_first_record_claims_nothing(kafka: str) -> None:
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=1&members=1"
    async with KafkaStore(url) as old, old.work("old", ["work"]) as of_old:
        await old.apply([put(f"m{i}") for i in range(3)])
        former = only_partition(old)
        session = former.session
        async with KafkaStore(url) as new, new.work("new", ["work"]):
            owner = only_partition(new)
            assert await owner.until_ready()
            barrier = owner.session.barrier
            assert barrier is not None
            await former.until_read(barrier)
            assert former.session.barrier != session.barrier
            assert await cancelled(new, "m0") == "cancelled"
            claimed = await of_old.claim({"work": Demand(9)}, request="1", lease_ms=15_000)
            assert [each.record.id for each in claimed.claims] in ([], ["m1", "m2"]), "m0 is cancelled"


async def test_s5_what_an_owner_has_claimed_before_it_stood_still_does_not_begin_after_a_cancel_elsewhere(
    kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_TRAITS", replace(store_module._TRAITS, longest_lease_ms=LEASE_MS))
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=1&members=1"
    stands_still, is_cancelled = Event(), Event()
    began: list[tuple[str, bool]] = []
    answers: list[str] = []

    async def take_over() -> None:
        async with KafkaStore(url) as other, other.work("other", []):
            assert await only_partition(other).until_ready()
            answers.extend([await cancelled(other, f"m{i}") for i in range(1, 5)])

    def beside() -> None:
        stands_still.wait(60)
        asyncio.run(take_over())
        is_cancelled.set()

    scheduler = Scheduler(url)

    @scheduler.handler(name="work", concurrency=5)
    async def work(payload: bytes, context: Context) -> None:
        began.append((context.id, is_cancelled.is_set()))
        if context.id == "m0":
            stands_still.set()
            is_cancelled.wait(60)
            time.sleep(LEASE_MS / 1000)  # noqa: ASYNC251 - the lease of the other claims ends meanwhile

    thread = Thread(target=beside)
    thread.start()
    async with scheduler:
        due = datetime.now(UTC) + timedelta(seconds=2)
        for i in range(5):
            await scheduler.schedule(b"", to="handler:work", at=due, id=f"m{i}")
        await until(is_cancelled.is_set, "the other owner has cancelled them")
        await asyncio.to_thread(thread.join)
    assert len(answers) == 4
    late = {message_id for message_id, is_late in began if is_late and message_id != "m0"}
    assert not late & {f"m{i}" for i, answer in enumerate(answers, 1) if answer == "cancelled"}


async def test_s7_a_member_whose_heartbeats_are_not_acknowledged_claims_nothing(
    kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=1"
    async with KafkaStore(url) as store, store.work("w", ["work"]) as work:
        await until(lambda: work.status().phase == "ready", "it owns the partition")
        await store.apply([put("m")])
        monkeypatch.setattr(group, "SESSION_MS", -1)  # as if the last one was too long ago
        assert work.status().phase == "loading"
        assert "acknowledged no heartbeat" in work.status().why
        assert (await work.claim({"work": Demand(1)}, request="1", lease_ms=15_000)).claims == []
        monkeypatch.undo()
        await until(lambda: work.status().phase == "ready", "it is ready again")
        (claim,) = (await work.claim({"work": Demand(1)}, request="2", lease_ms=15_000)).claims
        assert claim.record.id == "m"


async def test_f3_a_member_that_the_group_may_have_forgotten_begins_no_session(
    kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "HEARTBEAT_MS", 60_000)  # so a session that waits for heartbeats does not begin here
    monkeypatch.setattr(group, "SESSION_MS", 180_000)
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=1"
    async with KafkaStore(url) as store, store.work("w", ["work"]) as work:
        await until(lambda: work.status().phase == "ready", "it owns the partition")
        (member,) = store.assignment.groups.values()
        async with asyncio.timeout(60):
            await member.may_begin(is_fenced=False)
        monkeypatch.setattr(group, "SESSION_MS", -1)  # as if the last heartbeat was too long ago
        waiting = asyncio.create_task(member.may_begin(is_fenced=False))
        await asyncio.sleep(0.1)  # time in which it must not begin
        assert not waiting.done(), "the group may have given its partitions to another member"
        waiting.cancel()


async def test_heartbeats_are_noted_as_of_when_they_were_sent(kafka: str) -> None:
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=1"
    async with KafkaStore(url) as store, store.work("w", ["work"]) as work:
        await until(lambda: work.status().phase == "ready", "it owns the partition")
        (member,) = store.assignment.groups.values()
        joined_s = member._heard_s
        await until(lambda: member._heard_s > joined_s, "a heartbeat was acknowledged")
        assert member.silence == ""

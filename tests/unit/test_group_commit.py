"""Group commit: calls share a round trip, wait in order and within bounds, and each gets its own outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
from msgspec.structs import replace

from aiodelay import (
    CancelOutcome,
    Conflict,
    DuplicateIdError,
    Message,
    OutcomeUnknownError,
    PartlyScheduledError,
    Scheduled,
    Scheduler,
    StoreBusyError,
    StoreUnavailableError,
)
from aiodelay.core.ids import new_op
from aiodelay.core.values import (
    MAX_CLAIM_BYTES,
    MAX_CLAIM_MESSAGES,
    Cancel,
    Command,
    Outcome,
    Refused,
    SourcePosition,
    Unknown,
)
from aiodelay.engine.sending.group_commit import COMMAND_BYTES, MAX_WAITING_BYTES, GroupCommit
from aiodelay.errors import ClosedError
from aiodelay.memory import MemoryStore
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.faults import FaultyStore

pytestmark = pytest.mark.asyncio

TIMEOUT_S = 10
MIB = 1 << 20


class NotingStore(MemoryStore):
    """Notes which commands arrived, batch by batch."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock=clock)
        self.batches: list[list[str]] = []

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        self.batches.append([command.id for command in commands])
        return await super().apply(commands, source=source)


class Stage:
    """A group commit that runs, and the store under it."""

    def __init__(self, clock: VirtualClock) -> None:
        self.noting = NotingStore(clock)
        self.store = FaultyStore(self.noting)
        self.commit = GroupCommit(self.store, clock, TIMEOUT_S * 1000)
        self.running = asyncio.create_task(self.commit.run())

    def send(self, *ids: str, size: int = 0) -> asyncio.Task[Sequence[Outcome]]:
        async def wait() -> Sequence[Outcome]:
            return await self.commit.submit([Cancel(new_op(), each) for each in ids], size)

        return asyncio.create_task(wait(), name=" ".join(ids))

    async def block(self) -> asyncio.Task[Sequence[Outcome]]:
        """Have the store hang with a first command, so that others gather."""
        self.store.inject("hang", "apply")
        first = self.send("first")
        await asyncio.sleep(0.001)
        assert self.store.calls["apply"] == 1
        return first

    @property
    def batches(self) -> list[list[str]]:
        return self.noting.batches


@pytest_asyncio.fixture
async def stage(clock: VirtualClock) -> AsyncIterator[Stage]:
    stage = Stage(clock)
    yield stage
    stage.store.heal()
    stage.commit.close()
    await stage.running
    assert asyncio.all_tasks() == {asyncio.current_task()}


# --- batches ----------------------------------------------------------------------------------------------


async def test_concurrent_calls_share_a_round_trip_in_order(stage: Stage) -> None:
    tasks = [stage.send(f"m{number}") for number in range(100)]
    await asyncio.gather(*tasks)
    assert stage.batches == [[f"m{number}" for number in range(100)]]


async def test_what_gathers_while_a_batch_is_under_way_leaves_as_the_next(stage: Stage) -> None:
    first = await stage.block()
    tasks = [stage.send(f"m{number}") for number in range(3)]
    await asyncio.sleep(1)
    stage.store.heal()
    await asyncio.gather(first, *tasks)
    assert stage.batches == [["first"], ["m0", "m1", "m2"]]


async def test_a_batch_holds_so_many_commands(stage: Stage) -> None:
    await asyncio.gather(*(stage.send(f"m{number}") for number in range(2 * MAX_CLAIM_MESSAGES + 1)))
    assert [len(batch) for batch in stage.batches] == [MAX_CLAIM_MESSAGES, MAX_CLAIM_MESSAGES, 1]
    assert [each for batch in stage.batches for each in batch] == [
        f"m{number}" for number in range(2 * MAX_CLAIM_MESSAGES + 1)
    ]


async def test_a_store_that_divides_a_batch_gets_more_commands_at_once(stage: Stage) -> None:
    most = 3 * MAX_CLAIM_MESSAGES
    stage.noting.traits = replace(stage.noting.traits, commands_at_once=most)
    await asyncio.gather(*(stage.send(f"m{number}") for number in range(most + 1)))
    assert [len(batch) for batch in stage.batches] == [most, 1]


async def test_a_batch_holds_so_many_bytes_and_a_bigger_one_goes_alone(stage: Stage) -> None:
    half = MAX_CLAIM_BYTES // 2
    tasks = [stage.send("a", size=half), stage.send("b", size=half - 2 * COMMAND_BYTES)]
    tasks += [stage.send("c", size=2 * MAX_CLAIM_BYTES), stage.send("d")]
    await asyncio.gather(*tasks)
    assert stage.batches == [["a", "b"], ["c"], ["d"]]


async def test_commands_of_one_caller_stay_together(stage: Stage) -> None:
    many = [f"n{number}" for number in range(MAX_CLAIM_MESSAGES - 1)]
    outcomes = await asyncio.gather(stage.send("a", "b"), stage.send(*many))
    assert stage.batches == [["a", "b"], many]
    assert [len(each) for each in outcomes] == [2, len(many)]


# --- cancelled callers ------------------------------------------------------------------------------------


async def test_cancelled_before_its_batch_left_a_caller_withdraws(stage: Stage) -> None:
    first = await stage.block()
    tasks = [stage.send(each) for each in "abc"]
    await asyncio.sleep(1)
    tasks[1].cancel()
    await asyncio.sleep(0)
    stage.store.heal()
    await asyncio.gather(first, tasks[0], tasks[2])
    assert stage.batches == [["first"], ["a", "c"]]


async def test_cancelled_after_its_batch_left_the_batch_goes_on(stage: Stage) -> None:
    stage.store.inject("hang", "apply")
    tasks = [stage.send(each) for each in "abc"]
    await asyncio.sleep(1)
    tasks[1].cancel()
    await asyncio.sleep(1)
    stage.store.heal()
    await asyncio.gather(tasks[0], tasks[2])
    assert stage.batches == [["a", "b", "c"]]
    assert tasks[1].cancelled()


async def test_all_cancelled_nothing_is_sent(stage: Stage) -> None:
    first = await stage.block()
    tasks = [stage.send(each) for each in "abc"]
    await asyncio.sleep(1)
    for task in tasks:
        task.cancel()
    stage.store.heal()
    await first
    await asyncio.sleep(1)
    assert stage.batches == [["first"]]


# --- bounds -----------------------------------------------------------------------------------------------


async def test_a_caller_waits_for_so_long_then_learns_that_nothing_was_sent(stage: Stage) -> None:
    first = await stage.block()
    tasks = [stage.send("a", size=1_000), stage.send("b", size=500)]
    loop = asyncio.get_running_loop()
    begun = loop.time()
    with pytest.raises(StoreBusyError) as caught:
        await tasks[0]
    assert loop.time() - begun == pytest.approx(TIMEOUT_S)
    error = caught.value
    assert (error.message_id, error.waited_ms) == ("a", TIMEOUT_S * 1000)
    assert error.waiting_bytes == 1_500 + 2 * COMMAND_BYTES
    assert "'a'" in str(error)
    assert "10000 ms" in str(error)
    assert "1700 bytes" in str(error)
    with pytest.raises(StoreBusyError):
        await tasks[1]
    stage.store.heal()
    await first
    await asyncio.sleep(0.001)
    assert stage.batches == [["first"]]


async def test_each_caller_waits_for_its_own_time(stage: Stage) -> None:
    first = await stage.block()
    early = stage.send("early")
    await asyncio.sleep(6)
    late = stage.send("late")
    await asyncio.sleep(5)
    assert isinstance(early.exception(), StoreBusyError)
    stage.store.heal()
    await asyncio.gather(first, late)
    assert stage.batches == [["first"], ["late"]]


async def test_a_caller_whose_batch_left_waits_as_long_for_the_answer(stage: Stage) -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    outcomes = await (await stage.block())
    assert loop.time() - begun == pytest.approx(TIMEOUT_S)
    assert outcomes == [Unknown("no answer within 10s")]
    later = stage.send("later")
    await asyncio.sleep(1)
    stage.store.heal()
    await later
    assert stage.batches == [["first"], ["later"]], "one batch at a time: what is under way is not overtaken"


async def test_what_must_not_be_sent_any_more_is_not(stage: Stage, clock: VirtualClock) -> None:
    first = await stage.block()
    repeated = stage.commit.submit([Cancel(new_op(), "repeated")], 0, latest_ms=clock.monotonic_ms() + 1_000)
    await asyncio.sleep(2)
    stage.store.heal()
    with pytest.raises(StoreBusyError):
        await repeated
    await first
    assert stage.batches == [["first"]]


async def test_past_the_bound_callers_wait_in_order_and_are_served(stage: Stage) -> None:
    first = await stage.block()
    tasks = [stage.send(f"m{number}", size=20 * MIB) for number in range(12)]
    most = 0
    while not tasks[-1].done():
        await asyncio.sleep(0)
        most = max(most, stage.commit._bytes)
        if stage.store.calls["apply"] == 1 and most:
            stage.store.heal()
            tasks.append(stage.send("last"))  # small, but no one overtakes
    await asyncio.gather(first, *tasks)
    assert most <= MAX_WAITING_BYTES
    assert stage.batches == [["first"], *([f"m{number}"] for number in range(12)), ["last"]]


async def test_past_the_bound_a_caller_learns_after_the_same_time(stage: Stage) -> None:
    first = await stage.block()
    full = stage.send("full", size=MAX_WAITING_BYTES)
    await asyncio.sleep(4)
    more = stage.send("more", size=7)
    with pytest.raises(StoreBusyError):
        await full
    begun = asyncio.get_running_loop().time()
    with pytest.raises(StoreBusyError) as caught:
        await more
    assert asyncio.get_running_loop().time() - begun == pytest.approx(4, abs=0.01)
    assert (caught.value.message_id, caught.value.waited_ms) == ("more", TIMEOUT_S * 1000)
    stage.store.heal()
    await first
    await asyncio.sleep(0.001)
    assert stage.batches == [["first"]]


async def test_past_the_bound_a_cancelled_caller_withdraws_and_blocks_no_one(stage: Stage) -> None:
    first = await stage.block()
    full = stage.send("full", size=MAX_WAITING_BYTES)
    tasks = [stage.send(each, size=MIB) for each in "abc"]
    await asyncio.sleep(1)
    tasks[0].cancel()
    full.cancel()
    await asyncio.sleep(1)
    stage.store.heal()
    await asyncio.gather(first, tasks[1], tasks[2])
    assert stage.batches == [["first"], ["b"], ["c"]]


# --- the end ----------------------------------------------------------------------------------------------


async def test_closing_sends_what_was_queued(stage: Stage) -> None:
    first = await stage.block()
    tasks = [stage.send("a"), stage.send("full", size=MAX_WAITING_BYTES), stage.send("room")]
    await asyncio.sleep(1)
    stage.commit.close()
    stage.store.heal()
    await asyncio.gather(first, *tasks, stage.running)
    assert stage.batches == [["first"], ["a"], ["full"], ["room"]]


async def test_after_the_end_a_call_is_refused(stage: Stage) -> None:
    stage.commit.close()
    await stage.running
    with pytest.raises(ClosedError):
        await stage.send("late")


async def test_a_store_that_never_answers_leaves_no_caller_waiting(clock: VirtualClock) -> None:
    stage = Stage(clock)
    first = await stage.block()
    tasks = [stage.send("a"), stage.send("full", size=MAX_WAITING_BYTES), stage.send("room")]
    await asyncio.sleep(1)
    stage.running.cancel()
    done, _ = await asyncio.wait([first, *tasks, stage.running])
    assert len(done) == 5
    assert isinstance(first.exception(), OutcomeUnknownError), "it had left"
    assert all(isinstance(task.exception(), ClosedError) for task in tasks)


# --- what callers of a scheduler learn --------------------------------------------------------------------


async def schedule(scheduler: Scheduler, message_id: str, conflict: Conflict | None = None) -> Scheduled:
    return await scheduler.schedule(
        b"", to="handler:work", delay="1h", id=message_id, conflict=conflict or Conflict.replace()
    )


async def test_one_refused_command_harms_no_other_of_its_batch(scheduler: Scheduler, faulty_store: FaultyStore) -> None:
    async with scheduler:
        await schedule(scheduler, "b")
        results = await asyncio.gather(
            schedule(scheduler, "a"),
            schedule(scheduler, "b", Conflict.error()),
            schedule(scheduler, "c"),
            scheduler.cancel("nobody"),
            return_exceptions=True,
        )
        assert faulty_store.applied == [1, 4]
        assert isinstance(results[0], Scheduled)
        assert isinstance(results[1], DuplicateIdError)
        assert results[1].message_id == "b"
        assert isinstance(results[2], Scheduled)
        assert results[3] is CancelOutcome.NOT_FOUND
        assert await scheduler.get("a") is not None
        assert await scheduler.get("c") is not None


async def test_unavailable_is_tried_again_within_the_time_limit(
    scheduler: Scheduler, faulty_store: FaultyStore
) -> None:
    async with scheduler:
        faulty_store.inject("unavailable", "apply", times=4)
        await schedule(scheduler, "m")
        assert await scheduler.get("m") is not None
    assert faulty_store.calls["apply"] == 5


async def test_unavailable_for_too_long_is_an_error_and_surely_not_stored(
    scheduler: Scheduler, faulty_store: FaultyStore
) -> None:
    async with scheduler:
        faulty_store.inject("unavailable", "apply", times=None)
        begun = asyncio.get_running_loop().time()
        with pytest.raises(StoreUnavailableError, match="'m' was not stored"):
            await schedule(scheduler, "m")
        assert asyncio.get_running_loop().time() - begun == pytest.approx(10, abs=1)
        faulty_store.heal()
        await asyncio.sleep(60)
        assert await scheduler.get("m") is None


async def test_in_doubt_the_same_op_is_sent_again(clock: VirtualClock) -> None:
    memory = NotingStore(clock)
    store = FaultyStore(memory)
    async with Scheduler(store, clock=clock) as scheduler:
        store.inject("reply_lost", "apply", times=3)
        stored = await schedule(scheduler, "m", Conflict.error())  # with another op it would be a duplicate
        assert stored.id == "m"
    assert memory.batches == [["m"]] * 4


@pytest.mark.parametrize(("fault", "is_stored"), [("reply_lost", True), ("request_lost", False)])
async def test_in_doubt_for_too_long_the_error_resolves_it(
    scheduler: Scheduler, faulty_store: FaultyStore, fault: str, is_stored: bool
) -> None:
    async with scheduler:
        faulty_store.inject(fault, "apply", times=None)  # type: ignore[arg-type]
        with pytest.raises(OutcomeUnknownError) as caught:
            await schedule(scheduler, "m", Conflict.error())
        assert caught.value.message_id == "m"
        assert (await scheduler.get("m") is not None) is is_stored
        with pytest.raises(OutcomeUnknownError):
            await caught.value.retry()  # as long as it lasts
        faulty_store.heal()
        answer = await caught.value.retry()
        assert isinstance(answer, Scheduled)
        assert await scheduler.get("m") is not None
        assert await caught.value.retry() == answer


async def test_in_doubt_then_surely_not_is_still_in_doubt(scheduler: Scheduler, faulty_store: FaultyStore) -> None:
    async with scheduler:
        faulty_store.inject("reply_lost", "apply")
        faulty_store.inject("unavailable", "apply", times=None)
        with pytest.raises(OutcomeUnknownError):
            await schedule(scheduler, "m")


async def test_in_doubt_and_then_too_busy_is_still_in_doubt(scheduler: Scheduler, faulty_store: FaultyStore) -> None:
    async with scheduler:
        faulty_store.inject("reply_lost", "apply")
        messages = [Message(b"", delay="1h", to="handler:work", id=each) for each in "ab"]
        many = asyncio.create_task(scheduler.schedule_many(messages))
        await asyncio.sleep(0.01)
        faulty_store.inject("hang", "apply")
        hanging = asyncio.create_task(schedule(scheduler, "c"))  # before the two are sent again: they wait behind it
        with pytest.raises(PartlyScheduledError) as partly:
            await many
        assert [type(each.error) for each in partly.value.rejected] == [OutcomeUnknownError] * 2
        assert [str(each.error)[:18] for each in partly.value.rejected] == ["whether message 'a", "whether message 'b"]
        with pytest.raises(OutcomeUnknownError):
            await hanging
        faulty_store.heal()
        assert await scheduler.get("a") is not None


async def test_in_doubt_and_then_closed_is_still_in_doubt(scheduler: Scheduler, faulty_store: FaultyStore) -> None:
    async with scheduler:
        faulty_store.inject("reply_lost", "apply")
        in_doubt = asyncio.create_task(schedule(scheduler, "m"))
        await asyncio.sleep(0.01)
    with pytest.raises(OutcomeUnknownError):
        await in_doubt


async def test_a_retry_that_is_refused_leaves_the_first_in_doubt(
    scheduler: Scheduler, faulty_store: FaultyStore
) -> None:
    async with scheduler:
        faulty_store.inject("reply_lost", "apply", times=None)
        with pytest.raises(OutcomeUnknownError) as caught:
            await schedule(scheduler, "m")
        faulty_store.heal()
        unavailable = faulty_store.inject("unavailable", "apply", times=None)
        with pytest.raises(OutcomeUnknownError):
            await caught.value.retry()
        assert unavailable.hits > 1
        faulty_store.heal()
        assert isinstance(await caught.value.retry(), Scheduled)


async def test_a_retry_that_finds_the_store_too_busy_leaves_the_first_in_doubt(
    scheduler: Scheduler, faulty_store: FaultyStore
) -> None:
    async with scheduler:
        faulty_store.inject("reply_lost", "apply", times=None)
        with pytest.raises(OutcomeUnknownError) as caught:
            await schedule(scheduler, "m")
        faulty_store.heal()
        faulty_store.inject("hang", "apply")
        hanging = asyncio.create_task(schedule(scheduler, "another"))
        await asyncio.sleep(0.01)
        with pytest.raises(OutcomeUnknownError):
            await caught.value.retry()
        with pytest.raises(OutcomeUnknownError):
            await hanging
        faulty_store.heal()


async def test_too_late_to_find_out_it_says_so_and_sends_nothing(
    scheduler: Scheduler, faulty_store: FaultyStore
) -> None:
    async with scheduler:
        faulty_store.inject("request_lost", "apply", times=None)
        with pytest.raises(OutcomeUnknownError) as caught:
            await schedule(scheduler, "m")
        faulty_store.heal()
        await asyncio.sleep(31)
        sent = faulty_store.calls["apply"]
        with pytest.raises(OutcomeUnknownError, match="more than 25 s ago"):
            await caught.value.retry()
        assert faulty_store.calls["apply"] == sent


async def test_a_store_that_raises_puts_its_batch_in_doubt_which_is_then_resolved(
    scheduler: Scheduler, faulty_store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with scheduler:
        faulty_store.inject("crash", "apply")
        await asyncio.gather(*(schedule(scheduler, each) for each in "abc"))
        assert "the outcome of 3 commands is unknown" in caplog.text


async def test_refusals_of_a_full_store_are_not_tried_again(clock: VirtualClock) -> None:
    class Full(NotingStore):
        async def apply(
            self, commands: Sequence[Command], *, source: SourcePosition | None = None
        ) -> Sequence[Outcome]:
            await super().apply([])
            return [Refused("full", "disk full")] * len(commands)

    store = Full(clock)
    async with Scheduler(store, clock=clock) as scheduler:
        with pytest.raises(Exception, match="disk full") as caught:
            await schedule(scheduler, "m")
    assert type(caught.value).__name__ == "StoreFullError"
    assert len(store.batches) == 1

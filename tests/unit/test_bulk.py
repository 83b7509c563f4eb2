"""`schedule_many`: any iterable, bounded reading ahead, and the position of every refused message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from aiodelay import (
    Conflict,
    DuplicateIdError,
    InputError,
    Message,
    PartlyScheduledError,
    Scheduled,
    Scheduler,
    UnknownSinkError,
)
from aiodelay.core.values import MAX_CLAIM_BYTES, MAX_CLAIM_MESSAGES
from aiodelay.engine.sending.schedule_many import CHUNKS_AT_ONCE
from aiodelay.errors import StoreUnavailableError
from aiodelay.testing.faults import Fault, FaultyStore
from aiodelay.testing.kit import kit_of

pytestmark = pytest.mark.asyncio

CHUNK = MAX_CLAIM_MESSAGES
IN_FLIGHT = CHUNKS_AT_ONCE * CHUNK


def message(number: int, *, size: int = 0, conflict: Conflict | None = None) -> Message:
    conflict = conflict or Conflict.replace()
    return Message(bytes(size), to="handler:work", delay="1h", id=f"m{number}", conflict=conflict)


class Source:
    """Gives messages, counts how many were read, and may fail."""

    def __init__(self, n: int, *, fails_at: int | None = None) -> None:
        self._n, self._fails_at = n, fails_at
        self.read = 0

    def __iter__(self) -> Iterator[Message]:
        for number in range(self._n):
            if number == self._fails_at:
                raise KeyError(number)
            self.read += 1
            yield message(number)


class AsyncSource(Source):
    async def __aiter__(self) -> AsyncIterator[Message]:
        for each in Source.__iter__(self):
            await asyncio.sleep(0.001)
            yield each

    __iter__ = None  # type: ignore[assignment]


def stored_in(scheduler: Scheduler) -> set[str]:
    return {each.record.id for each in kit_of(scheduler).messages()}


def ids(n: int) -> set[str]:
    return {f"m{number}" for number in range(n)}


@pytest.mark.parametrize("source", [Source, AsyncSource])
@pytest.mark.parametrize("n", [0, 1, CHUNK, CHUNK + 1, IN_FLIGHT + CHUNK + 7])
async def test_any_number_from_any_iterable_is_stored(
    scheduler: Scheduler, faulty_store: FaultyStore, source: type[Source], n: int
) -> None:
    async with scheduler:
        assert await scheduler.schedule_many(source(n)) == n
        assert stored_in(scheduler) == ids(n)
    assert faulty_store.calls["apply"] == -(-n // CHUNK)


async def test_payload_bytes_bound_a_chunk_too(scheduler: Scheduler, faulty_store: FaultyStore) -> None:
    size = MAX_CLAIM_BYTES // 4
    async with scheduler:
        assert await scheduler.schedule_many(message(number, size=size) for number in range(10)) == 10
    assert faulty_store.applied == [4, 4, 2]


@pytest.mark.parametrize("source", [Source, AsyncSource])
async def test_it_reads_no_further_than_chunks_in_flight_allow(
    scheduler: Scheduler, faulty_store: FaultyStore, source: type[Source]
) -> None:
    many = source(2 * IN_FLIGHT)
    async with scheduler:
        faulty_store.inject("hang", "apply")
        calling = asyncio.create_task(scheduler.schedule_many(many))
        await asyncio.sleep(5)
        assert many.read == IN_FLIGHT + CHUNK, "the chunks under way, and the next, which waits"
        faulty_store.heal()
        assert await calling == 2 * IN_FLIGHT


async def test_progress_counts_up_to_all(scheduler: Scheduler) -> None:
    seen: list[int] = []
    async with scheduler:
        await scheduler.schedule_many(Source(3 * CHUNK + 1), progress=seen.append)
    assert seen == [CHUNK, 2 * CHUNK, 3 * CHUNK, 3 * CHUNK + 1]


async def test_progress_that_raises_arrives_as_itself(scheduler: Scheduler) -> None:
    def progress(stored: int) -> None:
        raise KeyError(stored)

    many = Source(10 * IN_FLIGHT)
    async with scheduler:
        with pytest.raises(KeyError) as caught:
            await scheduler.schedule_many(many, progress=progress)
        assert caught.value.args == (CHUNK,)
        assert many.read <= IN_FLIGHT + 2 * CHUNK, "it reads no further"
        assert stored_in(scheduler) == ids(many.read)
        assert await scheduler.schedule_many(Source(1)) == 1


async def test_the_refused_are_named_with_position_and_error_and_all_others_are_stored(scheduler: Scheduler) -> None:
    wrong = {3, CHUNK + 5}
    taken = {7, 2 * CHUNK}

    def messages() -> Iterator[Message]:
        for number in range(2 * CHUNK + 10):
            each = message(number, conflict=Conflict.error())
            yield Message(b"", to="nosuchsink:x", delay="1h") if number in wrong else each

    async with scheduler:
        await scheduler.schedule_many(message(number) for number in taken)
        with pytest.raises(PartlyScheduledError) as caught:
            await scheduler.schedule_many(messages())
        assert stored_in(scheduler) == ids(2 * CHUNK + 10) - {f"m{number}" for number in wrong}
    error = caught.value
    assert error.stored == 2 * CHUNK + 10 - 4
    assert [each.position for each in error.rejected] == sorted(wrong | taken)
    assert [isinstance(each.error, DuplicateIdError) for each in error.rejected] == [False, True, False, True]
    assert str(error).startswith(f"{error.stored} messages stored, 4 refused: message 3: ")
    assert str(error).endswith("; and 1 more")


async def test_each_answer_is_told_by_position_and_then_nothing_is_raised(scheduler: Scheduler) -> None:
    given = [message(n, conflict=Conflict.error()) for n in range(CHUNK + 10)]
    given.append(Message(b"", to="nowhere:x", delay="1h"))
    told: dict[int, object] = {}
    async with scheduler:
        await scheduler.schedule_many([message(2)])
        stored = await scheduler.schedule_many(given, answered=lambda position, answer: told.update({position: answer}))
    refused = {2: DuplicateIdError, CHUNK + 10: UnknownSinkError}
    assert stored == CHUNK + 9
    assert sorted(told) == list(range(CHUNK + 11))
    assert {position: type(told[position]) for position in refused} == refused
    accepted = {position: each for position, each in told.items() if isinstance(each, Scheduled)}
    assert {position: each.id for position, each in accepted.items()} == {
        position: f"m{position}" for position in range(CHUNK + 10) if position != 2
    }
    assert {each.outcome for each in accepted.values()} == {"stored"}


@pytest.mark.parametrize("bad", [False, True])
async def test_a_function_told_answers_that_raises_arrives_as_itself(scheduler: Scheduler, bad: bool) -> None:
    def fail(position: int, answer: object) -> None:
        raise KeyError(position)

    given = Message(b"", to="nowhere:x", delay="1h") if bad else message(0)
    async with scheduler:
        with pytest.raises(KeyError):
            await scheduler.schedule_many([given], answered=fail)


async def test_what_is_told_answers_must_be_a_plain_function(scheduler: Scheduler) -> None:
    async def answered(position: int, answer: object) -> None: ...

    async with scheduler:
        with pytest.raises(InputError, match="answered"):
            await scheduler.schedule_many([], answered=answered)


async def test_what_is_no_message_is_refused_by_position(scheduler: Scheduler) -> None:
    async with scheduler:
        with pytest.raises(PartlyScheduledError) as caught:
            await scheduler.schedule_many([message(0), "no message", message(1)])  # type: ignore[list-item]
        assert stored_in(scheduler) == ids(2)
    assert [each.position for each in caught.value.rejected] == [1]


async def test_a_chunk_that_the_store_did_not_take_is_refused_whole(
    scheduler: Scheduler, faulty_store: FaultyStore
) -> None:
    async with scheduler:
        faulty_store.inject("unavailable", "apply", times=None)
        with pytest.raises(PartlyScheduledError) as caught:
            await scheduler.schedule_many(Source(CHUNK + 1))
    assert caught.value.stored == 0
    assert [each.position for each in caught.value.rejected] == list(range(CHUNK + 1))
    assert all(isinstance(each.error, StoreUnavailableError) for each in caught.value.rejected)


async def test_a_chunk_whose_answer_was_lost_is_sent_again(scheduler: Scheduler, faulty_store: FaultyStore) -> None:
    async with scheduler:
        faulty_store.inject("reply_lost", "apply", times=2)
        assert (
            await scheduler.schedule_many(message(n, conflict=Conflict.error()) for n in range(3 * CHUNK)) == 3 * CHUNK
        )
        assert stored_in(scheduler) == ids(3 * CHUNK)


@pytest.mark.parametrize("has_middleware", [False, True])
@pytest.mark.parametrize("fault", ["unavailable", "reply_lost"])
async def test_s4_a_message_whose_chunk_is_sent_again_does_not_overwrite_a_later_one_of_its_id(
    scheduler: Scheduler, faulty_store: FaultyStore, *, fault: Fault, has_middleware: bool
) -> None:
    """The ids of the second and the fourth chunk are those of the first and the third chunk."""
    if has_middleware:

        @scheduler.middleware("schedule")
        async def passing(message: Message, call_next: Callable[[Message], Awaitable[Scheduled]]) -> Scheduled:
            return await call_next(message)

    def messages() -> Iterator[Message]:
        for n in range(4 * CHUNK):
            number = n % CHUNK + n // (2 * CHUNK) * CHUNK
            version = b"old" if n // CHUNK % 2 == 0 else b"new"
            yield Message(version, to="handler:work", delay="1h", id=f"m{number}")

    async with scheduler:
        faulty_store.inject(fault, "apply", times=1)
        faulty_store.inject(fault, "apply", times=1, after=1)
        assert await scheduler.schedule_many(messages()) == 4 * CHUNK
        payloads = {each.record.envelope.payload for each in kit_of(scheduler).messages()}
        assert stored_in(scheduler) == ids(2 * CHUNK)
    assert payloads == {b"new"}


@pytest.mark.parametrize("source", [Source, AsyncSource])
@pytest.mark.parametrize("fails_at", [0, 3, CHUNK, CHUNK + 3])
async def test_an_iterable_that_raises_what_was_read_is_stored_and_the_error_arrives_as_itself(
    scheduler: Scheduler, source: type[Source], fails_at: int
) -> None:
    async with scheduler:
        with pytest.raises(KeyError) as caught:
            await scheduler.schedule_many(source(10 * CHUNK, fails_at=fails_at))
        assert caught.value.args == (fails_at,)
        assert stored_in(scheduler) == ids(fails_at)


async def test_an_iterable_that_raises_does_not_hide_what_was_refused(scheduler: Scheduler) -> None:
    def messages() -> Iterator[Message]:
        yield message(0)
        yield message(1, conflict=Conflict.error())
        raise KeyError("source")

    async with scheduler:
        await scheduler.schedule_many([message(1)])
        with pytest.raises(KeyError) as caught:
            await scheduler.schedule_many(messages())
    assert caught.value.__notes__ == [
        (
            "schedule_many: 1 messages stored, 1 refused: message 1: message 'm1' is already scheduled; "
            "to avoid this error, use the conflict rule replace (the new message stays) or keep (the stored one stays)"
        )
    ]


async def test_cancelled_midway_it_leaves_no_task_and_what_left_goes_on(
    scheduler: Scheduler, faulty_store: FaultyStore
) -> None:
    many = Source(10 * IN_FLIGHT)
    async with scheduler:
        faulty_store.inject("hang", "apply")
        before = asyncio.all_tasks()
        calling = asyncio.create_task(scheduler.schedule_many(many))
        await asyncio.sleep(1)
        calling.cancel()
        await asyncio.wait([calling])
        assert calling.cancelled()
        assert asyncio.all_tasks() == before
        read = many.read
        faulty_store.heal()
        await asyncio.sleep(1)
        assert many.read == read
        assert stored_in(scheduler) == ids(CHUNK), "the chunk that had left, and none of those that had not"


async def test_what_is_no_iterable_is_refused(scheduler: Scheduler) -> None:
    async with scheduler:
        with pytest.raises(InputError, match="iterable"):
            await scheduler.schedule_many(message(0))  # type: ignore[arg-type]
        with pytest.raises(InputError, match="progress"):
            await scheduler.schedule_many([], progress=3)  # type: ignore[arg-type]

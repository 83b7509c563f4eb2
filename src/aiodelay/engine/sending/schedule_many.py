"""`schedule_in_chunks`: sends many messages in chunks of 500, several chunks at once.

It reads messages only as fast as the store takes them. If two chunks have messages with the same id, the later chunk
waits for the end of the earlier one: the store may refuse the earlier chunk, which is then sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from aiodelay.core.values import MAX_CLAIM_BYTES, MAX_CLAIM_MESSAGES, PartlyScheduledError, Rejected
from aiodelay.errors import AiodelayError

__all__ = ["schedule_in_chunks"]


class _Identified(Protocol):
    @property
    def id(self) -> str | None: ...


C = TypeVar("C", bound=_Identified)
CHUNKS_AT_ONCE = 4


async def schedule_in_chunks(
    messages: Iterable[Any] | AsyncIterable[Any],
    compose: Callable[[Any], tuple[C, int]],
    send: Callable[[Sequence[C], int], Awaitable[Sequence[object]]],
    progress: Callable[[int], object] | None,
    answered: Callable[[int, Any], object] | None = None,
) -> int:
    """Store messages in chunks. Return the number of stored messages.

    Args:
        messages: The messages to store.
        compose: Returns the command of a message and the size of its payload in bytes, or raises.
        send: Sends commands, given the sum of their payload bytes. Returns an answer or an exception for each command.
        progress: Called with the number of messages stored so far.
        answered: Called with the position of each message, and with its answer or error. If it is given, errors are not
            collected for `PartlyScheduledError`.

    Raises:
        PartlyScheduledError: The store or the checks refused some messages.
    """
    stored = 0
    rejected: list[Rejected] = []
    failures: list[Exception] = []  # raised by the caller's own code: store the messages read so far, then raise
    room = asyncio.Semaphore(CHUNKS_AT_ONCE)
    under_way = _ChunksUnderWay()

    def refuse(position: int, error: AiodelayError) -> None:
        if answered is None:
            rejected.append(Rejected(position, error))
        else:
            _tell(failures, answered, position, error)

    async def send_chunk(chunk: list[tuple[int, C]], size: int) -> None:
        nonlocal stored
        try:
            answers = await send([composed for _, composed in chunk], size)
        except AiodelayError as error:
            for position, _ in chunk:
                refuse(position, error)
        else:
            failed = [each for each in answers if isinstance(each, Exception) and not isinstance(each, AiodelayError)]
            failures.extend(failed)
            stored += len(chunk) - len(failed)
            for (position, _), answer in zip(chunk, answers, strict=True):
                if isinstance(answer, AiodelayError):
                    stored -= 1
                    refuse(position, answer)
                elif answered is not None and not isinstance(answer, Exception):
                    _tell(failures, answered, position, answer)
            if progress is not None and not failures:
                _tell(failures, progress, stored)
        finally:
            room.release()

    async with asyncio.TaskGroup() as tasks:
        try:
            async with aclosing(_chunks(messages, compose, refuse)) as chunks:  # close the generator in this task
                async for chunk, size in chunks:
                    await room.acquire()
                    ids = {composed.id for _, composed in chunk} - {None}
                    await under_way.wait_for(ids)
                    under_way.add(tasks.create_task(send_chunk(chunk, size)), ids)
                    if failures:
                        break
        except Exception as error:  # noqa: BLE001 - the caller's iterable may raise anything
            failures.append(error)
    partly = PartlyScheduledError(stored, sorted(rejected, key=lambda each: each.position)) if rejected else None
    if failures:
        if partly is not None:
            failures[0].add_note(f"schedule_many: {partly}")
        raise failures[0]
    if partly is not None:
        raise partly
    return stored


class _ChunksUnderWay:
    """The chunks that the store has not answered, each with the ids of its messages."""

    def __init__(self) -> None:
        self._ids: dict[asyncio.Task[None], AbstractSet[str | None]] = {}

    def add(self, task: asyncio.Task[None], ids: AbstractSet[str | None]) -> None:
        self._ids[task] = ids
        task.add_done_callback(self._ids.pop)

    async def wait_for(self, ids: AbstractSet[str | None]) -> None:
        """Wait for the end of each chunk that has a message with one of these ids."""
        # Race: if the store refuses an earlier chunk, its repetition would overwrite the messages of a later chunk.
        if earlier := [task for task, others in self._ids.items() if not ids.isdisjoint(others)]:
            await asyncio.wait(earlier)


def _tell(failures: list[Exception], function: Callable[..., object], *told: object) -> None:
    try:
        function(*told)
    except Exception as error:  # noqa: BLE001 - the caller's function may raise anything
        failures.append(error)


async def _chunks(
    messages: Iterable[Any] | AsyncIterable[Any],
    compose: Callable[[Any], tuple[C, int]],
    refuse: Callable[[int, AiodelayError], object],
) -> AsyncGenerator[tuple[list[tuple[int, C]], int], None]:
    chunk: list[tuple[int, C]] = []
    size = position = 0
    failure: Exception | None = None
    try:
        async with aclosing(_each(messages)) as each:
            async for message in each:
                try:
                    composed, bytes_ = compose(message)
                except AiodelayError as error:
                    refuse(position, error)
                else:
                    chunk.append((position, composed))
                    size += bytes_
                position += 1
                if len(chunk) == MAX_CLAIM_MESSAGES or size >= MAX_CLAIM_BYTES:
                    yield chunk, size
                    chunk, size = [], 0
    except Exception as error:  # noqa: BLE001 - the caller's iterable failed: yield the messages read before, first
        failure = error
    if chunk:
        yield chunk, size
    if failure is not None:
        raise failure


async def _each(messages: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    if isinstance(messages, AsyncIterable):
        async for message in messages:
            yield message
    else:
        for message in messages:
            yield message

"""The methods of `Scheduler` that send commands: schedule, cancel, reschedule, fire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from datetime import datetime

from aiodelay.core.durations import Duration
from aiodelay.core.ids import new_op
from aiodelay.core.recurrence import Cron, Every
from aiodelay.core.validation import check_id, check_instance, due_of
from aiodelay.core.values import (
    NO_HEADERS,
    Cancel,
    CancelOutcome,
    Command,
    Conflict,
    Fire,
    FireOutcome,
    Late,
    Message,
    Put,
    Refused,
    Reschedule,
    RescheduleOutcome,
    Scheduled,
    Stored,
)
from aiodelay.engine.openable import Openable
from aiodelay.errors import AiodelayError, InputError, StoreUnavailableError, UnsupportedByStoreError, kind_of
from aiodelay.handlers.middleware import Middleware, chained
from aiodelay.handlers.registration import is_plain_function, kind_of_function
from aiodelay.ports import Sink, Store
from aiodelay.ports.carrier import Carrier

from .command_sender import answer_of
from .composer import Composer
from .schedule_many import schedule_in_chunks

__all__ = ["Commands"]


class Commands(Openable):
    """The methods of `Scheduler` that send commands. `Scheduler` inherits them.

    Args:
        store: The scheduler's store.
        sinks: The sinks by name.
        composer: Makes the commands that store messages.
    """

    def __init__(self, store: Store, sinks: Mapping[str, Sink], composer: Composer) -> None:
        super().__init__(store, sinks)
        self._composer = composer
        self._schedule_middleware: list[Middleware[Message, Scheduled]] = []
        self._commands: Carrier | None = None

    async def schedule(
        self,
        event: object,
        /,
        *,
        at: datetime | None = None,
        delay: Duration | None = None,
        every: Every | Cron | None = None,
        id: str | None = None,  # noqa: A002 - the word users look for
        to: str | None = None,
        key: bytes | None = None,
        headers: Mapping[str, bytes] = NO_HEADERS,
        conflict: Conflict = Conflict.replace(),  # noqa: B008 - immutable
        late: Late = Late.deliver(),  # noqa: B008 - immutable
        spread: Duration | None = None,
    ) -> Scheduled:
        """Store a message until it is due. Once this call has returned, the message is not lost (S2).

        Concurrent calls share a round trip. If a call is cancelled before its batch is sent, the message is not stored.
        If the call is cancelled later, the message may be stored.

        Args:
            event: A dataclass, `msgspec.Struct`, attrs or pydantic instance; or bytes, with `to=`. None, with `to=` and
                `key`, is a record without a value, such as a tombstone in Kafka.
            at: The due time: an aware datetime. A message with a past time is due now.
            delay: The due time as a duration from now, on the store's clock: a `timedelta`, or text such as "1h30m".
            every: A rule by which the message recurs.
            id: An id of your choice, with which to cancel or replace the message; up to 255 bytes of UTF-8. None = the
                scheduler makes an id.
            to: The destination, `<sink>:<address>`. None = the message goes to the handler of the event's type.
            key: The key of the message, for sinks that have keys.
            headers: Headers that are delivered with the message, byte for byte; up to 64, 16 KiB together.
            conflict: The rule for an id that is already scheduled.
            late: The policy for a message that would be delivered much too late. It counts from the due time with the
                spread.
            spread: A span after the due time, a `timedelta` or text: the id gives the message's place in the span. So
                many messages for one time come one after another. Each id has the same place every time.

        Returns:
            The id, the due time, and whether the message was stored, replaced an earlier message, or left an earlier
            message unchanged.

        Raises:
            InputError: An argument is wrong; nothing was sent.
            DuplicateIdError: The id is already scheduled, and `conflict` is `Conflict.error()`.
            StoreUnavailableError, StoreFullError, StoreBusyError: The message is certainly not stored.
            OutcomeUnknownError: The message may be stored. `await error.retry()` finds out safely whether it is.
        """
        message = Message(event, at, delay, every, id, to, key, headers, conflict, late, spread)
        if self._schedule_middleware:
            return await chained(self._schedule_middleware, self._schedule)(message)
        commands = self._open_commands()  # As in `_schedule`, without another coroutine: each one takes time.
        put = self._compose(message)
        return answer_of(put, await commands.carry_out(put, put.envelope.size))

    async def _schedule(self, message: Message) -> Scheduled:
        commands = self._open_commands()
        put = self._compose(message)
        return answer_of(put, await commands.carry_out(put, put.envelope.size))

    async def schedule_many(
        self,
        messages: Iterable[Message] | AsyncIterable[Message],
        *,
        progress: Callable[[int], object] | None = None,
        answered: Callable[[int, Scheduled | AiodelayError], object] | None = None,
    ) -> int:
        """Store many messages, 500 in each round trip. The call reads messages only as fast as the store takes them.

        Args:
            messages: `Message(event, delay=..., ...)`; a plain or an asynchronous iterable, of any length.
            progress: A plain function. It is called after each round trip, with the number of messages stored so far.
            answered: A plain function. It is called once for each message, in no particular order, with the message's
                position (from 0) and its `Scheduled` or error. With `answered`, this method neither raises nor
                collects the errors of refused messages.

        Returns:
            The number of messages that the store accepted. A message also counts if its `conflict` rule kept the
            earlier message, or found this message outdated.

        Raises:
            PartlyScheduledError: The store refused some messages and stored all others. The error names each refused
                message with its position and error.
        """
        commands = self._open_commands()
        if not isinstance(messages, Iterable | AsyncIterable):
            raise InputError("messages", kind_of(messages), "an iterable or asynchronous iterable of Message")
        if progress is not None and not is_plain_function(progress):
            raise InputError("progress", kind_of_function(progress), "a plain function that takes a number")
        if answered is not None and not is_plain_function(answered):
            allowed = "a plain function that takes a position and an answer"
            raise InputError("answered", kind_of_function(answered), allowed)
        if self._schedule_middleware:
            return await schedule_in_chunks(messages, _sized, self._schedule_each, progress, answered)
        if answered is None:
            return await schedule_in_chunks(messages, self._compose_sized, commands.carry_out_many, progress)

        async def carry_out(puts: Sequence[Put], size: int) -> Sequence[Scheduled | AiodelayError]:
            outcomes = await commands.carry_out_many(puts, size)
            return [
                outcome if isinstance(outcome, AiodelayError) else answer_of(put, outcome)
                for put, outcome in zip(puts, outcomes, strict=True)
            ]

        return await schedule_in_chunks(messages, self._compose_sized, carry_out, progress, answered)

    async def _schedule_each(self, messages: Sequence[Message], size: int) -> Sequence[object]:
        """Schedule messages concurrently, each through the middleware. The messages share round trips."""
        schedule = chained(self._schedule_middleware, self._schedule)
        return await asyncio.gather(*map(schedule, messages), return_exceptions=True)

    def _compose_sized(self, message: Message) -> tuple[Put, int]:
        put = self._compose(message)
        return put, put.envelope.size

    def _compose(self, message: Message) -> Put:
        return self._composer.put(check_instance(message, Message, "message"), self._store.now_ms())

    async def cancel(self, message_id: str, *, if_revision: int | None = None) -> CancelOutcome:
        """End a message. If the message is a series, the retries of its occurrences end too.

        Args:
            message_id: The id of the message.
            if_revision: End the message only if it still has this revision.

        Returns:
            `CANCELLED`: the message will not be delivered.
            `IN_FLIGHT`: the attempt under way goes on; no retry and no recurrence follows.
            `NOT_FOUND`: no message with this id is scheduled.
            `RECORDED` (Kafka, in a process that does not own all partitions): the message will not be delivered,
            unless its delivery has begun.
            `OUTDATED`: the message has another revision than `if_revision`, and stays.

        Raises:
            ConfigurationError: `if_revision` is not a revision.
            UnsupportedByStoreError: On Kafka, `if_revision` needs a process that owns all partitions.
            StoreUnavailableError, StoreBusyError, OutcomeUnknownError: As in `schedule`.
        """
        if if_revision is not None:
            self._composer.check_mode(Conflict.if_revision(if_revision).mode)
        command = Cancel(new_op(), check_id(message_id), None if if_revision is None else (if_revision, None))
        async with self._ready().subscriptions.taken_out(message_id):
            return answer_of(command, await self._open_commands().carry_out(command, 0))

    async def reschedule(
        self, message_id: str, *, at: datetime | None = None, delay: Duration | None = None
    ) -> RescheduleOutcome:
        """Move a pending message to another due time, and change nothing else.

        Returns:
            `RESCHEDULED`: the message has the new due time.
            `NOT_FOUND`: no message with this id is pending.
            `TOO_LATE`: the delivery at the old due time has begun. No delivery at the new due time follows.

        Raises:
            ScheduleTimeError: As in `schedule`.
            UnsupportedByStoreError: On Kafka, only a process that owns all partitions can reschedule.
            StoreUnavailableError, StoreBusyError, OutcomeUnknownError: As in `schedule`.
        """
        self._check_changes("reschedule")
        command = Reschedule(new_op(), check_id(message_id), due_of(at, delay, self._store.now_ms()))
        async with self._ready().subscriptions.taken_out(message_id):
            return answer_of(command, await self._open_commands().carry_out(command, 0))

    async def fire(self, message_id: str) -> FireOutcome:
        """Make a pending message due now.

        Returns:
            `FIRED`: the message is due now.
            `NOT_FOUND`: no message with this id is pending.
            `IN_FLIGHT`: the delivery of the message has already begun.

        Raises:
            UnsupportedByStoreError: On Kafka, only a process that owns all partitions can fire messages.
            StoreUnavailableError, StoreBusyError, OutcomeUnknownError: As in `schedule`.
        """
        self._check_changes("fire")
        command = Fire(new_op(), check_id(message_id))
        return answer_of(command, await self._open_commands().carry_out(command, 0))

    async def carry_out(self, commands: Sequence[Command]) -> Sequence[Stored | Refused | AiodelayError]:
        """Send commands unchanged, in one batch. Use it for commands that no other method can express.

        Returns:
            An answer or an error for each command, in order.

        Raises:
            ClosedError: The scheduler is not open.
        """
        size = sum(command.envelope.size for command in commands if isinstance(command, Put))
        return await self._open_commands().carry_out_many(commands, size)

    def _check_changes(self, what: str) -> None:
        self._ready()
        if self._store.traits.changes:
            return
        if self.status().phase == "loading":
            raise StoreUnavailableError(self._store.name, "it is being opened")
        raise UnsupportedByStoreError(
            "command",
            f"{what}, and this process does not own all partitions",
            "schedule or cancel; or the command in a process that owns all partitions",
        )

    def _open_commands(self) -> Carrier:
        self._ready()
        assert self._commands is not None
        return self._commands


def _sized(message: object) -> tuple[Message, int]:
    """Return a message with the size 0: it is not encoded yet, so only the number of messages bounds a chunk."""
    return check_instance(message, Message, "message"), 0

"""`UserWrites`: writes commands as records that any Kafka producer may write.

The code calls every such writer a user, in contrast to the owner of a partition. The owners read these records and
carry the commands out.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.client import UNAVAILABLE, Outgoing, Written, reason_of
from aiodelay.backends.kafka.store.assignment import Assignment
from aiodelay.backends.kafka.store.partition import moved_keys
from aiodelay.backends.kafka.topics.writer import Writer
from aiodelay.core.transitions import due_of, record_of
from aiodelay.core.values import Cancel, Command, ConflictMode, Outcome, Put, PutBack, Refused, Stored, Unknown
from aiodelay.errors import StoreUnavailableError, UnsupportedByStoreError
from aiodelay.ports.clock import Clock

__all__ = ["RECORDED", "UserWrites"]

RECORDED: frozenset[ConflictMode] = frozenset({"keep", "replace"})
"""The conflict modes of which a record can request a put. An owner carries out the others itself."""


class UserWrites:
    """Writes into the topic that takes new messages.

    Args:
        name: The name of the store for error messages.
        assignment: Knows the topics and their partitions.
        writer: A writer, open while the store is open.
        clock: The clock of the store.
    """

    def __init__(self, name: str, assignment: Assignment, writer: Writer, clock: Clock) -> None:
        self._name, self._assignment, self._writer, self._clock = name, assignment, writer, clock

    def recordable(self, commands: Sequence[Command]) -> tuple[list[Outgoing], list[Stored]]:
        """Return the records for commands, and the outcomes that hold once these records are written.

        Raises:
            UnsupportedByStoreError: Only an owner can carry out one of the commands.
        """
        now, outgoing, answers = self._clock.now_ms(), [], []
        for command in commands:
            wire, answer = _recorded(command, now)
            outgoing.append(self._to_own_place(command.id, wire))
            answers.append(answer)
        return outgoing, answers

    def batch_size(self, put: Put) -> int:
        """Return the bytes of a batch with the record of a put alone. The topic's `max.message.bytes` limits them."""
        now = self._clock.now_ms()
        wire = records.encode_record(record_of(put, due_of(put.due, now), now))
        return self._to_own_place(put.id, wire).batch_size

    def _to_own_place(self, message_id: str, wire: records.Wire) -> Outgoing:
        topic, n = self._first_topic()
        return Outgoing(topic, *wire, records.partition_of(records.key_of(message_id), n))

    def _first_topic(self) -> tuple[str, int]:
        return next(iter(self._assignment.counts.items()))

    async def write(self, commands: Sequence[Command]) -> Sequence[Outcome]:
        """Write commands, and return an outcome for each of them.

        Raises:
            UnsupportedByStoreError: Only an owner can carry out one of the commands. Nothing was written.
        """
        outgoing, answers = self.recordable(commands)
        try:
            if refusal := await self.refusal():
                return [Refused("unavailable", refusal) for _ in commands]
            written = await self._writer.write(outgoing)
        except UNAVAILABLE as error:
            return [Refused("unavailable", reason_of(error)) for _ in commands]
        return [_told(each, answer) for each, answer in zip(written, answers, strict=True)]

    async def put_back(self, messages: Sequence[PutBack]) -> None:
        """Write requests to the owners to store messages that are put back.

        Raises:
            StoreUnavailableError: Not all messages were written.
        """
        now = self._clock.now_ms()
        outgoing = [self._to_own_place(each.record.id, records.encode_back(each, now)) for each in messages]
        try:
            written = await self._writer.write(outgoing)
            error = next((each.error for each in written if each.error is not None), None)
            if error is not None:
                raise error
        except UNAVAILABLE as error:
            raise StoreUnavailableError(self._name, reason_of(error)) from error

    async def refusal(self) -> str:
        """Return the reason why nothing may be written to a topic that has changed; "" = the topic has not changed.

        Raises:
            KafkaError, TimeoutError, OSError: The cluster does not answer.
        """
        topic, n = self._first_topic()
        if topic in self._assignment.lost:
            return str(self._assignment.lost[topic])
        found = await (await self._writer.start()).partitions(topic)
        return "" if found is None or found == n else str(moved_keys(topic, n, found))


def _recorded(command: Command, now: int) -> tuple[records.Wire, Stored]:
    """Return the record for a command, and the outcome that holds once the record is written."""
    if isinstance(command, Put) and command.conflict.mode in RECORDED:
        record = record_of(command, due_of(command.due, now), now)
        wire = records.encode_record(record) if command.conflict.mode == "replace" else records.encode_keep(record)
        return wire, Stored("stored", now, record.due_ms)
    if isinstance(command, Cancel) and command.only is None:
        return records.encode_cancel(records.key_of(command.id)), Stored("recorded", 0, 0)
    if isinstance(command, Put):
        what = f"schedule with conflict {command.conflict.mode}"
    else:
        what = "cancel with if_revision" if isinstance(command, Cancel) else type(command).__name__.lower()
    allowed = "schedule with replace or keep, and cancel without if_revision; every command in a process that owns "
    raise UnsupportedByStoreError("command", what, f"{allowed}all partitions")


def _told(written: Written, answer: Stored) -> Outcome:
    if written.error is None:
        return answer
    return Unknown(reason_of(written.error)) if written.in_doubt else Refused("unavailable", reason_of(written.error))

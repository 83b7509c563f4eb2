"""`Intake`: takes one partition of a topic into a store. One step stores a batch and the partition's new position.

No offset is committed to Kafka. If another reader has overtaken this reader, or if the outcome of a batch is unknown,
the intake asks the store for the position and reads on from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias, TypeGuard

from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.errors import OffsetOutOfRangeError
from msgspec import Struct

from aiodelay.backends.kafka.client import (
    TOO_LARGE,
    UNAVAILABLE,
    Consumer,
    Outgoing,
    consumer_of,
    log_failure,
    plain_consumer_of,
    reason_of,
    stop,
    topic_id,
)
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.records import DEAD_REASON, readable
from aiodelay.core.backoff import pause_s
from aiodelay.core.values import (
    MAX_CLAIM_BYTES,
    MAX_CLAIM_MESSAGES,
    Outcome,
    Put,
    Refused,
    SourcePosition,
    Unknown,
)
from aiodelay.errors import StoreUnavailableError, cut
from aiodelay.ports import Store

from .requests import BadRequestError
from .writer import Writer

__all__ = ["DEAD_FROM", "DEAD_TIMESTAMP", "Around", "Intake", "Storing", "source_of"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

WAIT_MS = 500
FETCH_BYTES = 1 << 20
Around: TypeAlias = Callable[[Sequence[Put]], AbstractContextManager[Sequence[Put]]]
"""Returns a context manager around the storing of one batch. It may replace the puts that are stored."""
Storing: TypeAlias = Store
"""The former name of a store that keeps positions. Today every store keeps positions."""
REPLACING_COST = 6
"""The cost of a put whose id may be stored already, as a number of puts of new ids."""
DEAD_FROM, DEAD_TIMESTAMP = "aiodelay-dead-from", "aiodelay-dead-timestamp"
MOST_REASON = 500
CHECK_S = 30.0
"""While no record comes, the intake checks at this interval whether the topic was created again."""
CUT_OFF_S = 10.0
"""A partition counts as cut off if its end stays before the stored position for this long.

A new leader may need this time to learn the end of the partition.
"""


class _OvertakenError(Exception):
    """Another reader has stored records, or the position in the store is not the position that this intake expects."""


class _RecreatedError(Exception):
    """The topic was deleted and created again, or this may have happened."""


class _Batch(Struct):
    """Records that are stored in one step.

    Attributes:
        position: The offset after these records.
        puts: The records that ask for a put, each with its put.
        refused: The records that ask for no valid put, each with the reason.
    """

    position: int = 0
    puts: list[tuple[ConsumerRecord, Put]] = []
    refused: list[tuple[ConsumerRecord, str]] = []


def source_of(topic: str, incarnation: str, partition: int) -> str:
    """Return the key under which a partition's position is stored. A topic that is created again has a new key."""
    return f"kafka:{topic}/{incarnation}/{partition}"


class Intake:
    """Takes one partition into a store while it runs.

    Args:
        cluster: The cluster of the partition.
        place: The partition.
        store: An open store.
        put_of: Returns the put that a record asks for, or raises `BadRequestError`. Its second argument is the id for a
            record that names no id.
        dead: An open writer for refused records.
        dead_topic: The topic for refused records.
        begin_after: The group whose committed offset is the start if no position is stored; "" = no group.
        may_go_on: Waits until this reader owns the partition, as far as its group knows.
        around: Returns a context manager around the storing of each batch.
    """

    def __init__(
        self,
        cluster: Cluster,
        place: TopicPartition,
        store: Store,
        put_of: Callable[[ConsumerRecord, str], Put],
        *,
        dead: Writer,
        dead_topic: str,
        begin_after: str,
        may_go_on: Callable[[], Awaitable[object]],
        around: Around = nullcontext,
    ) -> None:
        self._cluster, self._place, self._store, self._put_of = cluster, place, store, put_of
        self._dead, self._dead_topic = dead, dead_topic
        self._begin_after, self._may_go_on, self._around = begin_after, may_go_on, around
        self._name = f"{place.topic}/{place.partition}"
        self._id = ""
        self._written: set[int] = set()
        self._refused: list[tuple[ConsumerRecord, str]] = []  # by the store, and not yet in the dead topic
        self._failures, self._cut_off_at, self._check_at = 0, 0.0, 0.0
        self._is_stored = False  # whether the store has the position that this reader expects

    async def run(self) -> None:
        """Take records in until cancelled. After an error, wait and go on from the stored position."""
        while True:
            try:
                await self._take_in()
            except _OvertakenError as error:
                log.info("%s: %s", self._name, error)
                self._failures = min(self._failures + 1, 3)
            except Exception as error:  # noqa: BLE001 - an intake that stops unnoticed would take in nothing for good
                self._failures += 1
                expected = (StoreUnavailableError, _RecreatedError, *UNAVAILABLE)
                log_failure(
                    log, f"{self._name}: nothing is taken in for now", reason_of(error, "Read"), error, expected
                )
            await asyncio.sleep(pause_s(self._failures))

    async def _take_in(self) -> None:
        await self._bury_refused()
        await self._may_go_on()  # first, because asking the store for the position fences off the earlier reader
        consumer = consumer_of(self._cluster, max_partition_fetch_bytes=FETCH_BYTES)
        try:
            async with asyncio.timeout(self._cluster.timeout_ms / 1000):
                await consumer.start()
                consumer.assign([self._place])
                await self._identify(consumer)
                source = source_of(self._place.topic, self._id, self._place.partition)
                position = await self._begin(consumer, source)
            while True:
                await self._may_go_on()
                position = await self._take_some(consumer, source, position)
        finally:
            await stop(consumer)

    async def _identify(self, consumer: Consumer) -> None:
        found = await self._incarnation(consumer)
        if self._id and found != self._id:
            log.warning("%s: the topic was deleted and created again; it is read from its beginning", self._name)
        if found != self._id:
            self._id = found
            self._written.clear()

    async def _incarnation(self, consumer: Consumer) -> str:
        found = await topic_id(consumer.client, self._place, timeout_s=self._cluster.timeout_ms / 1000)
        self._check_at = self._now_s() + CHECK_S
        return found

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()

    async def _begin(self, consumer: Consumer, source: str) -> int:
        """Seek the offset at which reading begins, and return the position that the store now expects.

        Reading begins at the stored position, else at the offset that the group has committed, else at the start.
        """
        place = self._place
        position = await self._store.position(source)  # first: after this call, no other reader can move the position
        self._is_stored = position is not None
        first = (await consumer.beginning_offsets([place]))[place]
        end = (await consumer.end_offsets([place]))[place]
        if position is None and (position := await self._committed()) is not None:
            log.info(
                "%s: reading begins at offset %d, which group %s has committed", self._name, position, self._begin_after
            )
        if position is None:
            log.info(
                "%s: no position is stored; the partition is read from its beginning, offset %d", self._name, first
            )
            position = first
        if position < first:
            log.error("%s: records %d to %d were deleted before they were read", self._name, position, first - 1)
        if position > end:
            self._check_cut_off(position, end)
            await self._apply([], SourcePosition(source, position, end, is_stored=self._is_stored))
            position = end
        self._cut_off_at = 0.0
        consumer.seek(place, max(position, first))
        return position

    async def _committed(self) -> int | None:
        """Return the offset that another system's group has committed, or None if the group has committed no offset."""
        if not self._begin_after:
            return None
        consumer = plain_consumer_of(self._cluster, group_id=self._begin_after)
        try:
            await consumer.start()
            consumer.assign([self._place])  # `assign` does not join the group
            return await consumer.committed(self._place)
        finally:
            await stop(consumer)

    def _check_cut_off(self, position: int, end: int) -> None:
        """Check that the partition was cut off: its end has been before the stored position for `CUT_OFF_S`.

        Raises:
            _RecreatedError: The end has been before the position for less than `CUT_OFF_S`. A new leader may not know
                the end yet.
        """
        now = self._now_s()
        self._cut_off_at = self._cut_off_at or now + CUT_OFF_S
        if now < self._cut_off_at:
            raise _RecreatedError(f"the partition ends at {end}, and was read to {position}")
        log.error(
            "%s: the partition ends at %d, and was read to %d: it was cut off, and reading goes on at its end",
            self._name,
            end,
            position,
        )

    async def _take_some(self, consumer: Consumer, source: str, position: int) -> int:
        """Wait for records and store them. Return the position that is then stored."""
        try:
            found = await consumer.getmany(self._place, timeout_ms=WAIT_MS, max_records=MAX_CLAIM_MESSAGES)
        except OffsetOutOfRangeError:
            raise _RecreatedError("the record at the stored position does not exist any more") from None
        records = found.get(self._place, ())
        # If the topic was created again with as many records as before, no record comes: therefore ask at intervals.
        if (records or self._now_s() >= self._check_at) and await self._incarnation(consumer) != self._id:
            raise _RecreatedError("the topic was deleted and created again")
        for batch in self._batches(records):
            await self._bury(batch.refused)
            positions = tuple(record.offset + 1 for record, _ in batch.puts)
            move = SourcePosition(source, position, batch.position, positions, self._is_stored)
            await self._apply(batch.puts, move)
            position, self._failures = batch.position, 0
            self._written.clear()
        return position

    def _batches(self, records: Sequence[ConsumerRecord]) -> Iterator[_Batch]:
        """Yield records in batches that a store takes in one short step."""
        batch, size, cost = _Batch(), 0, 0
        for record in records:
            own_id = f"kafka-{self._id}-{record.partition}-{record.offset}"
            try:
                put = self._put_of(record, own_id)
            except BadRequestError as error:
                batch.refused.append((record, str(error)))
            else:
                batch.puts.append((record, put))
                cost += 1 if put.id == own_id else REPLACING_COST
            size += len(record.value or b"")
            batch.position = record.offset + 1
            if size >= MAX_CLAIM_BYTES or cost >= MAX_CLAIM_MESSAGES:
                yield batch
                batch, size, cost = _Batch(), 0, 0
        if batch.puts or batch.refused:
            yield batch

    async def _apply(self, puts: Sequence[tuple[ConsumerRecord, Put]], source: SourcePosition) -> None:
        """Store puts and the position in one step.

        Raises:
            _OvertakenError: The store has another position, or the outcome is unknown.
            StoreUnavailableError: The store takes nothing now.
        """
        with self._around([put for _, put in puts]) as given:
            outcomes = await self._store.apply(given, source=source)
        failure = _failure_of(outcomes)
        if not puts and await self._store.position(source.source) != source.position:
            failure = Refused("passed")
        if failure is not None:
            raise _not_stored(self._store.name, failure)
        self._is_stored = True
        self._refused += [
            (record, f"the store refuses it: {outcome.reason} {outcome.detail}")
            for (record, _), outcome in zip(puts, outcomes, strict=True)
            if isinstance(outcome, Refused)
        ]
        await self._bury_refused()

    # --- refused records ----------------------------------------------------------------------------------

    async def _bury_refused(self) -> None:
        """Write the records that the store has refused to the dead topic. The store's position is behind them already.

        Raises:
            StoreUnavailableError, KafkaError, TimeoutError, OSError: Not all records were written. Call again.
        """
        await self._bury(self._refused)
        self._refused.clear()

    async def _bury(self, refused: Sequence[tuple[ConsumerRecord, str]]) -> None:
        """Write refused records to the dead topic, each once, as far as this process knows.

        Raises:
            StoreUnavailableError, KafkaError, TimeoutError, OSError: Not all records were written.
        """
        left = [each for each in refused if each[0].offset not in self._written]
        if not left:
            return
        log.warning(
            "%s: %d records go to %s; the reason for the first: %s",
            self._name,
            len(left),
            self._dead_topic,
            left[0][1],
        )
        too_large = await self._write([self._dead_record(*each) for each in left], left)
        stubs = [self._stub(*each) for each in too_large]
        if stubs and await self._write(stubs, too_large):
            raise StoreUnavailableError(self._dead_topic, "the topic does not even take a record with only the reason")

    async def _write(
        self, outgoing: Sequence[Outgoing], refused: Sequence[tuple[ConsumerRecord, str]]
    ) -> list[tuple[ConsumerRecord, str]]:
        """Write a dead record for each refused record.

        Return the refused records for which the dead record was too large to write.
        """
        too_large: list[tuple[ConsumerRecord, str]] = []
        problem: Exception | None = None
        for written, each in zip(await self._dead.write(outgoing), refused, strict=True):
            if written.error is None:
                self._written.add(each[0].offset)
            elif isinstance(written.error, TOO_LARGE):
                too_large.append(each)
            else:
                problem = written.error
        if problem is not None:
            raise StoreUnavailableError(self._dead_topic, reason_of(problem)) from problem
        return too_large

    def _dead_record(self, record: ConsumerRecord, reason: str) -> Outgoing:
        headers = [*((readable(name), value) for name, value in record.headers), *_dead_headers(record, reason)]
        return Outgoing(self._dead_topic, record.key, record.value, headers)

    def _stub(self, record: ConsumerRecord, reason: str) -> Outgoing:
        reason += "; the record with its key, value and headers is too large for the dead topic, so these are left out"
        return Outgoing(self._dead_topic, None, None, _dead_headers(record, reason))


def _failure_of(outcomes: Sequence[Outcome]) -> Refused | Unknown | None:
    """Return why a store has carried out no command of a batch and has not moved the position; None if it has.

    If the store has carried the batch out, it may have refused each put for a reason of this put. Then the position has
    moved too.
    """
    failures = [each for each in outcomes if isinstance(each, Unknown) or _is_of_batch(each)]
    return failures[0] if len(failures) == len(outcomes) > 0 else None


def _is_of_batch(outcome: Outcome) -> TypeGuard[Refused]:
    return isinstance(outcome, Refused) and outcome.reason in ("passed", "unavailable", "full")


def _not_stored(store: str, outcome: Refused | Unknown) -> Exception:
    if isinstance(outcome, Unknown):
        return _OvertakenError(f"the store's answer was lost ({outcome.detail}): the position is read again")
    if outcome.reason == "passed":
        return _OvertakenError("another reader has stored the next records")
    return StoreUnavailableError(store, f"{outcome.reason}: {outcome.detail}")


def _dead_headers(record: ConsumerRecord, reason: str) -> list[tuple[str, bytes]]:
    return [
        (DEAD_REASON, cut(reason, MOST_REASON).encode(errors="backslashreplace")),
        (DEAD_FROM, f"{record.topic}/{record.partition}/{record.offset}".encode()),
        (DEAD_TIMESTAMP, b"%d" % record.timestamp),
    ]

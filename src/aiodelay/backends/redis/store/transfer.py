"""`Transfers`: the store's methods that move due messages into lists, topics and logs on its own server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from aiodelay.backends.redis.connection.faults import Fault
from aiodelay.backends.redis.connection.options import Options
from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.fanout.sink import RedisFanoutSink
from aiodelay.backends.redis.fanout.source import RedisFanoutSource
from aiodelay.backends.redis.fanout.topics import Consumer, RedisFanout
from aiodelay.backends.redis.lists.sink import NAME as LIST
from aiodelay.backends.redis.lists.sink import RedisListSink
from aiodelay.backends.redis.lists.source import RedisListSource
from aiodelay.backends.redis.log.log import RedisLog
from aiodelay.backends.redis.log.topics import LogConsumer
from aiodelay.backends.redis.records.keys import Keys, hash_tag_of, member_of, text_of
from aiodelay.backends.redis.records.reading import due_and_revision, read_record
from aiodelay.core.record_codec import decode_trace, encode_record
from aiodelay.core.values import (
    MAX_CLAIM_BYTES,
    MAX_CLAIM_MESSAGES,
    Again,
    Blocked,
    Dead,
    Demand,
    Done,
    Lane,
    Promise,
    PutBack,
    Reach,
    Record,
    Registered,
    Settlement,
    Stored,
    Transferred,
)
from aiodelay.errors import RecordFormatError, StoreFullError, StoreUnavailableError
from aiodelay.ports import Sink, Source, StoreTraits, Transferring
from aiodelay.ports.clock import Clock

from .commands import answer_of
from .limits import RedisLimits
from .waiting import Waiter

__all__ = ["Transfers"]

SAFETY_POLL_S = 2.0
BACK_AT_ONCE = 100


class Transfers(RedisLimits):
    """Implements `Endpoints`, `Transfer` and `PutsBack`: the store's methods for lists, topics and logs."""

    traits: StoreTraits
    """The traits of `RedisStore`."""

    def __init__(self, options: Options, keys: Keys, clock: Clock | None) -> None:
        super().__init__(options, keys, clock)
        self._transfers: list[_Transfer] = []

    @property
    def sinks(self) -> Sequence[Sink]:
        """The sinks for the store's own server. A scheduler with this store has them without registration."""
        namespace = self._keys.namespace
        return [
            RedisListSink(self._options),
            RedisFanoutSink(self._options, namespace=namespace),
            RedisLog(self._options, namespace=namespace),
        ]

    @property
    def sources(self) -> Sequence[Source]:
        """The sources for the store's own server. A scheduler with this store has them without registration."""
        namespace = self._keys.namespace
        return [
            RedisListSource(self._options),
            RedisFanoutSource(self._options, namespace=namespace),
            RedisLog(self._options, namespace=namespace),
        ]

    async def registered(self, topic: str | None = None) -> Sequence[Registered]:
        """List the consumers of topics and of logs, with the lag of each consumer.

        Args:
            topic: The topic or log whose consumers to list. None lists the consumers of all topics and logs.
        """
        namespace = self._keys.namespace
        found: list[Registered] = []
        async with (
            RedisFanout(self._options, namespace=namespace) as fanout,
            RedisLog(self._options, namespace=namespace) as log,
        ):
            for end in (fanout, log):
                topics = [each.name for each in await end.topics()] if topic is None else [topic]
                found += [_registered(name, each) for name in topics for each in await end.consumers(name)]
        return sorted(found, key=lambda each: (each.topic, each.kind, each.consumer))

    def reaches(self, sink: Sink, address: str = "") -> Reach:
        """Return the delivery promise for messages that go from this store to a sink, and the reason for it.

        On a cluster, the promise for a list depends on the hash tag of its key.
        """
        if not isinstance(sink, RedisListSink | RedisFanoutSink | RedisLog):
            return Reach(
                Promise.AT_LEAST_ONCE, f"{sink.name} is not on a Redis server: messages are claimed, sent and settled"
            )
        if sink.options.server != self._options.server:
            reason = (
                f"{sink.name} is at {sink.options.name}, not at {self.name}: messages are claimed, sent and settled"
            )
            return Reach(Promise.AT_LEAST_ONCE, reason)
        if isinstance(sink, RedisListSink) and self._options.is_cluster:
            return self._reaches_list(address)
        if not isinstance(sink, RedisListSink) and sink.keys.tag != self._keys.tag:
            reason = f"the topics are in namespace {sink.keys.namespace!r}, not in {self._keys.namespace!r}"
            return Reach(Promise.AT_LEAST_ONCE, f"{reason}: messages are claimed, sent and settled")
        return Reach(Promise.EXACTLY_ONCE, f"one script on {self.name} delivers a message and removes it")

    def _reaches_list(self, address: str) -> Reach:
        """Return the promise for a list of this cluster, or for all its lists if the address is ""."""
        tag = self._keys.tag.removesuffix(":")
        here = f"one script on {self.name} delivers a message and removes it, if the key of the list has the hash tag"
        elsewhere = "messages for other lists, which may be on another node, are claimed, sent and settled"
        if not address:
            promise = Promise.BY_ADDRESS
        elif hash_tag_of(address.partition("?")[0]) == hash_tag_of(tag):
            promise = Promise.EXACTLY_ONCE
        else:
            promise = Promise.AT_LEAST_ONCE
        return Reach(promise, f"{here} {tag}; {elsewhere}")

    @contextmanager
    def transferring(self, sink: Sink) -> Iterator[Transferring]:
        """Register the transfer of one sink's messages. Yield the object that moves the messages."""
        assert isinstance(sink, RedisListSink | RedisFanoutSink | RedisLog)
        is_shared = self.reaches(sink).promise is Promise.BY_ADDRESS
        transfer = _Transfer(self, sink, is_shared=is_shared)
        self._transfers.append(transfer)
        self.waiters.add(transfer.waiter, sink.name, is_shared=is_shared)
        try:
            yield transfer
        finally:
            self.waiters.discard(transfer.waiter)
            self._transfers.remove(transfer)

    def moved_lanes(self) -> list[Lane]:
        """Return the lanes that this process transfers. A claim also reads their next due times, which saves polls."""
        return [transfer.sink.name for transfer in self._transfers if not transfer.is_shared]

    def shared_lanes(self) -> list[Lane]:
        """Return the lanes of which this process transfers only the messages for lists in the slot of the namespace.

        A claim takes the other messages.
        """
        return [transfer.sink.name for transfer in self._transfers if transfer.is_shared]

    def looked_at_moved(self, next_look_ms: int | None) -> None:
        """Tell the transfers that a claim has just read the next due times of `moved_lanes`.

        Args:
            next_look_ms: The earliest time at which there may be a message to move. None means that the
                lanes are empty.
        """
        for transfer in self._transfers:
            if not transfer.is_shared:
                transfer.looked(next_look_ms)

    async def lengths(self, destinations: Collection[str]) -> Mapping[str, int]:
        """Return the number of elements of each list among the destinations. Leave out all other destinations."""
        found: dict[str, int] = {}
        for destination in destinations:
            name, _, address = destination.partition(":")
            key = address.partition("?")[0]
            if name != LIST or not key:
                continue
            try:
                found[destination] = int(await self._checked().client.command("LLEN", key))
            except Fault as fault:
                if not fault.is_damage:
                    raise StoreUnavailableError(self.name, fault.reason) from fault
        return found

    async def blocked(self) -> Sequence[Blocked]:
        """List the blocked destinations, each with the reason and the number of messages that wait for it."""
        found: list[Blocked] = []
        for lane, address, why, messages in await self.run("blocked", []):
            found.append(Blocked(lane.decode(), _shown(address), _shown(why), messages))
        return sorted(found, key=lambda each: (each.lane, each.address))

    async def put_back(self, messages: Sequence[PutBack]) -> Sequence[Stored]:
        """Store messages that had left the store. Return one outcome for each message, in order."""
        found: list[Stored] = []
        for start in range(0, len(messages), BACK_AT_ONCE):
            arguments: list[Arg] = []
            for each in messages[start : start + BACK_AT_ONCE]:
                head: list[Arg] = [member_of(each.record.id), each.record.envelope.lane, each.due_ms, each.reason or ""]
                arguments += [*head, encode_record(each.record, 0)]
            try:
                answers = await self._run("back", arguments, durable=True)
            except Fault as fault:
                raise self.unavailable(fault) from fault
            for outcome in (answer_of(answer, None) for answer in answers):
                if not isinstance(outcome, Stored):
                    raise StoreFullError(self.name, outcome.detail)
                found.append(outcome)
        self.waiters.wake()
        return found


class _Transfer:
    """Implements the Protocol `Transferring` for the messages of one sink.

    Args:
        store: The store that holds the messages.
        sink: The sink.
        is_shared: True if the transfer leaves the messages for lists outside the slot of the namespace to claims.
    """

    def __init__(self, store: Transfers, sink: RedisListSink | RedisFanoutSink | RedisLog, *, is_shared: bool) -> None:
        self._store, self.sink, self.is_shared = store, sink, is_shared
        if isinstance(sink, RedisListSink):
            self._script, self._settings = "transfer", f"{sink.max_length}{' slot' if is_shared else ''}"
        else:
            self._script = "transfer_logs" if isinstance(sink, RedisLog) else "transfer_topics"
            self._settings = " ".join(map(str, sink.settings))
        self.waiter = Waiter()
        self._looked_s = 0.0
        self._unreadable: list[Settlement] = []

    async def transfer(self, demand: Demand, settlements: Sequence[Settlement] = (), *, traces: int = 0) -> Transferred:
        messages, max_bytes = min(demand.messages, MAX_CLAIM_MESSAGES), min(demand.max_bytes, MAX_CLAIM_BYTES)
        arguments: list[Arg] = [self.sink.name, messages, max_bytes, self._settings, traces]
        for settlement in (*settlements, *self._unreadable):
            arguments += _arguments(settlement)
        asked_s = self._looked_s = asyncio.get_running_loop().time()
        now, moved, next_due, changed, found, *series = await self._store.run(self._script, arguments)
        self._unreadable = []
        records = await self._read(series)
        return Transferred(
            int(moved),
            records,
            {_shown(address): _shown(why) for address, why in _pairs(changed)},
            self._store.heard(now, asked_s),
            int(next_due) if next_due else None,
            [(text_of(member), trace) for member, written in _pairs(found) if (trace := decode_trace(written))],
        )

    async def _read(self, series: Sequence[bytes]) -> list[Record]:
        """Decode recurring messages.

        An unreadable message is left out, and the next transfer makes it a dead letter.
        """
        lanes = await self._store.lanes_of(series[1::2])
        records: list[Record] = []
        for member, value in _pairs(series):
            try:
                records.append(read_record(member, value, lanes))
            except RecordFormatError as error:
                due_ms, revision = due_and_revision(value)
                self._unreadable.append(Dead(text_of(member), revision, due_ms, "undecodable", 0, error.problem))
        return records

    async def wait(self, *, until_ms: int | None) -> None:
        # A claim usually reads the lane's next due time first (`looked`). This poll is then unnecessary and moves back.
        loop, poll_s = asyncio.get_running_loop(), SAFETY_POLL_S * random.uniform(0.97, 1)
        while True:
            seconds = self._looked_s + poll_s - loop.time()
            if until_ms is not None:
                seconds = min(seconds, self._store.seconds_until_asking(until_ms))
            if await self.waiter.wait(seconds, until_ms) or seconds <= 0:
                return

    def looked(self, next_look_ms: int | None) -> None:
        """Postpone the next safety poll, because a claim has just read the next due time of this lane."""
        loop = asyncio.get_running_loop()
        self._looked_s = loop.time()
        if next_look_ms is not None:
            self.waiter.comes_due(next_look_ms)

    def wake(self) -> None:
        self.waiter.wake()

    def clear(self) -> None:
        self.waiter.clear()


def _arguments(settlement: Settlement) -> list[Arg]:
    then: Arg = "" if settlement.then_due_ms is None else max(settlement.then_due_ms, 0)
    head: list[Arg] = [member_of(settlement.id), settlement.revision, settlement.token]
    if isinstance(settlement, Done):
        return [*head, f"d{settlement.outcome}", "", then]
    error = b"" if settlement.error is None else b"e" + settlement.error.encode("utf-8", "backslashreplace")
    if isinstance(settlement, Again):
        assert settlement.then_due_ms is None, "a transferred occurrence has no retries"
        return [*head, "a", error, settlement.due_ms]
    return [*head, f"x{settlement.reason}", error, then]


def _registered(topic: str, consumer: Consumer | LogConsumer) -> Registered:
    cursor = consumer.cursor if isinstance(consumer, LogConsumer) else None
    return Registered(
        topic,
        "fan-out" if cursor is None else "log",
        consumer.name,
        consumer.ordered,
        consumer.since_ms,
        consumer.seen_ms,
        consumer.waiting,
        consumer.in_flight,
        consumer.retrying,
        consumer.missed,
        cursor,
    )


def _shown(text: bytes) -> str:
    """Decode a key or a reason. Bytes that are not UTF-8 become escapes: another program may have written them."""
    return text.decode("utf-8", "backslashreplace")


def _pairs(flat: Sequence[Any]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)

"""The methods of `Scheduler` for operators: inspect, pause, resume, redrive, purge."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime

from aiodelay.core.durations import Duration, parse_duration, to_epoch_ms
from aiodelay.core.validation import (
    HANDLER_TARGET,
    check_count,
    check_id,
    check_letters_id,
    check_type_name,
    split_target,
)
from aiodelay.core.values import (
    ADDRESS,
    Blocked,
    CountsTable,
    DeadKey,
    DeadLetter,
    JournalEntry,
    Lane,
    LaneCounts,
    LaneLimits,
    Limit,
    LimitedKey,
    LoadBucket,
    LoadTable,
    Outcome,
    Query,
    Snapshot,
    lane_limits,
)
from aiodelay.errors import ConfigurationError, UnsupportedByStoreError, kind_of, shortened
from aiodelay.handlers.registration import is_event_class, type_names
from aiodelay.ports import Limits, Transfer

from .openable import Openable
from .subscriptions import moves_into

__all__ = ["STORES_WITH_LIMITS", "Control", "check_limits", "lanes_and_address"]

PAGE = 500
MOST = (1 << 63) - 1
STORES_WITH_LIMITS = "a store with limits: memory, SQLite or Redis"


class Control(Openable):
    """The operators' methods of `Scheduler`, which inherits them."""

    async def get(self, message_id: str) -> Snapshot | None:
        """Return the current state of a message; None if it is neither pending nor in flight.

        Args:
            message_id: The id from `schedule`. For a retry of an occurrence of a series: `<id>~<due in ms>`,
                as `pending` shows it.

        Raises:
            UnsupportedByStoreError: This process cannot inspect the store.
            StoreUnavailableError: The store did not answer.
        """
        return await self.opened_store().get(check_id(message_id, may_be_occurrence=True))

    async def pending(
        self,
        of: type | str | None = None,
        *,
        since: datetime | None = None,
        before: datetime | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[Snapshot]:
        """Yield messages that are pending or in flight, ordered by the time of their next attempt.

        The store is read page by page. A message that is scheduled meanwhile may or may not appear.

        Args:
            of: Only messages of this event class, former names included; or of the handler or sink with this name.
            since: Only messages whose next attempt is at this time or later; an aware datetime.
            before: Only messages whose next attempt is before this time; an aware datetime.
            limit: Most messages; None = all.
        """
        store = self.opened_store()
        lanes = () if of is None else lanes_and_address(of)[0]
        from_ms = None if since is None else to_epoch_ms(since, field="since")
        to_ms = None if before is None else to_epoch_ms(before, field="before")
        after: tuple[int, str] | None = None
        left = MOST if limit is None else check_count(limit, "limit", 0, MOST)
        while left > 0:
            size = min(PAGE, left)
            page = await store.search(Query(lanes, from_ms, to_ms, after, size))
            for snapshot in page:
                yield snapshot
            if len(page) < size:
                return
            after = (page[-1].next_attempt_ms, page[-1].record.id)
            left -= size

    async def counts(self) -> Mapping[Lane, LaneCounts]:
        """Count messages by lane and state. The counts of a lane also say whether a live process serves the lane.

        A notebook shows the result as a table.
        """
        return CountsTable(await self.opened_store().counts())

    async def load(self, *, bucket: Duration, buckets: int) -> Sequence[LoadBucket]:
        """Count the messages that become due in each of the next spans of time, by lane.

        A notebook shows the result as a table.

        Args:
            bucket: The length of one span.
            buckets: The number of spans, 1 to 10,000.
        """
        bucket_ms = parse_duration(bucket, field="bucket", error=ConfigurationError, least_ms=1)
        buckets = check_count(buckets, "buckets", 1, 10_000)
        return LoadTable(await self.opened_store().load(bucket_ms=bucket_ms, buckets=buckets))

    # --- pause and resume ---------------------------------------------------------------------------------

    async def pause(self, what: type | str) -> bool:
        """Pause a lane or one destination. Return False if it was paused already.

        The store keeps the pause for all processes, until `resume`. Paused messages can be cancelled, replaced and
        listed. Messages in flight are not affected.

        Args:
            what: An event class, former names included; or the name of a handler (`"payment.check"`), of a sink
                (`"stdout"`), or of a destination (`"stdout:audit"`).
        """
        lanes, address = lanes_and_address(what)
        return any([await self.opened_store().pause(lane, address) for lane in lanes])

    async def resume(self, what: type | str) -> bool:
        """Resume a paused lane or destination; return whether it was paused."""
        lanes, address = lanes_and_address(what)
        return any([await self.opened_store().resume(lane, address) for lane in lanes])

    async def paused(self) -> Sequence[str]:
        """List the paused lanes and destinations: `"payment.check"`, `"stdout:audit"`."""
        paused = await self.opened_store().paused()
        return [lane if address is None else f"{lane}:{address}" for lane, address in paused]

    async def blocked(self) -> Sequence[Blocked]:
        """List blocked destinations, each with the reason and the number of messages that wait for it.

        The list names only destinations of sinks to which the store transfers messages (see `reaches`). The store tries
        these destinations again by itself.
        """
        store = self.opened_store()
        return await store.blocked() if isinstance(store, Transfer) else ()

    # --- limits -------------------------------------------------------------------------------------------

    async def set_limits(self, what: type | str, *limits: Limit) -> None:
        """Set the limits of a handler's messages or of a sink, for all processes; none ends them.

        The store keeps the limits. They hold at once, also for messages that are scheduled already. Messages in flight
        are not affected. The limits stay until they are set again, or until the code declares other limits for the
        handler than before.

        Args:
            what: An event class, former names included; or the name of a handler or of a sink.
            limits: At most one `Limit` with a key, and one without. The key of a sink's limit is "address". The key of
                a handler's limit is only a name for operators: a message has its key from `key=`, or from the field
                that a limit in the code names.

        Raises:
            ConfigurationError: A limit is wrong.
            UnsupportedByStoreError: The store has no limits, or moves messages into this sink by itself.
            StoreUnavailableError: The store did not answer.
        """
        check_limits(self, what, *limits)
        store, given = _limits_store(self), lane_limits(limits)
        for lane in _whole_lanes(what):
            await store.set_limits(lane, given, is_declared=False)

    async def limits(self) -> Mapping[Lane, Sequence[Limit]]:
        """Return the limits of all handlers and sinks that have any, by name."""
        store = self.opened_store()
        return {lane: given.all for lane, given in (await store.limits()).items()} if isinstance(store, Limits) else {}

    async def limited_keys(self, what: type | str, *, limit: int = 100) -> Sequence[LimitedKey]:
        """List keys that have messages in flight, or due messages that wait because of a limit.

        Args:
            what: An event class, or the name of a handler or of a sink.
            limit: Most keys to return for each lane, 1 to 1,000. Keys with the most waiting messages come first.
        """
        store, most = _limits_store(self), check_count(limit, "limit", 1, 1_000)
        return [key for lane in _whole_lanes(what) for key in await store.limited_keys(lane, limit=most)]

    # --- dead letters and journal -------------------------------------------------------------------------

    async def dead_letters(
        self, of: type | str | None = None, *, message_id: str | None = None, limit: int | None = None
    ) -> AsyncIterator[DeadLetter]:
        """Yield dead letters, oldest first: each with its reason, attempts, first and last error.

        Args:
            of: Only letters of this event class, former names included; or of the handler or sink with this name.
            message_id: Only letters of this message, which the store finds by an index. An occurrence of a series has
                an id of its own.
            limit: Most letters; None = all.

        Raises:
            MessageIdError: No letter can have that id.
            UnsupportedByStoreError: The store keeps no dead letters, or another process owns the letters of that
                message.
        """
        store = self.opened_store()
        if message_id is not None:
            message_id = check_letters_id(message_id)
        lanes = () if of is None else lanes_and_address(of)[0]
        lane = lanes[0] if len(lanes) == 1 else None
        after: tuple[int, str, int] | None = None
        left = MOST if limit is None else check_count(limit, "limit", 0, MOST)
        while left > 0:
            size = min(PAGE, left)
            page = await store.dead_letters(lane=lane, message_id=message_id, after=after, limit=size)
            for letter in page:
                if not lanes or letter.record.envelope.lane in lanes:
                    yield letter
                    left -= 1
            if len(page) < size:
                return
            after = (page[-1].at_ms, *page[-1].key)

    async def redrive(self, *letters: DeadLetter | DeadKey) -> Sequence[Outcome]:
        """Schedule dead letters again, due now, with attempts from 1 and a new delivery id.

        Returns:
            For each letter `Stored`, or `Refused` with a code. A refused letter stays a dead letter.
            `not_found`: no dead letter has this key.
            `exists`: a message with the letter's id is already pending.
            `undecodable`: the letter's record cannot be read, so its destination is unknown.
        """
        store, observer = self.opened_store(), self._ready().observer
        return await (store.redrive(_keys(letters)) if observer is None else observer.redrive(store, _keys(letters)))

    async def purge(self, *letters: DeadLetter | DeadKey) -> int:
        """Delete dead letters; return how many were deleted."""
        store, observer = self.opened_store(), self._ready().observer
        return await (store.purge(_keys(letters)) if observer is None else observer.purge(store, _keys(letters)))

    async def journal(
        self, message_id: str | None = None, *, after: int = 0, limit: int = 100
    ) -> Sequence[JournalEntry]:
        """List the journal entries of one message, or of all messages, in order.

        Raises:
            UnsupportedByStoreError: The store keeps no journal, or was opened without one.
        """
        return await self.opened_store().journal(
            message_id=None if message_id is None else check_id(message_id, may_be_occurrence=True),
            after=check_count(after, "after", 0, MOST),
            limit=check_count(limit, "limit", 1, MOST),
        )


def lanes_and_address(what: type | str) -> tuple[tuple[Lane, ...], str | None]:
    """Return the lanes that an operator has named, and the address within them; None = all addresses.

    Args:
        what: An event class, former names included; or one name, as `pause` takes it.

    Raises:
        ConfigurationError, TargetError: No lane or destination can have that name.
    """
    if isinstance(what, type):
        if not is_event_class(what):
            raise ConfigurationError("what", shortened(what), "an event class, or a name")
        return type_names(what), None
    if isinstance(what, str) and ":" in what:
        lane, address = split_target(what, field="what")
        return ((address,), None) if lane == HANDLER_TARGET else ((lane,), address)
    return (check_type_name(what, "what"),), None


def check_limits(scheduler: Openable, what: type | str, *limits: Limit) -> None:
    """Raise the error with which `set_limits` would refuse these limits, if it would.

    Raises:
        ConfigurationError: The limits do not fit the handler or sink, or no lane can have that name.
        UnsupportedByStoreError: The store has no limits, or moves messages into this sink by itself.
    """
    _limits_store(scheduler)
    given = lane_limits(limits)
    for lane in _whole_lanes(what):
        _check_limits(scheduler, lane, given)


def _limits_store(scheduler: Openable) -> Limits:
    store = scheduler.opened_store()
    if not isinstance(store, Limits):
        raise UnsupportedByStoreError("limits", "asked for", STORES_WITH_LIMITS)
    return store


def _check_limits(scheduler: Openable, lane: Lane, limits: LaneLimits) -> None:
    sink, key = scheduler.sinks.get(lane), None if limits.each is None else limits.each.key
    if sink is None and key == ADDRESS and lane in scheduler.served():  # another process may have a sink of that name
        raise ConfigurationError("limit.key", repr(ADDRESS), f"the name of a sink with it: {lane} is no sink")
    if sink is not None and key not in (None, ADDRESS):
        raise ConfigurationError("limit.key", shortened(key), f"{ADDRESS!r}, or no key, for the sink {lane}")
    if sink is not None and limits and moves_into(scheduler.store, sink):
        got = f"set for the sink {lane}, into which the store moves messages by itself"
        raise UnsupportedByStoreError("limit", got, "a limit of a handler or of another sink")


def _whole_lanes(what: type | str) -> tuple[Lane, ...]:
    lanes, address = lanes_and_address(what)
    if address is not None:
        raise ConfigurationError("what", shortened(what), "a handler or a sink without an address")
    return lanes


def _keys(letters: Sequence[DeadLetter | DeadKey]) -> list[DeadKey]:
    keys = [letter.key if isinstance(letter, DeadLetter) else letter for letter in letters]
    for key in keys:
        if not isinstance(key, DeadKey):
            raise ConfigurationError("letter", kind_of(key), "a DeadLetter or its key")
    return keys

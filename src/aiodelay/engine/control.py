"""What operators do with a scheduler: look, pause, resume, redrive."""

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
    Blocked,
    DeadKey,
    DeadLetter,
    JournalEntry,
    Lane,
    LaneCounts,
    LoadBucket,
    Outcome,
    Query,
    Snapshot,
)
from aiodelay.errors import ConfigurationError, kind_of, shortened
from aiodelay.handlers.registration import is_event_class, type_names
from aiodelay.ports import Store, Transfer

__all__ = ["Control", "lanes_and_address"]

PAGE = 500
MOST = (1 << 63) - 1


class Control:
    """The operators' half of `Scheduler`."""

    def opened_store(self) -> Store:
        """Return the store of an open scheduler; `store` is also there while the scheduler is closed.

        Raises:
            ClosedError: The scheduler is not open.
        """
        raise NotImplementedError

    async def get(self, message_id: str) -> Snapshot | None:
        """Return a message as it stands now, None if it is neither pending nor in flight.

        Args:
            message_id: As it was scheduled, or as `pending` names a retry of a series' occurrence: `<id>~<due in ms>`.

        Raises:
            UnsupportedByStoreError: The store cannot be looked into.
            StoreUnavailableError: It does not answer.
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
        """Yield messages that are pending or in flight, by the time of their next attempt.

        Read page by page: what is scheduled meanwhile may or may not appear.

        Args:
            of: Only of this event class, under its former names too; or of this handler's or sink's name.
            since: Only those whose next attempt is not before this; aware.
            before: Only those whose next attempt is before this; aware.
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
        """Count messages by lane and state; a lane that no live instance reads says so."""
        return await self.opened_store().counts()

    async def load(self, *, bucket: Duration, buckets: int) -> Sequence[LoadBucket]:
        """Count what comes due in each of the next spans of time, by lane.

        Args:
            bucket: The length of one span.
            buckets: How many, 1 to 10,000.
        """
        bucket_ms = parse_duration(bucket, field="bucket", error=ConfigurationError, least_ms=1)
        return await self.opened_store().load(bucket_ms=bucket_ms, buckets=check_count(buckets, "buckets", 1, 10_000))

    # --- holds --------------------------------------------------------------------------------------------

    async def pause(self, what: type | str) -> bool:
        """Hold back an event class, a handler's name, a sink, or one destination; return whether it was running.

        Kept in the store, for all instances, until `resume`. What is held can be cancelled, replaced and listed; what
        is in flight goes on.

        Args:
            what: An event class, under its former names too; or one name: `"payment.check"`, `"stdout"`,
                `"stdout:audit"`.
        """
        lanes, address = lanes_and_address(what)
        return any([await self.opened_store().hold(lane, address) for lane in lanes])

    async def resume(self, what: type | str) -> bool:
        """Release what `pause` holds back; return whether it was held."""
        lanes, address = lanes_and_address(what)
        return any([await self.opened_store().release(lane, address) for lane in lanes])

    async def paused(self) -> Sequence[str]:
        """List what is held: `"payment.check"`, `"stdout:audit"`."""
        holds = await self.opened_store().holds()
        return [lane if address is None else f"{lane}:{address}" for lane, address in holds]

    async def blocked(self) -> Sequence[Blocked]:
        """List destinations that take nothing now, each with the reason and how many messages wait for it.

        Only of sinks that the store moves messages to by itself (`reaches`); they are tried again without being asked.
        """
        store = self.opened_store()
        return await store.blocked() if isinstance(store, Transfer) else ()

    # --- dead letters and history -------------------------------------------------------------------------

    async def dead_letters(
        self, of: type | str | None = None, *, message_id: str | None = None, limit: int | None = None
    ) -> AsyncIterator[DeadLetter]:
        """Yield dead letters, oldest first: each with its reason, attempts, first and last error.

        Args:
            of: Only of this event class, under its former names too; or of this handler's or sink's name.
            message_id: Only of this message, looked up by an index; an occurrence of a series has an id of its own.
            limit: Most letters; None = all.

        Raises:
            MessageIdError: No letter can have that id.
            UnsupportedByStoreError: The store keeps no dead letters, or another process owns those of that message.
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
        """Give dead letters a new life, due now, with attempts from 1 and a new delivery id.

        Returns:
            Per letter: `Stored`, or `Refused` as `not_found`, as `exists` where its id is scheduled again, or as
            `undecodable` where its record cannot be read, so that nothing tells where it goes; it stays a dead letter.
        """
        return await self.opened_store().redrive(_keys(letters))

    async def purge(self, *letters: DeadLetter | DeadKey) -> int:
        """Delete dead letters for good; return how many there were."""
        return await self.opened_store().purge(_keys(letters))

    async def journal(
        self, message_id: str | None = None, *, after: int = 0, limit: int = 100
    ) -> Sequence[JournalEntry]:
        """List what happened, in order: of one message, or of all.

        Raises:
            UnsupportedByStoreError: The store keeps no journal, or was opened without one.
        """
        return await self.opened_store().journal(
            message_id=None if message_id is None else check_id(message_id, may_be_occurrence=True),
            after=check_count(after, "after", 0, MOST),
            limit=check_count(limit, "limit", 1, MOST),
        )


def lanes_and_address(what: type | str) -> tuple[tuple[Lane, ...], str | None]:
    """Return the lanes that an operator names, and the address within them; None = all addresses.

    Args:
        what: An event class, which names its former lanes too; or one name, as `pause` takes it.

    Raises:
        ConfigurationError, TargetError: Nothing can have that name.
    """
    if isinstance(what, type):
        if not is_event_class(what):
            raise ConfigurationError("what", shortened(what), "an event class, or a name")
        return type_names(what), None
    if isinstance(what, str) and ":" in what:
        lane, address = split_target(what, field="what")
        return ((address,), None) if lane == HANDLER_TARGET else ((lane,), address)
    return (check_type_name(what, "what"),), None


def _keys(letters: Sequence[DeadLetter | DeadKey]) -> list[DeadKey]:
    keys = [letter.key if isinstance(letter, DeadLetter) else letter for letter in letters]
    for key in keys:
        if not isinstance(key, DeadKey):
            raise ConfigurationError("letter", kind_of(key), "a DeadLetter or its key")
    return keys

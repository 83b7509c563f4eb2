"""`Inspection`: the store's methods for operators. They list messages, pause lanes, and handle dead letters."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from heapq import nsmallest
from typing import Any

from msgspec import structs

from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.records.keys import member_of, text_of
from aiodelay.backends.redis.records.layouts import size_of
from aiodelay.backends.redis.records.positions import ShardPosition
from aiodelay.backends.redis.records.reading import (
    Lanes,
    journal_entry,
    lane_number,
    place_and_record,
    read_letter,
    read_record,
)
from aiodelay.core.values import (
    DeadKey,
    DeadLetter,
    Instance,
    JournalEntry,
    Lane,
    LaneCounts,
    LoadBucket,
    Outcome,
    Query,
    Snapshot,
    State,
)
from aiodelay.errors import RecordFormatError, StoreDamagedError, UnsupportedByStoreError
from aiodelay.ports.control import pause_order

from .base import Base
from .commands import answer_of
from .counting import add_load, counts_of
from .workers import live_workers

__all__ = ["Inspection"]

log: logging.Logger = logging.getLogger("aiodelay.redis")

AT_ONCE = 100
"""The largest number of records to read in one call."""
LETTERS_AT_ONCE = 20
"""The largest number of dead letters to fetch in one call."""
REDRIVEN_AT_ONCE = 40
LISTED_AT_ONCE = 400
"""The largest number of ids of messages or dead letters to list in one call."""
REVISION_BYTES = size_of("LETTER_KEY")
"""The number of bytes of the revision at the end of a field name in `dead`."""
SPANS_AT_ONCE = 120


class Inspection(Base):
    """Implements `Inspectable`, `Pauses`, `DeadLetters` and `Journal` for the store."""

    # --- messages -----------------------------------------------------------------------------------------

    async def get(self, message_id: str) -> Snapshot | None:
        """Return the pending or in-flight message with this id, or None if no such message is stored."""
        try:
            member = member_of(message_id)
        except UnicodeEncodeError:  # No message can have this id.
            return None
        found = await self._look([member])
        return found.get(member)

    async def _look(self, members: Sequence[bytes]) -> dict[bytes, Snapshot]:
        snapshots: dict[bytes, Snapshot] = {}
        at = 0
        while at < len(members):
            reply = await self.run("look", members[at : at + AT_ONCE])
            now_ms, held = int(reply[0]), frozenset(reply[1])
            values, tokens = reply[2::2], reply[3::2]
            lanes = await self.lanes_of([value for value in values if value])
            for member, value, token in zip(members[at:], values, tokens, strict=False):
                snapshot = (
                    _snapshot(member, value, int(token or 0), lanes=lanes, held=held, now_ms=now_ms) if value else None
                )
                if snapshot is not None:
                    snapshots[member] = snapshot
            at += len(values)
        return snapshots

    async def search(self, query: Query) -> Sequence[Snapshot]:
        """List messages in the order of (next attempt, id).

        The method first reads the order of the messages, and then the messages themselves. If a message ends between
        the two steps, the method leaves it out and takes a later message instead. If a message moves between the two
        steps, the method lists it with the next attempt that the first step found. So the next page always begins after
        the last message of this page.
        """
        found: list[Snapshot] = []
        part = structs.replace(query, limit=min(query.limit, LISTED_AT_ONCE))
        while len(found) < query.limit:
            places = await self._places(part)
            snapshots = await self._look(list(places.values()))
            found += [
                structs.replace(snapshots[member], next_attempt_ms=place[0])
                for place, member in places.items()
                if member in snapshots
            ]
            if len(places) < part.limit:
                break
            part = structs.replace(part, after=max(places))
        return found[: query.limit]

    async def series(self, *, after: str | None = None, limit: int = 100) -> Sequence[Snapshot]:
        """List recurring messages, in the order of their encoded ids in Redis."""
        found: list[Snapshot] = []
        last = b"" if after is None else member_of(after)
        while len(found) < limit:
            last, *members = await self.run("series", [last, min(limit - len(found), AT_ONCE)])
            snapshots = await self._look(members)
            found += [snapshots[each] for each in members if each in snapshots]
            if not last:
                break
        return found

    async def _places(self, query: Query) -> dict[tuple[int, str], bytes]:
        """Return the first messages of a query in order, as a map from (next attempt, id) to the encoded id."""
        to: Arg = "+inf" if query.to_ms is None else f"({query.to_ms}"
        from_: Arg = "-inf" if query.from_ms is None else query.from_ms
        tie: Arg = ""
        if query.after is not None and (query.from_ms is None or query.after[0] >= query.from_ms):
            tie, from_ = query.after[0], f"({query.after[0]}"
        found: dict[tuple[int, str], bytes] = {}
        async for pairs in self._range("lanes", [tie, from_, to, query.limit], query.lanes):
            places = ((int(place), text_of(member), member) for member, place in pairs)
            found |= {(place, name): member for place, name, member in places if _is_after((place, name), query)}
            found = {place: found[place] for place in nsmallest(query.limit, found)}
        return found

    async def _range(
        self, what: str, which: list[Arg], lanes: Sequence[Lane] = ()
    ) -> AsyncIterator[Iterable[tuple[bytes, bytes]]]:
        """Yield the pairs that `range.lua` returns. Call the script again until no pairs are left.

        Many messages can have the same next attempt. One call for all of them would block the server for a long time.
        """
        reply = await self.run("range", [what, *which, *lanes])
        yield _pairs(reply[2:])
        while reply[1]:
            reply = await self.run("range", ["left", *which, *reply[1]])
            yield _pairs(reply[2:])

    async def counts(self) -> Mapping[Lane, LaneCounts]:
        """Count messages and dead letters by lane and state.

        A message that was scheduled before its address was paused counts as scheduled or overdue at first. It counts as
        held from the time when it reaches the head of its lane.
        """
        return counts_of(await self.run("counts", []))

    async def instances(self) -> Sequence[Instance]:
        """List the live workers of the namespace."""
        reply = await self.command("HGETALL", self._keys.key("workers"))
        flat = [part for pair in reply.items() for part in pair] if isinstance(reply, dict) else reply
        return live_workers(flat, self.now_ms())

    async def load(self, *, bucket_ms: int, buckets: int, from_ms: int | None = None) -> Sequence[LoadBucket]:
        """Count the messages that become due from now on, or from another time, by lane and by span of `bucket_ms`."""
        reply = await self.run("counts", [])
        now_ms = int(reply[0]) if from_ms is None else from_ms
        found = Counter[tuple[int, Lane]]()
        for lane in map(bytes.decode, reply[4::6]):
            for first in range(0, buckets, SPANS_AT_ONCE):
                spans = min(SPANS_AT_ONCE, buckets - first)
                which: list[Arg] = [lane, now_ms + first * bucket_ms, bucket_ms, spans]
                left, *counted = await self.run("load", which)
                add_load(found, lane, first, counted)
                while left:
                    left, *counted = await self.run("load", [*which, *left])
                    add_load(found, lane, first, counted)
        return [LoadBucket(now_ms + span * bucket_ms, lane, found[span, lane]) for span, lane in sorted(found)]

    async def position(self, source: str) -> int | None:
        """Return the last position of an intake, or None if the intake has stored no position."""
        text = await self.position_text(source)
        return None if text is None else ShardPosition.of(text).position

    async def position_text(self, source: str) -> str | None:
        """Return the text under which this shard keeps the position of an intake, or None if it keeps none."""
        position = await self.command("HGET", self._keys.key("src"), source)
        return None if position is None else position.decode()

    # --- holds --------------------------------------------------------------------------------------------

    async def pause(self, lane: Lane, address: str | None = None) -> bool:
        """Pause a lane, or one address of the lane. Return True if the call changed the state."""
        return bool(await self.run("hold", ["hold", lane, _place(address)], durable=True))

    async def resume(self, lane: Lane, address: str | None = None) -> bool:
        """Resume a lane, or one address of the lane. Return True if the call changed the state."""
        changed = bool(await self.run("hold", ["release", lane, _place(address)], durable=True))
        # Return parked messages in steps, so that the server can serve other clients between the steps. If this process
        # ends here, `tidy` or a repetition of this call returns the rest.
        while await self.run("hold", ["return", lane, _place(address)]):
            pass
        self.waiters.wake()
        return changed

    async def paused(self) -> Sequence[tuple[Lane, str | None]]:
        """List the paused lanes and addresses, in order. The address of a paused lane is None."""
        found: list[tuple[Lane, str | None]] = []
        members = await self.command("SMEMBERS", self._keys.key("holds"))
        lanes = await self.lanes_of(list(members))
        for number, colon, address in (member.decode().partition(":") for member in members):
            try:
                found.append((lanes.name(int(number)), address if colon else None))
            except LookupError as error:
                names = self._keys.key("lanes")
                raise StoreDamagedError(
                    self.name, f"the key {names} has no name for lane {number}: somebody deleted a key"
                ) from error
        return sorted(found, key=pause_order)

    # --- dead letters -------------------------------------------------------------------------------------

    async def dead_letters(
        self,
        *,
        lane: Lane | None = None,
        message_id: str | None = None,
        after: tuple[int, str, int] | None = None,
        limit: int = 100,
    ) -> Sequence[DeadLetter]:
        """List dead letters, oldest first."""
        found: list[DeadLetter] = []
        most = min(limit, LISTED_AT_ONCE)
        while len(found) < limit:
            if message_id is None:
                places = await self._dead_places(after, most)
            else:
                places = await self._dead_places_of(message_id, after, most)
            letters = await self._letters(places)
            found += [letter for letter in letters if lane in (None, letter.record.envelope.lane)]
            if len(places) < most:
                break
            after = max(places)
        return found[:limit]

    async def _dead_places(self, after: tuple[int, str, int] | None, limit: int) -> dict[tuple[int, str, int], bytes]:
        """Return the oldest dead letters after a place, as a map from places to field names in `dead`.

        The place of a dead letter is (time, id, revision). The time is when the message became a dead letter.
        """
        tie, from_ = ("", "-inf") if after is None else (str(after[0]), f"({after[0]}")
        found: dict[tuple[int, str, int], bytes] = {}
        async for pairs in self._range("graves", [tie, from_, "+inf", limit]):
            for key, at_ms in pairs:
                place = int(at_ms), text_of(key[:-REVISION_BYTES]), int.from_bytes(key[-REVISION_BYTES:], "big")
                if after is None or place > after:
                    found[place] = key
            found = {place: found[place] for place in nsmallest(limit, found)}
        return found

    async def _dead_places_of(
        self, message_id: str, after: tuple[int, str, int] | None, limit: int
    ) -> dict[tuple[int, str, int], bytes]:
        """Return the oldest dead letters of one message that come after a place, as `_dead_places` does."""
        try:
            member = member_of(message_id)
        except UnicodeEncodeError:  # No message can have this id.
            return {}
        await self._index_letters()
        found: dict[tuple[int, str, int], bytes] = {}
        for keys in await self._keys_of_letters(member):
            for key, at_ms in zip(keys, await self.command("ZMSCORE", self._keys.key("graves"), *keys), strict=True):
                if at_ms is not None:  # None: another process purged the dead letter after the index was read.
                    found[int(at_ms), message_id, int.from_bytes(key[-REVISION_BYTES:], "big")] = key
        places = nsmallest(limit, (place for place in found if after is None or place > after))
        return {place: found[place] for place in places}

    async def _keys_of_letters(self, member: bytes) -> list[list[bytes]]:
        """Return the field names in `dead` of all dead letters of one message, in lists of at most `AT_ONCE`."""
        size = (len(member) + REVISION_BYTES).to_bytes(2, "big")
        which, last = self._keys.key("graves:ids"), b"[" + size + member + b"\xff" * REVISION_BYTES
        first = b"[" + size + member + b"\x00" * REVISION_BYTES
        chunks: list[list[bytes]] = []
        while keys := await self.command("ZRANGE", which, first, last, "BYLEX", "LIMIT", 0, AT_ONCE):
            chunks.append([key[len(size) :] for key in keys])
            first = b"(" + keys[-1]
        return chunks

    async def _index_letters(self) -> None:
        """Complete the index that finds dead letters by id. Older versions of aiodelay did not write this index."""
        at: bytes | int | None = b""
        while at is not None:
            at = await self.run("graves", [at])

    async def _letters(self, order: Mapping[tuple[int, str, int], bytes]) -> list[DeadLetter]:
        letters: list[DeadLetter] = []
        first = list(order)
        for start in range(0, len(first), LETTERS_AT_ONCE):
            chunk = first[start : start + LETTERS_AT_ONCE]
            values = await self.command("HMGET", self._keys.key("dead"), *(order[each] for each in chunk))
            lanes = await self.lanes_of(values)
            letters += [
                read_letter(order[each], value, each[0], lanes)
                for each, value in zip(chunk, values, strict=True)
                if value is not None
            ]
        return letters

    async def redrive(self, keys: Sequence[DeadKey]) -> Sequence[Outcome]:
        """Schedule dead letters again. Return one outcome for each key, in the order of the keys."""
        outcomes: list[Outcome] = []
        while left := keys[len(outcomes) : len(outcomes) + REDRIVEN_AT_ONCE]:
            answers = await self.run("redrive", ["redrive", *_dead_arguments(left)], durable=True)
            outcomes += [answer_of(answer, None) for answer in answers]
        self.waiters.wake()
        return outcomes

    async def purge(self, keys: Sequence[DeadKey]) -> int:
        """Delete dead letters. Return how many of them were deleted."""
        answers: list[bytes] = []
        while left := keys[len(answers) : len(answers) + AT_ONCE]:
            answers += await self.run("redrive", ["purge", *_dead_arguments(left)], durable=True)
        return answers.count(b"s")

    # --- journal ------------------------------------------------------------------------------------------

    def check_journal(self) -> None:
        """Check that the store keeps a journal.

        Raises:
            UnsupportedByStoreError: The store keeps no journal.
        """
        if not self.keeps_journal:
            raise UnsupportedByStoreError("journal", "off", "'redis://host?journal=1000'")

    async def journal(
        self, *, message_id: str | None = None, after: int = 0, limit: int = 100
    ) -> Sequence[JournalEntry]:
        """List entries of the journal, oldest first."""
        self.check_journal()
        wanted = None if message_id is None else member_of(message_id)
        found: list[JournalEntry] = []
        while len(found) < limit:
            entries = await self.command("XRANGE", self._keys.key("journal"), f"{after + 1}-0", "+", "COUNT", AT_ONCE)
            if not entries:
                break
            lanes = await self.lanes_of(entries)
            for number, fields in entries:
                after = int(number.partition(b"-")[0])
                entry = dict(_pairs(fields))
                if wanted in (None, entry[b"id"]):
                    found.append(journal_entry(after, entry, lanes))
        return found[:limit]


def _snapshot(
    member: bytes, value: bytes, token: int, *, lanes: Lanes, held: frozenset[bytes], now_ms: int
) -> Snapshot | None:
    try:
        record = read_record(member, value, lanes)
    except RecordFormatError as error:
        log.warning("message %r cannot be read: %s", text_of(member), error.problem)
        return None
    place_ms, _ = place_and_record(value)
    number = b"%d" % lane_number(value)
    if token:
        state = State.IN_FLIGHT
    elif number in held or number + b":" + record.envelope.address.encode() in held:
        state = State.HELD
    else:
        state = State.OVERDUE if place_ms <= now_ms else State.SCHEDULED
    return Snapshot(record, state, place_ms)


def _is_after(place: tuple[int, str], query: Query) -> bool:
    if query.to_ms is not None and place[0] >= query.to_ms:
        return False
    return query.after is None or place > query.after


def _pairs(flat: Sequence[Any]) -> Iterable[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _place(address: str | None) -> str:
    return "" if address is None else f":{address}"


def _dead_arguments(keys: Sequence[DeadKey]) -> list[Arg]:
    return [part for key in keys for part in (member_of(key.id), key.revision)]

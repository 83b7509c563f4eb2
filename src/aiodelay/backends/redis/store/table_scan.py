"""`Scanner`: reads whole tables of a namespace for `ports.Scannable`. It needs no open store.

`Scanner.parts` splits a table into parts, and `Scanner.read` reads one part. Each of the two methods opens a connection
of its own. The *place* of a message is a pair: its next attempt in epoch ms, and its sequence number. Most parts of the
table of pending messages cover a range of places. The other parts name messages in flight, and the scan looks up each
of these messages by id.

A message that is stored after the split has a later sequence number, and the scan skips the message. So the scan reads
no message twice, and it reads each unchanged message once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress

import msgspec
from msgspec import Struct

from aiodelay.backends.redis.connection.checks import check_layout
from aiodelay.backends.redis.connection.options import Options
from aiodelay.backends.redis.connection.pipelined_connection import PipelinedConnection
from aiodelay.backends.redis.connection.scripts import Arg, packed
from aiodelay.backends.redis.records.columns import (
    PLACED_COLUMNS,
    SEQUENCE_BYTES,
    Known,
    columns_of,
    columns_of_places,
    elsewhere_in,
    snapshot_of,
)
from aiodelay.backends.redis.records.keys import Keys, member_of, text_of
from aiodelay.backends.redis.records.layouts import span
from aiodelay.backends.redis.records.reading import Lanes, lanes_in, read_letter
from aiodelay.core.table_scan import (
    BATCH_ROWS,
    Columns,
    Ended,
    Scan,
    columns_of_ended,
    columns_of_letters,
    columns_of_messages,
    parts_for,
)
from aiodelay.core.values import Lane

__all__ = ["Part", "Scanner"]

NAMES_AT_ONCE = 5_000
VALUES_AT_ONCE, VALUE_BYTES = 2_000, 2 << 20
"""The largest number of values to fetch in one call, and the approximate largest number of their bytes.

The scanner estimates the bytes from the largest value that it has read so far.
"""
FIRST_AT_ONCE = 50
IDS_AT_ONCE = 100
LETTERS_AT_ONCE = 50
ENDED_AT_ONCE = 1_000
IDS_A_PART = 5_000
SAMPLES = 32
"""The number of sampled places per part. The scanner chooses the limits of the parts from the samples."""
REVISION_BYTES = 6
KEY_COLUMNS = frozenset({"id", "revision", "at_ms"})
"""Columns of a dead letter that the scanner takes from the letter's key and time. Other columns need the value."""
MOST_MS = 1 << 48

Place = tuple[int, int]
"""A place: the next attempt in epoch ms, and the sequence number. Messages in a lane are in the order of places."""
UNTIL, ENDED_VERSION = span("REMEMBERED", "until"), span("REMEMBERED", "content")
"""The positions of the end time and of the version in a value of `ended:<k>`."""


class Part(Struct, frozen=True):
    """A part of a table.

    Attributes:
        first: The first place of the part. For dead letters, (the first time in epoch ms, 0).
        end: The first place after the part. With None, the part reaches to the end of the table.
        last_sequence: The largest sequence number at the time of the split. The scan skips later messages.
        has_parity: True if every sequence number shows whether the place of its message is its due time. An even number
            means yes, and an odd number means no.
        members: The encoded ids to read. With None, the part has all messages from `first` to `end`.
        window: The key of the window of ended messages to read; "" for other tables. A window is a hash of the messages
            that ended in the same span of time.
    """

    first: Place = (0, 0)
    end: Place | None = None
    last_sequence: int = 0
    has_parity: bool = False
    members: tuple[bytes, ...] | None = None
    window: str = ""


class _Page(Struct, frozen=True):
    """Members of a sorted set and their scores, in the order of their places."""

    names: list[bytes]
    scores: list[bytes]

    def place(self, row: int) -> Place:
        return int(self.scores[row]), int.from_bytes(self.names[row][:SEQUENCE_BYTES], "big")

    def places_ms(self) -> list[int]:
        return msgspec.json.decode(b"[%b]" % b",".join(self.scores), type=list[int])

    def within(self, first: Place, end: Place | None, last_sequence: int) -> _Page:
        """Return the members from place `first` to before `end`, with sequence numbers up to `last_sequence`."""
        rows = range(len(self.names))
        start = bisect_left(rows, first, key=self.place)
        stop = len(rows) if end is None else bisect_left(rows, end, key=self.place)
        page = self if (start, stop) == (0, len(rows)) else _Page(self.names[start:stop], self.scores[start:stop])
        later = (last_sequence + 1).to_bytes(SEQUENCE_BYTES, "big")
        if max(page.names, default=b"") < later:
            return page
        return page.where([name < later for name in page.names])

    def where(self, chosen: Sequence[bool]) -> _Page:
        return _Page(list(compress(self.names, chosen)), list(compress(self.scores, chosen)))

    def without(self, names: set[bytes]) -> _Page:
        return self.where([each not in names for each in self.names])

    def split(self) -> tuple[_Page, _Page]:
        """Return two pages: the members whose place is their due time, and all other members."""
        elsewhere = elsewhere_in(self.names)
        if not elsewhere:
            return self, _Page([], [])
        return self.where([not each for each in elsewhere]), self.where(elsewhere)


class Scanner:
    """Reads the tables of one namespace.

    Args:
        options: The options of the connection.
        keys: The keys of the namespace.
    """

    def __init__(self, options: Options, keys: Keys) -> None:
        self._options, self._keys = options, keys
        self._at_once, self._largest = FIRST_AT_ONCE, 1

    def parts(self, scan: Scan) -> list[Part]:
        """Split a table into parts. `ports.Scannable` has the rules."""
        with PipelinedConnection(self._options, self._keys) as server:
            meta = server.ask("HMGET", self._keys.key("meta"), "schema", "shards", "seq", "parity")
            schema, shards, sequence, parity = meta
            if schema is shards is None:
                return []
            check_layout(self._keys, self._options.name, schema, shards)
            if scan.table == "dead":
                return self._dead_parts(server, scan)
            if scan.table == "done":
                return self._done_parts(server, scan)
            if scan.ids is not None:
                return list(_of_members(_members(scan.ids)))
            return self._message_parts(server, scan, int(sequence or 0), has_parity=parity is not None)

    def read(self, scan: Scan, part: Part) -> Iterator[Columns]:
        """Yield the rows of a part. `ports.Scannable` has the rules."""
        with PipelinedConnection(self._options, self._keys) as server:
            if scan.table == "dead":
                yield from self._dead(server, scan, part)
            elif scan.table == "done":
                yield from self._done(server, scan, part)
            elif part.members is not None:
                yield from self._looked_up(server, scan, part.members)
            else:
                yield from self._messages(server, scan, part)

    # --- messages -----------------------------------------------------------------------------------------

    def _lanes(self, server: PipelinedConnection) -> dict[int, Lane]:
        flat = server.ask("HGETALL", self._keys.key("lanes"))
        names = (name.decode("utf-8", "backslashreplace") for name in flat[::2])
        return dict(zip(map(int, flat[1::2]), names, strict=True))

    def _sets(
        self, server: PipelinedConnection, lanes: dict[int, Lane], lane: Lane | None
    ) -> tuple[list[bytes], list[bytes]]:
        """Return the names of two groups of sets: sets of waiting messages, and sets of parked messages.

        A parked message belongs to a paused or blocked address of a lane. The store keeps it in a set apart.

        Args:
            server: The connection to the server.
            lanes: The names of the lanes by number.
            lane: The lane to read. None reads all lanes.
        """
        wanted = [number for number, name in lanes.items() if lane in (None, name)]
        parked = server.ask("SMEMBERS", self._keys.key("parked"))
        aside = [b"parked:" + name for name in parked if int(name.partition(b":")[0]) in wanted]
        return [b"due:%d" % number for number in wanted], aside

    def _message_parts(self, server: PipelinedConnection, scan: Scan, sequence: int, *, has_parity: bool) -> list[Part]:
        lanes = self._lanes(server)
        wanted = [number for number, name in lanes.items() if scan.lane in (None, name)]
        leased = server.ask_all([("ZRANGE", self._keys.key(f"leased:{number}"), 0, -1) for number in wanted])
        sets = list(chain.from_iterable(self._sets(server, lanes, scan.lane)))
        bounds = self._bounds(server, scan, sets)
        ends = [*bounds[1:], None]
        parts = [Part(first, end, sequence, has_parity) for first, end in zip(bounds, ends, strict=True)]
        return [*parts, *_of_members(chain.from_iterable(leased))]

    def _bounds(self, server: PipelinedConnection, scan: Scan, sets: Sequence[bytes]) -> list[Place]:
        """Return the places at which parts of about the same size begin.

        The time in a message's place is the due time, or a later time if the message waits for a retry.
        """
        first_ms = scan.from_ms or 0
        keys = [self._keys.tag.encode() + each for each in sets]
        skipped: list[int] = server.ask_all([("ZCOUNT", key, "-inf", f"({first_ms}") for key in keys])
        sizes: list[int] = server.ask_all([("ZCOUNT", key, first_ms, "+inf") for key in keys])
        rows = sum(sizes)
        parts = parts_for(scan, rows)
        step = max(rows // (parts * SAMPLES), 1)
        wanted = [
            (key, rank)
            for key, skip, size in zip(keys, skipped, sizes, strict=True)
            for rank in range(skip + step // 2, skip + size, step)
        ]
        found = server.ask_all([("ZRANGE", key, rank, rank, "WITHSCORES") for key, rank in wanted])
        places = sorted((int(ms), int.from_bytes(member[:SEQUENCE_BYTES], "big")) for member, ms in filter(None, found))
        bounds = [places[len(places) * i // parts] for i in range(1, parts) if places]
        return [(first_ms, 0), *dict.fromkeys(bounds)]

    def _known(self, server: PipelinedConnection, lanes: dict[int, Lane]) -> Known:
        held: list[bytes] = server.ask("SMEMBERS", self._keys.key("holds"))
        full = server.ask_all([("ZRANGE", self._keys.key(f"blocked:{number}"), 0, -1) for number in lanes])
        held += [b"%d:%b" % (number, address) for number, each in zip(lanes, full, strict=True) for address in each]
        return Known(Lanes({name: number for number, name in lanes.items()}), held)

    def _messages(self, server: PipelinedConnection, scan: Scan, part: Part) -> Iterator[Columns]:
        lanes = self._lanes(server)
        known, now_ms = self._known(server, lanes), _now_ms(server)
        due, aside = self._sets(server, lanes, scan.lane)
        needed = _needed(scan)
        places_suffice = part.has_parity and PLACED_COLUMNS.issuperset(needed)
        # Race: a resume during the scan moves a message from a parked set to a waiting set, under the same name. The
        # scan reads the parked sets first and remembers their names, so that it does not read such a message twice.
        aside_names = set[bytes]()
        for which in [*aside, *due]:
            for page in self._pages(server, part, which):
                if which in aside:
                    aside_names.update(page.names)
                elif aside_names:
                    page = page.without(aside_names)  # noqa: PLW2901 - the same page
                left = page
                if places_suffice:
                    placed, left = page.split()
                    if placed.names:
                        yield _taken(columns_of_places(placed.names, placed.places_ms(), needed), scan)
                for members, values in self._values(server, left.names):
                    yield _taken(columns_of(members, values, needed, known, now_ms), scan)

    def _pages(self, server: PipelinedConnection, part: Part, which: bytes) -> Iterator[_Page]:
        """Yield the members of a set that belong to a part, in pages."""
        key = self._keys.tag.encode() + which
        first = part.first
        end_ms: Arg = "+inf" if part.end is None else part.end[0]
        while True:
            flat = server.ask("ZRANGEBYSCORE", key, first[0], end_ms, "WITHSCORES", "LIMIT", 0, NAMES_AT_ONCE)
            if len(flat) == 2 * NAMES_AT_ONCE and int(flat[-1]) == first[0]:
                # A whole page has the same ms, so the ms alone cannot say where the next page begins.
                flat = server.run("scan", which, *first, NAMES_AT_ONCE)
            page = _Page(flat[::2], flat[1::2])
            size = len(page.names)
            last = page.place(size - 1) if size else first
            yield page.within(first, part.end, part.last_sequence)
            if size < NAMES_AT_ONCE or (part.end is not None and last >= part.end):
                return
            first = (last[0], last[1] + 1)

    def _values(self, server: PipelinedConnection, names: Sequence[bytes]) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Yield batches of encoded ids and their values. Request the next batch before the caller uses this batch."""
        members = [each[SEQUENCE_BYTES:] for each in names]
        asked = members[: self._at_once]
        if asked:
            server.send(packed(["HMGET", self._keys.key("msg"), *asked]))
        at = len(asked)
        while asked:
            found = server.answer()
            asked, of = members[at : at + self._at_once], asked
            if asked:
                server.send(packed(["HMGET", self._keys.key("msg"), *asked]))
            at += len(asked)
            if None in found:  # Some messages have ended since the scan read their ids.
                kept = [(member, value) for member, value in zip(of, found, strict=True) if value]
                of, found = [member for member, _ in kept], [value for _, value in kept]
            if found:
                self._largest = max(self._largest, *map(len, found))
                self._at_once = max(min(4 * self._at_once, VALUES_AT_ONCE, VALUE_BYTES // self._largest), 1)
                yield of, found

    def _looked_up(self, server: PipelinedConnection, scan: Scan, members: Sequence[bytes]) -> Iterator[Columns]:
        at = 0
        while at < len(members):
            asked = members[at : at + IDS_AT_ONCE]
            now, held, *pairs = server.run("look", *asked)
            known = Known(lanes_in(server.ask("HGETALL", self._keys.key("lanes"))), held)
            found = [
                snapshot_of(member, value, known, int(now), is_leased=bool(token))
                for member, value, token in zip(asked, pairs[::2], pairs[1::2], strict=False)
                if value
            ]
            taken = [each for each in found if scan.takes(each.record.envelope.lane, each.record.due_ms)]
            yield columns_of_messages(taken, scan.columns)
            at += len(pairs) // 2

    # --- dead letters -------------------------------------------------------------------------------------

    def _dead_parts(self, server: PipelinedConnection, scan: Scan) -> list[Part]:
        graves = self._keys.key("graves")
        rows = server.ask("ZCARD", graves)
        parts = parts_for(scan, rows)
        found = server.ask_all(
            [("ZRANGE", graves, rows * i // parts, rows * i // parts, "WITHSCORES") for i in range(1, parts)]
        )
        bounds = [(0, 0), *dict.fromkeys((int(at_ms), 0) for _, at_ms in filter(None, found))]
        return [Part(first, end) for first, end in zip(bounds, [*bounds[1:], None], strict=True)]

    def _dead(self, server: PipelinedConnection, scan: Scan, part: Part) -> Iterator[Columns]:
        keys = self._dead_keys(server, scan, part)
        if scan.lane is None and KEY_COLUMNS.issuperset(_needed(scan)):
            for at in range(0, len(keys), BATCH_ROWS):
                yield _columns_of_keys(keys[at : at + BATCH_ROWS], scan.columns)
        else:
            yield from self._letters(server, scan, keys)

    def _dead_keys(self, server: PipelinedConnection, scan: Scan, part: Part) -> list[tuple[bytes, int]]:
        """Return the keys of a part's dead letters, each with the time at which the message became a dead letter."""
        end = "+inf" if part.end is None else f"({part.end[0]}"
        flat = server.ask("ZRANGEBYSCORE", self._keys.key("graves"), part.first[0], end, "WITHSCORES")
        ids = None if scan.ids is None else frozenset(_members(scan.ids))
        return [
            (key, int(at_ms))
            for key, at_ms in zip(flat[::2], flat[1::2], strict=True)
            if ids is None or key[:-REVISION_BYTES] in ids
        ]

    def _letters(self, server: PipelinedConnection, scan: Scan, keys: Sequence[tuple[bytes, int]]) -> Iterator[Columns]:
        for at in range(0, len(keys), LETTERS_AT_ONCE):
            chunk = keys[at : at + LETTERS_AT_ONCE]
            values = server.ask("HMGET", self._keys.key("dead"), *(key for key, _ in chunk))
            lanes = lanes_in(server.ask("HGETALL", self._keys.key("lanes")))
            letters = [
                read_letter(key, value, at_ms, lanes)
                for (key, at_ms), value in zip(chunk, values, strict=True)
                if value is not None
            ]
            taken = [each for each in letters if scan.takes(each.record.envelope.lane, each.record.due_ms)]
            yield columns_of_letters(taken, scan.columns)

    # --- ended messages -----------------------------------------------------------------------------------

    def _windows(self, server: PipelinedConnection) -> list[str]:
        names = server.ask("ZRANGE", self._keys.key("done"), 0, -1)
        return [self._keys.key(f"ended:{name[1:].decode()}") for name in names if name[:1] == b"v"]

    def _done_parts(self, server: PipelinedConnection, scan: Scan) -> list[Part]:
        if scan.ids is not None:
            return [Part(members=tuple(_members(scan.ids)))]
        return [Part(window=name) for name in self._windows(server)]

    def _done(self, server: PipelinedConnection, scan: Scan, part: Part) -> Iterator[Columns]:
        """Yield the ended messages in a window. Skip an id if another window has a later version of the id."""
        now_ms = _now_ms(server)
        windows = self._windows(server)
        own = windows.index(part.window) if part.window in windows else -1
        if part.members is None and own < 0:  # The window has expired and was deleted.
            return
        for members in self._members_of(server, part):
            rows = server.ask_all([("HMGET", window, *members) for window in windows]) if members else []
            ended = []
            for member, *values in zip(members, *rows, strict=True):
                known = [
                    (int.from_bytes(value[ENDED_VERSION], "big"), at, int.from_bytes(value[UNTIL], "big"))
                    for at, value in enumerate(values)
                    if value is not None and int.from_bytes(value[UNTIL], "big") > now_ms
                ]
                version, at, until_ms = max(known, default=(0, -2, 0))
                if at == own or (part.members is not None and known):
                    ended.append(Ended(text_of(member), version, until_ms))
            yield columns_of_ended(ended, scan.columns)

    def _members_of(self, server: PipelinedConnection, part: Part) -> Iterator[Sequence[bytes]]:
        """Yield each encoded id of a window once. If the part names ids, yield these ids instead."""
        if part.members is not None:
            for at in range(0, len(part.members), ENDED_AT_ONCE):
                yield part.members[at : at + ENDED_AT_ONCE]
            return
        seen = set[int]()  # Hash values of ids: HSCAN may return a field twice while the hash grows.
        cursor: Arg = 0
        while True:
            cursor, flat = server.ask("HSCAN", part.window, cursor, "COUNT", ENDED_AT_ONCE)
            new = [each for each in dict.fromkeys(flat[::2]) if hash(each) not in seen]
            seen.update(map(hash, new))
            yield new
            if cursor == b"0":
                return


def _now_ms(server: PipelinedConnection) -> int:
    seconds, micros = server.ask("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


def _columns_of_keys(keys: Sequence[tuple[bytes, int]], wanted: Iterable[str]) -> Columns:
    """Return the columns of dead letters that need only the letters' keys and times, and not their values.

    Each key comes with the time at which the message became a dead letter.
    """
    found: dict[str, Sequence[str | int]] = {
        "id": [text_of(key[:-REVISION_BYTES]) for key, _ in keys],
        "revision": [int.from_bytes(key[-REVISION_BYTES:], "big") for key, _ in keys],
        "at_ms": [at_ms for _, at_ms in keys],
    }
    return {name: found[name] for name in wanted}


def _needed(scan: Scan) -> Sequence[str]:
    """Return the names of the columns to decode: the result's columns, and the due time if the scan filters by it."""
    due = ("due_ms",) if (scan.from_ms, scan.to_ms) != (None, None) else ()
    return tuple(dict.fromkeys((*scan.columns, *due)))


def _taken(columns: Columns, scan: Scan) -> Columns:
    """Return the rows whose due time is within the bounds of the scan, with only the columns of the result."""
    if (scan.from_ms, scan.to_ms) == (None, None):
        return columns
    from_ms, to_ms = scan.from_ms or 0, MOST_MS if scan.to_ms is None else scan.to_ms
    chosen = [from_ms <= due_ms < to_ms for due_ms in columns["due_ms"]]
    if all(chosen):
        return {name: columns[name] for name in scan.columns}
    return {name: list(compress(columns[name], chosen)) for name in scan.columns}


def _members(ids: Iterable[str]) -> Iterator[bytes]:
    """Yield encoded ids. Skip each id that is not valid Unicode, because no message can have such an id."""
    for each in ids:
        try:
            yield member_of(each)
        except UnicodeEncodeError:
            continue


def _of_members(members: Iterable[bytes]) -> Iterator[Part]:
    """Yield parts that name these encoded ids. No two parts name the same id."""
    found = list(dict.fromkeys(members))
    for at in range(0, len(found), IDS_A_PART):
        yield Part(members=tuple(found[at : at + IDS_A_PART]))

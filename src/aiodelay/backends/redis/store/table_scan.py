"""Reading whole tables of a namespace without opening the store: split by place, each part by one connection.

What is put or put back after the plan was made has a later sequence, and is passed over; what was in flight then is
looked up by its id. So nothing is read twice, and what stands still is read once.
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
"""Most values that are fetched in one call, and about how many bytes, by the largest one so far."""
FIRST_AT_ONCE = 50
IDS_AT_ONCE = 100
LETTERS_AT_ONCE = 50
ENDED_AT_ONCE = 1_000
IDS_A_PART = 5_000
SAMPLES = 32
"""So many times as many places as parts are looked at to split what there is."""
REVISION_BYTES = 6
KEY_COLUMNS = frozenset({"id", "revision", "at_ms"})
"""Columns of a dead letter that its key and its time tell, without its value."""
MOST_MS = 1 << 48

Place = tuple[int, int]
"""Epoch ms and sequence: the order in which messages stand."""
UNTIL, ENDED_VERSION = span("REMEMBERED", "until"), span("REMEMBERED", "content")
"""Where a value of `ended:<k>` has its two parts."""


class Part(Struct, frozen=True):
    """A part of a table.

    Attributes:
        first: From this place on; of dead letters, this time.
        end: And before this; None = to the end.
        last_sequence: Nothing that was put later.
        has_parity: Whether sequences tell what stands at its due time.
        members: Only these ids, as they stand; None = all that stands there.
        window: Only what is remembered in this.
    """

    first: Place = (0, 0)
    end: Place | None = None
    last_sequence: int = 0
    has_parity: bool = False
    members: tuple[bytes, ...] | None = None
    window: str = ""


class _Page(Struct, frozen=True):
    """Members of a lane and their places as Redis writes them, in their order."""

    names: list[bytes]
    scores: list[bytes]

    def place(self, row: int) -> Place:
        return int(self.scores[row]), int.from_bytes(self.names[row][:SEQUENCE_BYTES], "big")

    def places_ms(self) -> list[int]:
        return msgspec.json.decode(b"[%b]" % b",".join(self.scores), type=list[int])

    def within(self, first: Place, end: Place | None, last_sequence: int) -> _Page:
        """Return what stands between two places, and was put before the others."""
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
        """Return what stands at its due time, and what may not."""
        elsewhere = elsewhere_in(self.names)
        if not elsewhere:
            return self, _Page([], [])
        return self.where([not each for each in elsewhere]), self.where(elsewhere)


class Scanner:
    """Reads the tables of one namespace.

    Args:
        options: Where the server is.
        keys: Of the namespace.
    """

    def __init__(self, options: Options, keys: Keys) -> None:
        self._options, self._keys = options, keys
        self._at_once, self._largest = FIRST_AT_ONCE, 1

    def parts(self, scan: Scan) -> list[Part]:
        """Split a table; see `ports.Scannable`."""
        with PipelinedConnection(self._options, self._keys) as line:
            meta = line.ask("HMGET", self._keys.key("meta"), "schema", "shards", "seq", "parity")
            schema, shards, sequence, parity = meta
            if schema is shards is None:
                return []
            check_layout(self._keys, self._options.name, schema, shards)
            if scan.table == "dead":
                return self._dead_parts(line, scan)
            if scan.table == "done":
                return self._done_parts(line, scan)
            if scan.ids is not None:
                return list(_of_members(_members(scan.ids)))
            return self._message_parts(line, scan, int(sequence or 0), has_parity=parity is not None)

    def read(self, scan: Scan, part: Part) -> Iterator[Columns]:
        """Read a part; see `ports.Scannable`."""
        with PipelinedConnection(self._options, self._keys) as line:
            if scan.table == "dead":
                yield from self._dead(line, scan, part)
            elif scan.table == "done":
                yield from self._done(line, scan, part)
            elif part.members is not None:
                yield from self._looked_up(line, scan, part.members)
            else:
                yield from self._messages(line, scan, part)

    # --- messages -----------------------------------------------------------------------------------------

    def _lanes(self, line: PipelinedConnection) -> dict[int, Lane]:
        flat = line.ask("HGETALL", self._keys.key("lanes"))
        names = (name.decode("utf-8", "backslashreplace") for name in flat[::2])
        return dict(zip(map(int, flat[1::2]), names, strict=True))

    def _sets(
        self, line: PipelinedConnection, lanes: dict[int, Lane], lane: Lane | None
    ) -> tuple[list[bytes], list[bytes]]:
        """Return the sets in which messages of a lane, or of all, wait, and those in which they wait aside."""
        wanted = [number for number, name in lanes.items() if lane in (None, name)]
        parked = line.ask("SMEMBERS", self._keys.key("parked"))
        aside = [b"parked:" + name for name in parked if int(name.partition(b":")[0]) in wanted]
        return [b"due:%d" % number for number in wanted], aside

    def _message_parts(self, line: PipelinedConnection, scan: Scan, sequence: int, *, has_parity: bool) -> list[Part]:
        lanes = self._lanes(line)
        wanted = [number for number, name in lanes.items() if scan.lane in (None, name)]
        leased = line.ask_all([("ZRANGE", self._keys.key(f"leased:{number}"), 0, -1) for number in wanted])
        sets = list(chain.from_iterable(self._sets(line, lanes, scan.lane)))
        bounds = self._bounds(line, scan, sets)
        ends = [*bounds[1:], None]
        parts = [Part(first, end, sequence, has_parity) for first, end in zip(bounds, ends, strict=True)]
        return [*parts, *_of_members(chain.from_iterable(leased))]

    def _bounds(self, line: PipelinedConnection, scan: Scan, sets: Sequence[bytes]) -> list[Place]:
        """Return the places at which parts of about the same size begin.

        What is due at some time stands at that place, or at a later one where it was retried.
        """
        first_ms = scan.from_ms or 0
        keys = [self._keys.tag.encode() + each for each in sets]
        skipped: list[int] = line.ask_all([("ZCOUNT", key, "-inf", f"({first_ms}") for key in keys])
        sizes: list[int] = line.ask_all([("ZCOUNT", key, first_ms, "+inf") for key in keys])
        rows = sum(sizes)
        parts = parts_for(scan, rows)
        step = max(rows // (parts * SAMPLES), 1)
        wanted = [
            (key, rank)
            for key, skip, size in zip(keys, skipped, sizes, strict=True)
            for rank in range(skip + step // 2, skip + size, step)
        ]
        found = line.ask_all([("ZRANGE", key, rank, rank, "WITHSCORES") for key, rank in wanted])
        places = sorted((int(ms), int.from_bytes(member[:SEQUENCE_BYTES], "big")) for member, ms in filter(None, found))
        bounds = [places[len(places) * i // parts] for i in range(1, parts) if places]
        return [(first_ms, 0), *dict.fromkeys(bounds)]

    def _known(self, line: PipelinedConnection, lanes: dict[int, Lane]) -> Known:
        held: list[bytes] = line.ask("SMEMBERS", self._keys.key("holds"))
        full = line.ask_all([("ZRANGE", self._keys.key(f"blocked:{number}"), 0, -1) for number in lanes])
        held += [b"%d:%b" % (number, address) for number, each in zip(lanes, full, strict=True) for address in each]
        return Known(Lanes({name: number for number, name in lanes.items()}), held)

    def _messages(self, line: PipelinedConnection, scan: Scan, part: Part) -> Iterator[Columns]:
        lanes = self._lanes(line)
        known, now_ms = self._known(line, lanes), _now_ms(line)
        due, aside = self._sets(line, lanes, scan.lane)
        needed = _needed(scan)
        places_suffice = part.has_parity and PLACED_COLUMNS.issuperset(needed)
        aside_names = set[bytes]()  # what is released meanwhile goes from aside to the others as it is
        for which in [*aside, *due]:
            for page in self._pages(line, part, which):
                if which in aside:
                    aside_names.update(page.names)
                elif aside_names:
                    page = page.without(aside_names)  # noqa: PLW2901 - the same page
                left = page
                if places_suffice:
                    placed, left = page.split()
                    if placed.names:
                        yield _taken(columns_of_places(placed.names, placed.places_ms(), needed), scan)
                for members, values in self._values(line, left.names):
                    yield _taken(columns_of(members, values, needed, known, now_ms), scan)

    def _pages(self, line: PipelinedConnection, part: Part, which: bytes) -> Iterator[_Page]:
        """Yield what stands in a set within a part, page by page, each from where the one before ended."""
        key = self._keys.tag.encode() + which
        first = part.first
        end_ms: Arg = "+inf" if part.end is None else part.end[0]
        while True:
            flat = line.ask("ZRANGEBYSCORE", key, first[0], end_ms, "WITHSCORES", "LIMIT", 0, NAMES_AT_ONCE)
            if len(flat) == 2 * NAMES_AT_ONCE and int(flat[-1]) == first[0]:  # more than that stand at one place
                flat = line.run("scan", which, *first, NAMES_AT_ONCE)
            page = _Page(flat[::2], flat[1::2])
            size = len(page.names)
            last = page.place(size - 1) if size else first
            yield page.within(first, part.end, part.last_sequence)
            if size < NAMES_AT_ONCE or (part.end is not None and last >= part.end):
                return
            first = (last[0], last[1] + 1)

    def _values(self, line: PipelinedConnection, names: Sequence[bytes]) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Yield ids and their values; the next are on their way while some are looked at."""
        members = [each[SEQUENCE_BYTES:] for each in names]
        asked = members[: self._at_once]
        if asked:
            line.send(packed(["HMGET", self._keys.key("msg"), *asked]))
        at = len(asked)
        while asked:
            found = line.answer()
            asked, of = members[at : at + self._at_once], asked
            if asked:
                line.send(packed(["HMGET", self._keys.key("msg"), *asked]))
            at += len(asked)
            if None in found:  # some have ended
                kept = [(member, value) for member, value in zip(of, found, strict=True) if value]
                of, found = [member for member, _ in kept], [value for _, value in kept]
            if found:
                self._largest = max(self._largest, *map(len, found))
                self._at_once = max(min(4 * self._at_once, VALUES_AT_ONCE, VALUE_BYTES // self._largest), 1)
                yield of, found

    def _looked_up(self, line: PipelinedConnection, scan: Scan, members: Sequence[bytes]) -> Iterator[Columns]:
        at = 0
        while at < len(members):
            asked = members[at : at + IDS_AT_ONCE]
            now, held, *pairs = line.run("look", *asked)
            known = Known(lanes_in(line.ask("HGETALL", self._keys.key("lanes"))), held)
            found = [
                snapshot_of(member, value, known, int(now), is_leased=bool(token))
                for member, value, token in zip(asked, pairs[::2], pairs[1::2], strict=False)
                if value
            ]
            taken = [each for each in found if scan.takes(each.record.envelope.lane, each.record.due_ms)]
            yield columns_of_messages(taken, scan.columns)
            at += len(pairs) // 2

    # --- dead letters -------------------------------------------------------------------------------------

    def _dead_parts(self, line: PipelinedConnection, scan: Scan) -> list[Part]:
        graves = self._keys.key("graves")
        rows = line.ask("ZCARD", graves)
        parts = parts_for(scan, rows)
        found = line.ask_all(
            [("ZRANGE", graves, rows * i // parts, rows * i // parts, "WITHSCORES") for i in range(1, parts)]
        )
        bounds = [(0, 0), *dict.fromkeys((int(at_ms), 0) for _, at_ms in filter(None, found))]
        return [Part(first, end) for first, end in zip(bounds, [*bounds[1:], None], strict=True)]

    def _dead(self, line: PipelinedConnection, scan: Scan, part: Part) -> Iterator[Columns]:
        keys = self._dead_keys(line, scan, part)
        if scan.lane is None and KEY_COLUMNS.issuperset(_needed(scan)):
            for at in range(0, len(keys), BATCH_ROWS):
                yield _columns_of_keys(keys[at : at + BATCH_ROWS], scan.columns)
        else:
            yield from self._letters(line, scan, keys)

    def _dead_keys(self, line: PipelinedConnection, scan: Scan, part: Part) -> list[tuple[bytes, int]]:
        """Return the keys of a part's dead letters, each with the time at which it was given up."""
        end = "+inf" if part.end is None else f"({part.end[0]}"
        flat = line.ask("ZRANGEBYSCORE", self._keys.key("graves"), part.first[0], end, "WITHSCORES")
        ids = None if scan.ids is None else frozenset(_members(scan.ids))
        return [
            (key, int(at_ms))
            for key, at_ms in zip(flat[::2], flat[1::2], strict=True)
            if ids is None or key[:-REVISION_BYTES] in ids
        ]

    def _letters(self, line: PipelinedConnection, scan: Scan, keys: Sequence[tuple[bytes, int]]) -> Iterator[Columns]:
        for at in range(0, len(keys), LETTERS_AT_ONCE):
            chunk = keys[at : at + LETTERS_AT_ONCE]
            values = line.ask("HMGET", self._keys.key("dead"), *(key for key, _ in chunk))
            lanes = lanes_in(line.ask("HGETALL", self._keys.key("lanes")))
            letters = [
                read_letter(key, value, at_ms, lanes)
                for (key, at_ms), value in zip(chunk, values, strict=True)
                if value is not None
            ]
            taken = [each for each in letters if scan.takes(each.record.envelope.lane, each.record.due_ms)]
            yield columns_of_letters(taken, scan.columns)

    # --- what has ended -----------------------------------------------------------------------------------

    def _windows(self, line: PipelinedConnection) -> list[str]:
        names = line.ask("ZRANGE", self._keys.key("done"), 0, -1)
        return [self._keys.key(f"ended:{name[1:].decode()}") for name in names if name[:1] == b"v"]

    def _done_parts(self, line: PipelinedConnection, scan: Scan) -> list[Part]:
        if scan.ids is not None:
            return [Part(members=tuple(_members(scan.ids)))]
        return [Part(window=name) for name in self._windows(line)]

    def _done(self, line: PipelinedConnection, scan: Scan, part: Part) -> Iterator[Columns]:
        """Read what is remembered in a window, but for what another one knows a later version of."""
        now_ms = _now_ms(line)
        windows = self._windows(line)
        own = windows.index(part.window) if part.window in windows else -1
        if part.members is None and own < 0:  # it is past, and was forgotten
            return
        for members in self._members_of(line, part):
            rows = line.ask_all([("HMGET", window, *members) for window in windows]) if members else []
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

    def _members_of(self, line: PipelinedConnection, part: Part) -> Iterator[Sequence[bytes]]:
        """Yield ids that are remembered in a window, each once; or those that are asked for."""
        if part.members is not None:
            for at in range(0, len(part.members), ENDED_AT_ONCE):
                yield part.members[at : at + ENDED_AT_ONCE]
            return
        seen = set[int]()  # hashes: a hash that grows meanwhile may name some twice
        cursor: Arg = 0
        while True:
            cursor, flat = line.ask("HSCAN", part.window, cursor, "COUNT", ENDED_AT_ONCE)
            new = [each for each in dict.fromkeys(flat[::2]) if hash(each) not in seen]
            seen.update(map(hash, new))
            yield new
            if cursor == b"0":
                return


def _now_ms(line: PipelinedConnection) -> int:
    seconds, micros = line.ask("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


def _columns_of_keys(keys: Sequence[tuple[bytes, int]], wanted: Iterable[str]) -> Columns:
    """Return dead letters as columns, given their keys and the times at which they were given up."""
    found: dict[str, Sequence[str | int]] = {
        "id": [text_of(key[:-REVISION_BYTES]) for key, _ in keys],
        "revision": [int.from_bytes(key[-REVISION_BYTES:], "big") for key, _ in keys],
        "at_ms": [at_ms for _, at_ms in keys],
    }
    return {name: found[name] for name in wanted}


def _needed(scan: Scan) -> Sequence[str]:
    """Return the columns that are to be decoded: those that are wanted, and those by which rows are chosen."""
    due = ("due_ms",) if (scan.from_ms, scan.to_ms) != (None, None) else ()
    return tuple(dict.fromkeys((*scan.columns, *due)))


def _taken(columns: Columns, scan: Scan) -> Columns:
    """Return the rows that are due within the bounds of a scan, and the columns that are wanted."""
    if (scan.from_ms, scan.to_ms) == (None, None):
        return columns
    from_ms, to_ms = scan.from_ms or 0, MOST_MS if scan.to_ms is None else scan.to_ms
    chosen = [from_ms <= due_ms < to_ms for due_ms in columns["due_ms"]]
    if all(chosen):
        return {name: columns[name] for name in scan.columns}
    return {name: list(compress(columns[name], chosen)) for name in scan.columns}


def _members(ids: Iterable[str]) -> Iterator[bytes]:
    """Yield ids as they stand; under one that is no Unicode nothing can stand."""
    for each in ids:
        try:
            yield member_of(each)
        except UnicodeEncodeError:
            continue


def _of_members(members: Iterable[bytes]) -> Iterator[Part]:
    """Yield parts that name these, each once."""
    found = list(dict.fromkeys(members))
    for at in range(0, len(found), IDS_A_PART):
        yield Part(members=tuple(found[at : at + IDS_A_PART]))

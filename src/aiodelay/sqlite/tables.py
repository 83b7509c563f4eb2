"""The tables of one namespace inside one transaction: where a message stands, and the steps from there to elsewhere.

What should happen is decided in `transitions` and by the callers here beside; this module carries it out. It is used
by the writer's thread alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from aiodelay import transitions as t
from aiodelay.codecs import encode_record
from aiodelay.errors import RecordFormatError
from aiodelay.model import (
    RETRY_WINDOW_MS,
    TOMBSTONE_WINDOW_MS,
    DeadReason,
    LateAction,
    Outcome,
    Record,
    Refused,
    Renewal,
    Settlement,
    Stored,
)

from .namespace import Namespace
from .rows import (
    INSERT,
    MOVE,
    ROW,
    Row,
    careful_record_of,
    insert_values,
    move_values,
    object_text,
    record_of,
    salvaged,
)

__all__ = ["Entry", "Place", "Tables"]

Place: TypeAlias = tuple[int, str, int, int]
"""Where a parked message stands: lane, address, place, number."""

LARGE_BYTES = 1_000
"""An ended message that must be remembered gives up a payload larger than this at once."""
MAX_LANE_NUMBER = 65_535
MAX_MS = (1 << 48) - 1
FIND = f"""
    SELECT {ROW}, l.token, (SELECT 1 FROM ended AS e WHERE e.ns = m.ns AND e.n = m.n)
    FROM messages AS m LEFT JOIN leases AS l ON l.n = m.n
"""
PARKED_AT_ONCE = 1_000
OLDER_IN_FLIGHT = "older in flight"
"""The detail of an answer `replaced` with `is_older_in_flight`."""
_HUNDRED = "?" * 100
REMEMBERED = f"SELECT op FROM ops WHERE ns = ? AND until_ms > ? AND op IN ({', '.join(_HUNDRED)})"


class Entry(Struct, gc=False):
    """A row of `messages`: its record, its number and place, and the token of its claim (0 = none).

    `is_over`: it has ended and is only remembered.
    """

    n: int
    place_ms: int
    lane: int
    record: Record
    token: int = 0
    is_over: bool = False


class Tables(Namespace):
    """See the module."""

    has_new: bool

    # --- finding ------------------------------------------------------------------------------------------

    def find(self, message_id: str) -> Entry | None:
        """Return the message of this id, also one that is over and remembered."""
        found = self._found(f"{FIND} WHERE m.ns = ? AND m.id = ?", (self.ns, message_id))
        return found[0] if found else None

    def entries(self, numbers: Iterable[int]) -> list[Entry]:
        """Return messages by number, in the order of numbers."""
        wanted = object_text(list(numbers))
        if wanted == "[]":
            return []
        return self._found(f"{FIND} WHERE m.n IN (SELECT value FROM json_each(?)) ORDER BY m.n", (wanted,))

    def _found(self, query: str, parameters: Sequence[Any]) -> list[Entry]:
        return [self._entry(row) for row in self.execute(query, parameters).fetchall()]

    def _entry(self, row: Row) -> Entry:
        *columns, token, over = row
        lane, read = self.lane_name(row[2]), careful_record_of if self.careful else record_of
        try:
            record = read(tuple(columns), lane)
        except RecordFormatError:
            record = salvaged(columns, lane)
        return Entry(row[0], row[1], row[2], record, token or 0, over is not None)

    # --- placing ------------------------------------------------------------------------------------------

    def unplace(self, entry: Entry) -> None:
        """Take a message out of wherever it stands; its row stays."""
        if entry.token:
            self.execute("DELETE FROM leases WHERE n = ?", (entry.n,))
            self.end_trial(entry)
            return
        place = (entry.lane, entry.place_ms, entry.n)
        if not self.execute("DELETE FROM queue WHERE lane = ? AND place_ms = ? AND n = ?", place).rowcount:
            address = entry.record.envelope.address
            query = "DELETE FROM parked WHERE lane = ? AND address = ? AND place_ms = ? AND n = ?"
            self.execute(query, (entry.lane, address, entry.place_ms, entry.n))

    def move(self, entry: Entry, record: Record, place_ms: int, *, n: int | None = None) -> None:
        """Put a message that was taken out back into its lane, last among those of its place unless `n` is its own."""
        n = self.next_n() if n is None else n
        self.has_new = True
        self.execute(MOVE, (*move_values(n, place_ms, record), entry.n))
        self.execute("INSERT INTO queue (lane, place_ms, n) VALUES (?, ?, ?)", (entry.lane, place_ms, n))

    def insert(self, record: Record, place_ms: int, n: int | None = None) -> None:
        """Store a record under an id that nobody has (`displace`)."""
        lane = self.lane_number(record.envelope.lane)
        n = self.next_n() if n is None else n
        self.has_new = True
        self.execute(INSERT, (self.ns, *insert_values(n, place_ms, lane, record)))
        self.execute("INSERT INTO queue (lane, place_ms, n) VALUES (?, ?, ?)", (lane, place_ms, n))

    def park(self, places: Sequence[Place]) -> None:
        """Move messages whose address is held out of their lane's way."""
        if places:
            self.executemany(
                "DELETE FROM queue WHERE lane = ? AND place_ms = ? AND n = ?",
                [(lane, place_ms, n) for lane, _, place_ms, n in places],
            )
            self.executemany("INSERT INTO parked (lane, address, place_ms, n) VALUES (?, ?, ?, ?)", places)

    def holds(self) -> dict[int, set[str | None]]:
        """Return what is held, by lane; None = the whole lane."""
        found: dict[int, set[str | None]] = {}
        for lane, address in self.execute("SELECT lane, address FROM holds"):
            found.setdefault(lane, set()).add(address)
        return found

    def head_ms(self, lane: int, held: Collection[str]) -> int | None:
        """Return the place of a lane's first message that is not held at its address; such are parked on the way."""
        if not held:
            query = "SELECT place_ms FROM queue WHERE lane = ? ORDER BY place_ms LIMIT 1"
            first = self.execute(query, (lane,)).fetchone()
            return None if first is None else int(first[0])
        query = """
            SELECT q.lane, m.address, q.place_ms, q.n FROM queue AS q CROSS JOIN messages AS m ON m.n = q.n
            WHERE q.lane = ? ORDER BY q.place_ms, q.n LIMIT ?
        """
        places: list[Place] = self.execute(query, (lane, PARKED_AT_ONCE)).fetchall()
        passed = list(takewhile(lambda place: place[1] in held, places))
        self.park(passed)
        if len(passed) < len(places):
            return places[len(passed)][2]
        return passed[-1][2] if len(passed) == PARKED_AT_ONCE else None  # look again then: the next look goes on

    # --- claims on what was replaced ----------------------------------------------------------------------

    def supersede(self, entry: Entry) -> None:
        """Remember the claim on a message that is being replaced until it is settled, or its lease is over."""
        if entry.token:
            self.execute(
                "INSERT OR REPLACE INTO superseded (ns, id, revision, token) VALUES (?, ?, ?, ?)",
                (self.ns, entry.record.id, entry.record.revision, entry.token),
            )

    def has_superseded(self, message_id: str) -> bool:
        """Say whether a version of this id that was replaced is still in flight; a series' retry is one too."""
        query = """
            SELECT id, token FROM superseded WHERE ns = ?1 AND id = ?2 UNION ALL
            SELECT id, token FROM superseded WHERE ns = ?1 AND id > ?3 AND id < ?4
        """
        claims = self.execute(query, (self.ns, message_id, *_around_occurrences(message_id))).fetchall()
        tokens = [token for each, token in claims if message_id in (each, t.base_id(each))]
        return any(not t.is_lease_over(token, self.now) for token in tokens)

    def renew_superseded(self, renewal: Renewal) -> bool:
        """Prolong a claim on what was replaced; say whether it is held."""
        query = "UPDATE superseded SET token = ? WHERE ns = ? AND id = ? AND revision = ? AND token IN (?, ?)"
        of_claim = (self.ns, renewal.id, renewal.revision, renewal.token, renewal.to)
        return self.execute(query, (renewal.to, *of_claim)).rowcount > 0

    def end_superseded(self, settlement: Settlement) -> bool:
        """Forget a claim on what was replaced; say whether it was held."""
        query = "DELETE FROM superseded WHERE ns = ? AND id = ? AND revision = ? AND token = ?"
        of_claim = (self.ns, settlement.id, settlement.revision, settlement.token)
        return self.execute(query, of_claim).rowcount > 0

    def forget_superseded(self, limit: int) -> None:
        """Forget claims on what was replaced that nobody has settled in time."""
        least, too_long = t.tokens_held(self.now)
        query = "SELECT id, revision FROM superseded WHERE ns = ? AND token < ? LIMIT ?"
        over = self.execute(query, (self.ns, least, limit)).fetchall()
        query = "SELECT id, revision FROM superseded WHERE ns = ? AND token >= ? LIMIT ?"
        ahead = self.execute(query, (self.ns, too_long, limit)).fetchall()
        if ahead and self.is_righting_over():
            over += ahead
        query = "DELETE FROM superseded WHERE ns = ? AND id = ? AND revision = ?"
        self.executemany(query, [(self.ns, *each) for each in over])

    # --- suspects -----------------------------------------------------------------------------------------

    def begin_trial(self, entries: Sequence[Entry], worker: str, lease_ms: int) -> None:
        """Remember who has claimed suspects, to try them."""
        self.executemany(
            "INSERT OR REPLACE INTO trials (n, ns, worker, lease_ms, beat_ms) VALUES (?, ?, ?, ?, ?)",
            [(entry.n, self.ns, worker, lease_ms, self.now) for entry in entries],
        )
        first, search = entries[0].record, self.search()
        if not first.kills:
            self._set_search(search.begun(len(entries)))
        if len(entries) == 1:
            kills = search.kills_of(first)
            self.execute("UPDATE messages SET alone = 1, kills = ? WHERE n = ?", (kills, entries[0].n))
            entries[0].record = replace(first, alone=True, kills=kills)

    def is_trying(self) -> bool:
        """Say whether suspects are being tried; a lone one in doubt, whose lease is over, keeps no others waiting."""
        query = """
            SELECT 1 FROM trials AS t JOIN leases AS l ON l.n = t.n JOIN messages AS m ON m.n = t.n
            WHERE t.ns = ? AND (m.alone = 0 OR l.token >= ?) LIMIT 1
        """
        return self.execute(query, (self.ns, t.tokens_held(self.now)[0])).fetchone() is not None

    def is_tried(self, entry: Entry) -> bool:
        """Say whether a claim is a trial that is not over."""
        query = "SELECT 1 FROM trials WHERE n = ?"
        return t.is_suspect(entry.record) and self.execute(query, (entry.n,)).fetchone() is not None

    def note_death(self) -> None:
        """Note that a group of suspects, one of whose leases has ended, holds a killer."""
        query = """
            SELECT count(*) FROM trials AS t JOIN leases AS l ON l.n = t.n JOIN messages AS m ON m.n = t.n
            WHERE t.ns = ? AND m.alone = 0
        """
        (left,) = self.execute(query, (self.ns,)).fetchone()
        self._set_search(self.search().died(left))

    def note_lapse(self, entry: Entry, record: Record) -> None:
        """Note what a lapse, after which this is the record, says of kills."""
        found = self.execute("SELECT beat_ms FROM trials WHERE n = ?", (entry.n,)).fetchone()
        beat_ms = self.now if found is None else found[0]
        search = self.search()
        after = search.lapsed(entry.record, record, beat_ms=beat_ms, now_ms=self.now)
        if after != search:
            self._set_search(after)

    def search(self) -> t.Trials:
        """Return how the search for killers stands."""
        query = """
            SELECT coalesce(s.tried, 0), coalesce(s.hot, 0), coalesce(d.suspected_ms, 0), coalesce(d.killed_ms, 0)
            FROM namespaces AS n LEFT JOIN searches AS s ON s.ns = n.n LEFT JOIN doubts AS d ON d.ns = n.n
            WHERE n.n = ?
        """
        return t.Trials(*self.execute(query, (self.ns,)).fetchone())

    def _set_search(self, search: t.Trials) -> None:
        query = "INSERT OR REPLACE INTO searches (ns, tried, hot) VALUES (?, ?, ?)"
        self.execute(query, (self.ns, search.tried, search.hot))
        query = "INSERT OR REPLACE INTO doubts (ns, suspected_ms, killed_ms) VALUES (?, ?, ?)"
        self.execute(query, (self.ns, search.suspected_ms, search.killed_ms))

    def end_trial(self, entry: Entry) -> None:
        """Forget who has claimed a suspect."""
        if t.is_suspect(entry.record):
            self.execute("DELETE FROM trials WHERE n = ?", (entry.n,))

    def in_doubt(self) -> set[int]:
        """Return lone suspects whose processes may hold them still: they are known, and were heard of not long ago."""
        query = """
            SELECT t.n, t.beat_ms, t.lease_ms FROM trials AS t JOIN workers AS w ON w.ns = t.ns AND w.worker = t.worker
            JOIN messages AS m ON m.n = t.n
            WHERE t.ns = ? AND m.alone = 1
        """
        trials = self.execute(query, (self.ns,))
        return {n for n, beat_ms, lease_ms in trials if not t.is_silent(beat_ms, lease_ms, self.now)}

    def has_died(self, entry: Entry) -> bool:
        """Say whether the process that had claimed a suspect has ended."""
        query = """
            SELECT w.seen_ms, t.lease_ms FROM trials AS t JOIN workers AS w ON w.ns = t.ns AND w.worker = t.worker
            WHERE t.n = ?
        """
        found = self.execute(query, (entry.n,)).fetchone()
        return found is None or t.has_died(seen_ms=found[0], lease_ms=found[1], now_ms=self.now)

    def beat(self, worker: str, ids: Collection[str]) -> None:
        """Note that a process lives and holds these claims."""
        self.execute("UPDATE workers SET seen_ms = ? WHERE ns = ? AND worker = ?", (self.now, self.ns, worker))
        query = """
            UPDATE trials SET beat_ms = ?
            WHERE worker = ? AND n IN (
                SELECT m.n FROM messages AS m JOIN json_each(?) AS j ON j.value = m.id WHERE m.ns = ?
            )
        """
        self.execute(query, (self.now, worker, object_text(list(ids)), self.ns))

    # --- leases that are too long -------------------------------------------------------------------------

    def is_righting_over(self) -> bool:
        """Say whether holders of leases that are too long, of which there are some, have had time to set them right."""
        found = self.execute("SELECT ahead_since_ms FROM clock_steps WHERE ns = ?", (self.ns,)).fetchone()
        before = found[0] if found else 0
        since = t.ahead_since(before, self.now)
        if since != before:
            self.execute("INSERT OR REPLACE INTO clock_steps (ns, ahead_since_ms) VALUES (?, ?)", (self.ns, since))
        return since + t.RIGHTING_MS <= self.now

    # --- ending -------------------------------------------------------------------------------------------

    def forget(self, entry: Entry) -> None:
        """End a message that was taken out; its row stays for a while, remembering its op, answer and revision."""
        if self._leave_series(entry.record):
            self.execute("DELETE FROM messages WHERE n = ?", (entry.n,))
            return
        self._leave_tombstone(entry.record)
        until = self.now + RETRY_WINDOW_MS
        self.execute("INSERT INTO ended (ns, n, until_ms) VALUES (?, ?, ?)", (self.ns, entry.n, until))
        if len(entry.record.envelope.payload) > LARGE_BYTES:
            self.execute("UPDATE messages SET payload = x'' WHERE n = ?", (entry.n,))

    def displace(self, entry: Entry | None) -> None:
        """Make an id free for a new life, remembering of the old one what its row remembered."""
        if entry is None:
            return
        if entry.is_over:
            self.execute("DELETE FROM ended WHERE ns = ? AND n = ?", (self.ns, entry.n))
        else:
            self.unplace(entry)
            if not self._leave_series(entry.record):
                self._leave_tombstone(entry.record)
        self.remember_put(entry.record)
        self.execute("DELETE FROM messages WHERE n = ?", (entry.n,))

    def _leave_tombstone(self, record: Record) -> None:
        """Remember the version of a message that ended with one, or a higher one that did before."""
        if record.envelope.version is None:
            return
        version = max(record.envelope.version, self.ended_version(record.id) or 0)
        self.execute(
            "INSERT OR REPLACE INTO tombstones (ns, id, version, until_ms) VALUES (?, ?, ?, ?)",
            (self.ns, record.id, version, self.now + TOMBSTONE_WINDOW_MS),
        )

    def ended_version(self, message_id: str) -> int | None:
        """Return the version with which this id last ended, if that is remembered."""
        query = "SELECT version FROM tombstones WHERE ns = ? AND id = ? AND until_ms > ?"
        found = self.execute(query, (self.ns, message_id, self.now)).fetchone()
        return None if found is None else int(found[0])

    # --- series -------------------------------------------------------------------------------------------

    def series_of(self, message_id: str) -> tuple[Entry | None, int]:
        """Return an occurrence's series, None if there is none any more, and the occurrence's due time."""
        occurrence = t.occurrence_of(message_id)
        if occurrence is None:
            return None, 0
        series = self.find(occurrence[0])
        recurs = series is not None and not series.is_over and series.record.envelope.rule is not None
        return (series if recurs else None), occurrence[1]

    def set_live(self, series: Entry, live: Sequence[int]) -> None:
        """Write which occurrences go on beside a series."""
        self.execute("UPDATE messages SET live = ? WHERE n = ?", (object_text(live) if live else None, series.n))
        self.series_changed.add(series.n)

    def _leave_series(self, record: Record) -> bool:
        """Strike an occurrence that has ended from its series' list; return False for a message of its own."""
        series, due_ms = self.series_of(record.id)
        if series is not None and due_ms in series.record.live:
            self.set_live(series, [due for due in series.record.live if due != due_ms])
        return t.occurrence_of(record.id) is not None

    # --- answers ------------------------------------------------------------------------------------------

    def remember_put(self, record: Record) -> None:
        """Remember what the put that made this record was answered, before the record stops telling it."""
        until = record.revision + RETRY_WINDOW_MS
        if until > self.now and record.op != t.NO_OP and self.remembered(record.op) is None:
            self.remember(record.op, t.first_answer(record), until)

    def remember(self, op: bytes, outcome: Outcome, until_ms: int | None = None) -> None:
        """Keep the answer to a command for as long as it may be repeated."""
        if isinstance(outcome, Stored):
            detail = OLDER_IN_FLIGHT if outcome.is_older_in_flight else ""
            answer: Row = (outcome.answer, detail, outcome.revision, outcome.due_ms)
        elif isinstance(outcome, Refused):
            answer = (outcome.reason, outcome.detail, outcome.revision or None, outcome.due_ms or None)
        else:
            return
        until_ms = self.now + RETRY_WINDOW_MS if until_ms is None else until_ms
        self.count_answer()
        self.execute(
            "INSERT INTO ops (ns, op, answer, detail, revision, due_ms, until_ms) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (self.ns, op, *answer, until_ms),
        )

    def remembered(self, op: bytes) -> Outcome | None:
        """Return the answer that a command had before."""
        query = """
            SELECT answer, detail, revision, due_ms FROM ops
            WHERE ns = ? AND op = ? AND until_ms > ? ORDER BY n DESC LIMIT 1
        """
        found = self.execute(query, (self.ns, op, self.now)).fetchone()
        if found is None:
            return None
        answer, detail, revision, due_ms = found
        if revision is None or answer == "outdated":
            return Refused(answer, detail, revision or 0, due_ms or 0)
        return Stored(answer, revision, due_ms, detail == OLDER_IN_FLIGHT)

    def remembered_among(self, ops: Sequence[bytes]) -> set[bytes]:
        """Return those ops whose answer is remembered."""
        if not self.execute("SELECT 1 FROM ops WHERE ns = ? LIMIT 1", (self.ns,)).fetchone():
            return set()
        found: set[bytes] = set()
        for at in range(0, len(ops), len(_HUNDRED)):
            chunk = ops[at : at + len(_HUNDRED)]
            full = [*chunk, *[chunk[0]] * (len(_HUNDRED) - len(chunk))]
            found |= {op for (op,) in self.execute(REMEMBERED, (self.ns, self.now, *full))}
        return found

    # --- the dead and the late ----------------------------------------------------------------------------

    def bury(self, record: Record, reason: DeadReason) -> None:
        """Keep a dead letter."""
        if record.envelope.rule is not None:
            record = t.as_occurrence(record)
        lane = self.lane_number(record.envelope.lane)
        self.execute(
            "INSERT OR REPLACE INTO dead (ns, id, revision, lane, reason, at_ms, record) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                self.ns,
                record.id,
                record.revision,
                lane,
                reason,
                self.now,
                encode_record(_encodable(record), lane if lane <= MAX_LANE_NUMBER else 0),
            ),
        )
        self.note("dead", record, reason)

    def expire(self, entry: Entry) -> None:
        """End a message that is late, as its policy says."""
        self.unplace(entry)
        if entry.record.late is LateAction.DEAD_LETTER:
            self.bury(entry.record, "late")
        else:
            self.note("dropped", entry.record, "late")
        self.forget(entry)

    def end_retries(self, series_id: str, *, is_replaced: bool = False) -> bool:
        """End the retries that go on beside a series, also of one that has ended; say whether one is in flight.

        A replacement fences off those in flight; a cancel lets them run for the last time.
        """
        query = f"{FIND} WHERE m.ns = ? AND m.id > ? AND m.id < ?"
        found = self._found(query, (self.ns, *_around_occurrences(series_id)))
        retries = [entry for entry in found if t.base_id(entry.record.id) == series_id and not entry.is_over]
        for entry in retries:
            if entry.token and not is_replaced:
                self.execute("UPDATE messages SET no_retry = 1 WHERE n = ?", (entry.n,))
            else:
                self.supersede(entry)
                self.unplace(entry)
                self.forget(entry)
        return any(entry.token for entry in retries)


def _around_occurrences(series_id: str) -> tuple[str, str]:
    """Return two texts between which the ids of a series' occurrences lie, and few others."""
    return f"{series_id}~", f"{series_id}~:"  # which follows the digits


def _encodable(record: Record) -> Record:
    """Return the record with its times in the range that format 1 can write: u48."""
    times = {"revision": record.revision, "due_ms": record.due_ms, "expires_ms": record.expires_ms}
    wrong = {name: min(max(ms, 0), MAX_MS) for name, ms in times.items() if not 0 <= ms <= MAX_MS}
    return replace(record, **wrong) if wrong else record

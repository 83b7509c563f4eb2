"""Four parts of `Tables`: answers, superseded claims, dead letters, and trials of suspects."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from aiodelay.core import transitions as t
from aiodelay.core.record_codec import decode_record, encode_record
from aiodelay.core.values import RETRY_WINDOW_MS, Command, DeadKey, DeadLetter, Outcome, Record, Refused, Stored

from .entry import Entry
from .namespace import Namespace
from .rows import Row, object_text

__all__ = ["Answers", "Letters", "SupersededClaims", "Trials", "around_occurrences"]

MAX_LANE_NUMBER = 65_535
MAX_MS = (1 << 48) - 1
OLDER_IN_FLIGHT = "older in flight"
"""The column `detail` of an answer `replaced`, if the older message is still in flight."""
_HUNDRED = "?" * 100
REMEMBERED = f"SELECT op FROM ops WHERE ns = ? AND until_ms > ? AND op IN ({', '.join(_HUNDRED)})"


class Answers:
    """The answers to earlier commands.

    The answers are in the tables `ops` and `tombstones`, and in the rows of ended messages.

    Attributes:
        ended: Rows of ended messages by message id. `Tables.find` has read them in this transaction.
    """

    def __init__(self, tables: Namespace) -> None:
        self._tables = tables
        self.ended: dict[str, Entry] = {}

    def answer(self, command: Command, now: int) -> Outcome | None:
        outcome = self._of(command.op, now)
        if outcome is not None:
            return outcome
        ended = self.ended.get(command.id)
        if ended is None or ended.record.op != command.op or now >= ended.record.revision + RETRY_WINDOW_MS:
            return None
        return t.first_answer(ended.record)

    def _of(self, op: bytes, now: int) -> Outcome | None:
        query = """
            SELECT answer, detail, revision, due_ms FROM ops
            WHERE ns = ? AND op = ? AND until_ms > ? ORDER BY n DESC LIMIT 1
        """
        found = self._tables.execute(query, (self._tables.ns, op, now)).fetchone()
        if found is None:
            return None
        answer, detail, revision, due_ms = found
        if revision is None or answer == "outdated":
            return Refused(answer, detail, revision or 0, due_ms or 0)
        return Stored(answer, revision, due_ms, detail == OLDER_IN_FLIGHT)

    def add(self, op: bytes, outcome: Outcome, *, until_ms: int) -> None:
        if isinstance(outcome, Stored):
            detail = OLDER_IN_FLIGHT if outcome.is_older_in_flight else ""
            answer: Row = (outcome.answer, detail, outcome.revision, outcome.due_ms)
        elif isinstance(outcome, Refused):
            answer = (outcome.reason, outcome.detail, outcome.revision or None, outcome.due_ms or None)
        else:
            return
        self._tables.count_answer()
        self._tables.execute(
            "INSERT INTO ops (ns, op, answer, detail, revision, due_ms, until_ms) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (self._tables.ns, op, *answer, until_ms),
        )

    def keep(self, record: Record, now: int) -> None:
        until_ms = record.revision + RETRY_WINDOW_MS
        if until_ms > now and record.op != t.NO_OP and self._of(record.op, now) is None:
            self.add(record.op, t.first_answer(record), until_ms=until_ms)

    def last_revision(self, message_id: str, now: int) -> int | None:
        del now  # The row may still have the revision after that time. This does no harm.
        ended = self.ended.get(message_id)
        return None if ended is None else ended.record.revision

    def ended_version(self, message_id: str, now: int) -> int | None:
        query = "SELECT version FROM tombstones WHERE ns = ? AND id = ? AND until_ms > ?"
        found = self._tables.execute(query, (self._tables.ns, message_id, now)).fetchone()
        return None if found is None else int(found[0])

    def add_version(self, message_id: str, version: int, *, until_ms: int) -> None:
        self._tables.execute(
            "INSERT OR REPLACE INTO tombstones (ns, id, version, until_ms) VALUES (?, ?, ?, ?)",
            (self._tables.ns, message_id, version, until_ms),
        )

    def known_among(self, ops: Sequence[bytes], now: int) -> set[bytes]:
        """Return the ops among `ops` whose answers the store still remembers."""
        tables = self._tables
        if not tables.execute("SELECT 1 FROM ops WHERE ns = ? LIMIT 1", (tables.ns,)).fetchone():
            return set()
        found: set[bytes] = set()
        for at in range(0, len(ops), len(_HUNDRED)):
            chunk = ops[at : at + len(_HUNDRED)]
            full = [*chunk, *[chunk[0]] * (len(_HUNDRED) - len(chunk))]
            found |= {op for (op,) in tables.execute(REMEMBERED, (tables.ns, now, *full))}
        return found


class SupersededClaims:
    """The claims of messages that were replaced while they were in flight. They are in the table `superseded`."""

    def __init__(self, tables: Namespace) -> None:
        self._tables = tables

    def add(self, row: Entry) -> None:
        if row.token:
            self._tables.execute(
                "INSERT OR REPLACE INTO superseded (ns, id, revision, token) VALUES (?, ?, ?, ?)",
                (self._tables.ns, row.record.id, row.record.revision, row.token),
            )

    def tokens(self, message_id: str) -> Sequence[int]:
        query = """
            SELECT id, token FROM superseded WHERE ns = ?1 AND id = ?2 UNION ALL
            SELECT id, token FROM superseded WHERE ns = ?1 AND id > ?3 AND id < ?4
        """
        of_id = (self._tables.ns, message_id, *around_occurrences(message_id))
        claims = self._tables.execute(query, of_id).fetchall()
        return [token for each, token in claims if message_id in (each, t.base_id(each))]

    def renew(self, message_id: str, revision: int, token: int, to: int) -> bool:
        query = "UPDATE superseded SET token = ? WHERE ns = ? AND id = ? AND revision = ? AND token IN (?, ?)"
        of_claim = (self._tables.ns, message_id, revision, token, to)
        return self._tables.execute(query, (to, *of_claim)).rowcount > 0

    def end(self, message_id: str, revision: int, token: int) -> bool:
        query = "DELETE FROM superseded WHERE ns = ? AND id = ? AND revision = ? AND token = ?"
        return self._tables.execute(query, (self._tables.ns, message_id, revision, token)).rowcount > 0

    def forget(self, limit: int) -> None:
        """Delete superseded claims whose leases have ended, up to `limit`.

        A lease that ends too far ahead comes from a step of the clock. Workers have some time to correct such leases.
        After this time (`Namespace.is_righting_over`), also delete up to `limit` superseded claims with such leases.
        """
        tables = self._tables
        least, too_long = t.tokens_held(tables.now)
        query = "SELECT id, revision FROM superseded WHERE ns = ? AND token < ? LIMIT ?"
        over = tables.execute(query, (tables.ns, least, limit)).fetchall()
        query = "SELECT id, revision FROM superseded WHERE ns = ? AND token >= ? LIMIT ?"
        ahead = tables.execute(query, (tables.ns, too_long, limit)).fetchall()
        if ahead and tables.is_righting_over():
            over += ahead
        query = "DELETE FROM superseded WHERE ns = ? AND id = ? AND revision = ?"
        tables.executemany(query, [(tables.ns, *each) for each in over])
        tables.has_new |= bool(over)  # another message of a limited key may begin


class Letters:
    """The dead letters, in the table `dead`."""

    def __init__(self, tables: Namespace) -> None:
        self._tables = tables

    def has(self, key: DeadKey) -> bool:
        query = "SELECT 1 FROM dead WHERE ns = ? AND id = ? AND revision = ?"
        return self._tables.execute(query, (self._tables.ns, *key)).fetchone() is not None

    def get(self, key: DeadKey) -> DeadLetter | None:
        query = "SELECT lane, reason, at_ms, record FROM dead WHERE ns = ? AND id = ? AND revision = ?"
        found = self._tables.execute(query, (self._tables.ns, *key)).fetchone()
        if found is None:
            return None
        lane, reason, at_ms, record = found
        name = self._tables.lane_name(lane)
        return DeadLetter(decode_record(record, message_id=key.id, lane=lambda _: name), reason, at_ms)

    def add(self, letter: DeadLetter) -> None:
        record, tables = letter.record, self._tables
        lane = tables.lane_number(record.envelope.lane)
        encoded = encode_record(_encodable(record), lane if lane <= MAX_LANE_NUMBER else 0)
        tables.execute(
            "INSERT OR REPLACE INTO dead (ns, id, revision, lane, reason, at_ms, record) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (tables.ns, *letter.key, lane, letter.reason, letter.at_ms, encoded),
        )

    def remove(self, key: DeadKey) -> bool:
        query = "DELETE FROM dead WHERE ns = ? AND id = ? AND revision = ?"
        return self._tables.execute(query, (self._tables.ns, *key)).rowcount > 0


class Trials:
    """The trials of suspects. They are in the tables `trials`, `searches` and `doubts`."""

    def __init__(self, tables: Namespace) -> None:
        self._tables = tables

    def begin(self, rows: Sequence[Entry], worker: str, lease_ms: int) -> None:
        """Record that a worker tries these suspects. The worker has claimed them together."""
        tables = self._tables
        tables.executemany(
            "INSERT OR REPLACE INTO trials (n, ns, worker, lease_ms, beat_ms) VALUES (?, ?, ?, ?, ?)",
            [(row.n, tables.ns, worker, lease_ms, tables.now) for row in rows],
        )

    def heard_ms(self, row: Entry) -> int | None:
        if not t.is_suspect(row.record):
            return None
        found = self._tables.execute("SELECT beat_ms FROM trials WHERE n = ?", (row.n,)).fetchone()
        return None if found is None else int(found[0])

    def has_died(self, row: Entry, now: int) -> bool:
        query = """
            SELECT w.seen_ms, t.lease_ms FROM trials AS t JOIN workers AS w ON w.ns = t.ns AND w.worker = t.worker
            WHERE t.n = ?
        """
        found = self._tables.execute(query, (row.n,)).fetchone()
        return found is None or t.has_died(seen_ms=found[0], lease_ms=found[1], now_ms=now)

    def group_size(self) -> int:
        query = """
            SELECT count(*) FROM trials AS t JOIN leases AS l ON l.n = t.n JOIN messages AS m ON m.n = t.n
            WHERE t.ns = ? AND m.alone = 0
        """
        (size,) = self._tables.execute(query, (self._tables.ns,)).fetchone()
        return int(size)

    def is_trying(self) -> bool:
        """Return True if a trial is in progress. The trial of a single suspect counts only until its lease ends."""
        query = """
            SELECT 1 FROM trials AS t JOIN leases AS l ON l.n = t.n JOIN messages AS m ON m.n = t.n
            WHERE t.ns = ? AND (m.alone = 0 OR l.token >= ?) LIMIT 1
        """
        least, _ = t.tokens_held(self._tables.now)
        return self._tables.execute(query, (self._tables.ns, least)).fetchone() is not None

    def in_doubt(self) -> set[int]:
        """Return the numbers of the suspects that are tried alone and whose processes may still hold them.

        Such a process is a registered worker. It has recorded recently, with `beat`, that it holds the suspect.
        """
        query = """
            SELECT t.n, t.beat_ms, t.lease_ms FROM trials AS t JOIN workers AS w ON w.ns = t.ns AND w.worker = t.worker
            JOIN messages AS m ON m.n = t.n
            WHERE t.ns = ? AND m.alone = 1
        """
        trials = self._tables.execute(query, (self._tables.ns,))
        return {n for n, beat_ms, lease_ms in trials if not t.is_silent(beat_ms, lease_ms, self._tables.now)}

    def beat(self, worker: str, ids: Collection[str]) -> None:
        """Record that a worker is alive, and that it holds these suspects."""
        tables = self._tables
        query = "UPDATE workers SET seen_ms = ? WHERE ns = ? AND worker = ?"
        tables.execute(query, (tables.now, tables.ns, worker))
        query = """
            UPDATE trials SET beat_ms = ?
            WHERE worker = ? AND n IN (
                SELECT m.n FROM messages AS m JOIN json_each(?) AS j ON j.value = m.id WHERE m.ns = ?
            )
        """
        tables.execute(query, (tables.now, worker, object_text(list(ids)), tables.ns))

    def search(self) -> t.Trials:
        query = """
            SELECT coalesce(s.tried, 0), coalesce(s.hot, 0), coalesce(d.suspected_ms, 0), coalesce(d.killed_ms, 0)
            FROM namespaces AS n LEFT JOIN searches AS s ON s.ns = n.n LEFT JOIN doubts AS d ON d.ns = n.n
            WHERE n.n = ?
        """
        return t.Trials(*self._tables.execute(query, (self._tables.ns,)).fetchone())

    def set_search(self, search: t.Trials) -> None:
        ns = self._tables.ns
        query = "INSERT OR REPLACE INTO searches (ns, tried, hot) VALUES (?, ?, ?)"
        self._tables.execute(query, (ns, search.tried, search.hot))
        query = "INSERT OR REPLACE INTO doubts (ns, suspected_ms, killed_ms) VALUES (?, ?, ?)"
        self._tables.execute(query, (ns, search.suspected_ms, search.killed_ms))

    def end(self, row: Entry) -> None:
        if t.is_suspect(row.record):
            self._tables.execute("DELETE FROM trials WHERE n = ?", (row.n,))


def around_occurrences(series_id: str) -> tuple[str, str]:
    """Return two texts. In the order of ids, all occurrences of the series and few other ids are between them."""
    return f"{series_id}~", f"{series_id}~:"  # ":" follows the digits in ASCII.


def _encodable(record: Record) -> Record:
    """Return the record with its times limited to the 6 bytes in which format 1 stores a time."""
    times = {"revision": record.revision, "due_ms": record.due_ms, "expires_ms": record.expires_ms}
    wrong = {name: min(max(ms, 0), MAX_MS) for name, ms in times.items() if not 0 <= ms <= MAX_MS}
    return replace(record, **wrong) if wrong else record

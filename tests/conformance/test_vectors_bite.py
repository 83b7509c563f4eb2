"""The vectors of `test_vectors.py` find faults: each rulebook, script and table here breaks one rule.

Beside each stands the shortest case that shows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pytest
from msgspec.structs import replace

from aiodelay.backends.redis import RedisStore
from aiodelay.backends.redis.connection import scripts
from aiodelay.backends.sqlite import SqliteStore, commands, settling
from aiodelay.backends.sqlite.rows import Row
from aiodelay.backends.sqlite.tables import Tables
from aiodelay.core.dict_table.entries import Entry
from aiodelay.core.rules import Rules
from aiodelay.core.transitions import retry_place
from aiodelay.core.values import (
    Again,
    Command,
    Conflict,
    DeadKey,
    Done,
    Outcome,
    Put,
    PutBack,
    Record,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    Stored,
)
from aiodelay.memory import MemoryStore
from aiodelay.testing.clock import VirtualClock
from tests.support.servers import redis_servers, serving
from tests.support.vector_store import MakeStore, play
from tests.support.vectors import case_of, states

Steps = tuple[str, ...]


class Bulk(NamedTuple):
    """Something of SQLite's bulk paths, and a broken one in its place."""

    where: object
    name: str
    broken: object
    steps: Steps


class Lua(NamedTuple):
    """A script, a part of it, and a broken one in its place."""

    script: str
    right: str
    wrong: str
    steps: Steps


@cache
def known_ways() -> frozenset[Steps]:
    return frozenset(states(depth=5, detailed=2))


def differs(make_store: MakeStore, steps: Steps) -> bool:
    """Say whether a store differs in the case of these steps, which the gate plays."""
    assert steps[:-1] in known_ways()
    return bool(asyncio.run(play(make_store, [case_of(steps)])))


# --- rulebooks --------------------------------------------------------------------------------------------


class ForgetsAnswers(Rules[Entry]):
    def apply(self, command: Command, now: int) -> Outcome:
        return self.decide(command, self.table.find(command.id), now)


class ForgetsVersions(Rules[Entry]):
    def _keep_version(self, record: Record, now: int) -> None:
        return None


class KeepsEndedOccurrences(Rules[Entry]):
    def _leave_series(self, message_id: str) -> None:
        return None


class ForgetsReplacedClaims(Rules[Entry]):
    def _has_superseded(self, message_id: str, now: int) -> bool:
        return False


class LetsReplacedRetriesRun(Rules[Entry]):
    def end_retries(self, series_id: str, now: int, *, is_replaced: bool = False) -> bool:
        return super().end_retries(series_id, now)


class FencesCancelledRetries(Rules[Entry]):
    def end_retries(self, series_id: str, now: int, *, is_replaced: bool = False) -> bool:
        return super().end_retries(series_id, now, is_replaced=True)


class RetriesWhatWasCancelled(Rules[Entry]):
    def settle(self, settlement: Settlement, now: int) -> SettleOutcome:
        row = self.table.find(settlement.id)
        if row is not None and isinstance(settlement, Again):
            self.table.update(row, replace(row.record, no_retry=False))
        return super().settle(settlement, now)


class RepeatsRevisions(Rules[Entry]):
    def put(self, put: Put, row: Entry | None, now: int) -> Outcome:
        if row is None:
            self.table.answers.revisions.forget(now + 60_000, 1)  # type: ignore[attr-defined]
        return super().put(put, row, now)


class DropsLateMessages(Rules[Entry]):
    def expire(self, row: Entry, now: int) -> None:
        self.end(row, now)


class TellsNoCancel(Rules[Entry]):
    def renew(self, renewal: Renewal) -> RenewOutcome:
        outcome = super().renew(renewal)
        return RenewOutcome.RENEWED if outcome is RenewOutcome.CANCELLED else outcome


class PutsBackOverNewer(Rules[Entry]):
    def put_back(self, message: PutBack, now: int) -> Stored:
        row = self.table.find(message.record.id)
        if row is not None and not row.token and message.reason is None:
            self.table.remove(row)
        return super().put_back(message, now)


class RedrivesOverPending(Rules[Entry]):
    def redrive(self, key: DeadKey, now: int) -> Outcome:
        row = self.table.find(key.id)
        if row is not None and self.table.letters.has(key):
            self.table.remove(row)
        return super().redrive(key, now)


class PutsBackAfterNewer(Rules[Entry]):
    def put_back(self, message: PutBack, now: int) -> Stored:
        record = message.record
        if message.reason is not None or self.table.find(record.id) is not None:
            return super().put_back(message, now)
        self.table.insert(record, retry_place(record, message.due_ms))
        return Stored("stored", record.revision, record.due_ms)


class EndsSeries(Rules[Entry]):
    def settle(self, settlement: Settlement, now: int) -> SettleOutcome:
        if isinstance(settlement, Done) and settlement.then_due_ms is not None:
            settlement = replace(settlement, then_due_ms=None)
        return super().settle(settlement, now)


RULEBOOKS: dict[type[Rules[Entry]], Steps] = {
    ForgetsAnswers: ("put", "cancel", "repeat the last command"),
    ForgetsVersions: ("put newer, high", "cancel", "put newer, low"),
    KeepsEndedOccurrences: ("put series", "claim", "again, then", "cancel the occurrence"),
    ForgetsReplacedClaims: ("put", "claim", "put", "cancel"),
    LetsReplacedRetriesRun: ("put series", "claim", "again, then", "claim", "put"),
    FencesCancelledRetries: ("put series", "claim", "again, then", "claim", "cancel"),
    RetriesWhatWasCancelled: ("put", "claim", "cancel", "again"),
    RepeatsRevisions: ("put", "cancel", "put"),
    DropsLateMessages: ("put, late is dead", "leases end"),
    TellsNoCancel: ("put", "claim", "cancel", "renew"),
    PutsBackOverNewer: ("put", "put back"),
    PutsBackAfterNewer: ("put", "cancel", "put back"),
    RedrivesOverPending: ("put", "put back dead", "redrive"),
    EndsSeries: ("put series", "claim", "done, then"),
}


def on_memory(rules: type[Rules[Entry]]) -> MakeStore:
    store_type = type("Broken", (MemoryStore,), {"_rules_type": rules})
    return lambda clock: store_type(clock=clock)


@pytest.mark.parametrize(("rules", "steps"), RULEBOOKS.items(), ids=[rules.__name__ for rules in RULEBOOKS])
def test_a_broken_rule_is_found(rules: type[Rules[Entry]], steps: Steps) -> None:
    assert not differs(on_memory(Rules), steps)
    assert differs(on_memory(rules), steps)


# --- SQLite's bulk paths ----------------------------------------------------------------------------------


def plain_of_all(held: settling.HeldClaims, settlement: Settlement) -> settling.Held | None:
    """Return the claim, also if its message has a version, or is a series' retry."""
    found = held._held.get(settlement.id)
    is_plain = found is not None and found.token == settlement.token and found.record.envelope.rule is None
    return found if is_plain and isinstance(settlement, Done) else None


def plain_of_any_token(held: settling.HeldClaims, settlement: Settlement) -> settling.Held | None:
    """Return the claim, whatever the token."""
    found = held._held.get(settlement.id)
    return HELD_PLAIN(held, settlement if found is None else replace(settlement, token=found.token))


HELD_PLAIN = settling.HeldClaims.plain
NEW_ROWS = commands._new_rows


def new_rows_of_all(tables: Tables, puts: Sequence[Put], first: int) -> list[Row]:
    """Return the rows of puts of all conflict modes."""
    return NEW_ROWS(tables, [replace(put, conflict=Conflict.replace()) for put in puts], first)


SQLITE: dict[str, Bulk] = {
    "puts in bulk forget versions": Bulk(
        commands,
        "_ended_with_version",
        lambda *_: set(),
        ("put newer, high", "cancel", "leases end", "leases end", "put newer, low"),
    ),
    "puts in bulk forget if_revision": Bulk(commands, "_new_rows", new_rows_of_all, ("put if the revision",)),
    "ends in bulk forget versions": Bulk(
        settling.HeldClaims, "plain", plain_of_all, ("put newer, low", "claim", "done", "put newer, low")
    ),
    "ends in bulk ignore tokens": Bulk(
        settling.HeldClaims, "plain", plain_of_any_token, ("put", "claim", "done with another token")
    ),
    "ends in bulk end nothing": Bulk(settling, "_end", lambda *_: None, ("put", "claim", "done", "put")),
}


@pytest.mark.parametrize("bulk", SQLITE.values(), ids=SQLITE.keys())
def test_a_broken_bulk_path_of_sqlite_is_found(bulk: Bulk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def make(clock: VirtualClock) -> SqliteStore:
        return SqliteStore(tmp_path / "delay.db", namespace=uuid4().hex, clock=clock)

    assert not differs(make, bulk.steps)
    monkeypatch.setattr(bulk.where, bulk.name, bulk.broken)
    assert differs(make, bulk.steps)


# --- Redis's scripts --------------------------------------------------------------------------------------

LUA: dict[str, Lua] = {
    "a cancel in flight ends no retries": Lua(
        "apply",
        "    set(e, NO_RETRY)\n    store(e)\n",
        "",
        ("put", "claim", "cancel", "again"),
    ),
    "a replacement forgets what is in flight": Lua(
        "apply",
        "superseded.is_any(id) then letter = 'R'",
        "false then",
        ("put", "claim", "put"),
    ),
    "a replacement ends no retries": Lua(
        "apply",
        "    occurrences.end_retries(e, true)\n",
        "",
        ("put series", "claim", "again, then", "put series"),
    ),
    "the conflict error is keep": Lua("apply", "return 'D'", "return 'k'", ("put", "put error")),
    "answers are not remembered": Lua(
        "apply",
        "if is_remembered and byte(answer) ~= 115",
        "if false",
        ("put", "cancel", "repeat the last command"),
    ),
    "fire moves what is overdue": Lua(
        "apply",
        "if e.due > now then attempts.move(e, now) end",
        "attempts.move(e, now)",
        ("put", "claim", "leases end", "fire"),
    ),
    "put back writes over": Lua("back", "if there then return answer('k', there) end", "", ("put", "put back")),
    "put back after a newer revision": Lua(
        "back", "revision and revision > e.revision", "false", ("put", "cancel", "put back")
    ),
    "put back after a newer version": Lua(
        "back",
        "version and memory.is_newer(version, e.version)",
        "false",
        ("put newer, high", "cancel", "leases end", "leases end", "put back, low"),
    ),
    "an occurrence that was put back is not listed": Lua(
        "back",
        "if byte(e.id) == OCCURRENCE then occurrences.list_apart(e.id) end",
        "",
        ("put series", "put back the occurrence", "cancel"),
    ),
    "revisions are not remembered": Lua(
        "memory",
        "memory.remember('r' .. e.id, now + memory.WINDOW, u48(e.revision))",
        "do end",
        ("put", "cancel", "put"),
    ),
    "versions are compared as doubles": Lua(
        "memory",
        "a1 > b1 or (a1 == b1 and a2 > b2)",
        "a1 * 2^32 + a2 > b1 * 2^32 + b2",
        ("put newer, low", "put newer, high"),
    ),
    "plain ends are not remembered": Lua(
        "memory",
        "    if ends > now then\n      local key",
        "    if false then\n      local key",
        ("put", "claim", "done", "put"),
    ),
    "series forget their retries": Lua(
        "attempts",
        "if retrying then live[#live + 1] = e.due end",
        "",
        ("put series", "claim", "again, then"),
    ),
    "ended series forget their retries": Lua(
        "moves",
        "if has(e, RECURRING) then occurrences.leave(e) end",
        "",
        ("put series", "claim", "again, then", "claim", "cancel", "put far", "cancel"),
    ),
    "a lapse retries what was cancelled": Lua(
        "lapsing",
        "if has(e, NO_RETRY) then\n",
        "if false then\n",
        ("put", "claim", "cancel", "leases end"),
    ),
    "what is late is dropped": Lua(
        "moves",
        "if late_of(e) == 2 then dead.bury(e, 'late') else",
        "if false then else",
        ("put, late is dead", "leases end"),
    ),
    "a move keeps the time of being late": Lua(
        "attempts",
        "e.expires = e.expires - e.due + due",
        "e.expires = e.expires",
        ("put, late is dead", "reschedule far"),
    ),
    "a renewal tells no cancel": Lua(
        "renew",
        "return has(e, NO_RETRY) and 'c' or 'r'",
        "return 'r'",
        ("put", "claim", "cancel", "renew"),
    ),
    "a redriven occurrence is not listed": Lua(
        "redrive",
        "    live[#live + 1] = due\n",
        "",
        ("put series", "claim", "dead, then", "redrive"),
    ),
    "a redriven occurrence is not listed apart": Lua(
        "redrive",
        "    occurrences.list_apart(id)\n",
        "",
        ("put series", "claim", "dead", "redrive", "put far", "cancel"),
    ),
    "a settlement forgets newer versions": Lua(
        "settle",
        " or (e and e.revision > revision)",
        "",
        ("put", "claim", "put", "leases end", "first done"),
    ),
    "a settlement of any token": Lua(
        "settle",
        "if not e or token_of(e) ~= token then",
        "if not e or not token_of(e) then",
        ("put", "claim", "done with another token"),
    ),
    "a claim that is not held is remembered": Lua(
        "settle",
        "answers[tonumber(ARGV[a])] == 's'",
        "true",
        ("put", "claim", "put", "cancel", "done", "put"),
    ),
}


@pytest.fixture(scope="module")
def redis() -> Iterator[str]:
    with serving(redis_servers()[0]) as url:
        yield f"{url}?timeout_ms=60000"


@pytest.mark.parametrize("lua", LUA.values(), ids=LUA.keys())
def test_a_broken_script_is_found(redis: str, lua: Lua, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(clock: VirtualClock) -> RedisStore:
        return RedisStore(redis, namespace=uuid4().hex, clock=clock)

    def broken(asked: str) -> str:
        return source_of(asked).replace(lua.right, lua.wrong) if asked == lua.script else source_of(asked)

    source_of = scripts.source_of
    assert source_of(lua.script).count(lua.right) == 1
    assert not differs(make, lua.steps)
    monkeypatch.setattr(scripts, "source_of", broken)
    scripts._put_together.cache_clear()
    try:
        assert differs(make, lua.steps)
    finally:
        scripts._put_together.cache_clear()

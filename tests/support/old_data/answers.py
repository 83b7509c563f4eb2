"""Collect a store's answers about old data, in chapters. Each chapter begins on a new copy of the data."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import astuple, replace

from aiodelay.core.table_scan import Scan, ScannedTable
from aiodelay.core.transitions import delivery_id, token_counter, token_for
from aiodelay.core.values import (
    LEASE_MS,
    After,
    Again,
    At,
    Cancel,
    Claim,
    Command,
    Conflict,
    Dead,
    DeadKey,
    Demand,
    Done,
    Fire,
    JournalEntry,
    PutBack,
    Query,
    Renewal,
    Reschedule,
    Settlement,
    SourcePosition,
    State,
)
from aiodelay.ports import Scannable, Store, Transfer
from aiodelay.testing.conformance import Stage
from aiodelay.testing.conformance.stage import Bench

from .story import FAR, HOUR_MS, JOURNAL, LANES, SOURCES, Held, Told

__all__ = ["CHAPTERS", "FIXTURES", "LATER_FIELDS", "OldData", "answered", "answers", "plain", "told_of"]

ROOT = Path(__file__).parents[3]
FIXTURES = ROOT / "tests" / "fixtures"
LATER_FIELDS = {"debounced_ms", "appended", "appended_due_ms"}
"""The fields of a record that the version did not know which wrote the data."""

DAY_MS = 24 * HOUR_MS
ALL = Query(limit=1000)
OPS_OF_THE_STORY = 1000
CLAIMED = (*LANES, "kafka")
STEPS, STEP_MS, PAUSE_S = 200, 500, 0.02
"""The most steps of the clock until all due messages are claimed. A Kafka owner also needs a pause in real time."""
MESSAGES = (
    *("id", "lane", "address", "type", "encoding", "payload", "key", "headers", "trace", "version", "rule", "revision"),
    *("due_ms", "expires_ms", "late", "attempt", "first_error", "last_error"),
)
SCANNED: Mapping[ScannedTable, tuple[str, ...]] = {
    "messages": (*MESSAGES, "place_ms"),
    "dead": (*MESSAGES, "reason", "at_ms", "errors", "traceback"),
    "done": ("id", "version", "until_ms"),
}

Chapter = Callable[[Stage, Told], Awaitable[Mapping[str, Any]]]


class OldData(Bench):
    """The old data of one store. `make_store` opens the newest copy of them."""

    @abstractmethod
    async def restore(self) -> None:
        """Make a new copy of the old data."""

    async def settle_down(self, stage: Stage) -> None:
        """Do nothing. A subclass waits until an open copy no longer changes by itself."""

    async def journal_is_whole(self, stage: Stage) -> None:
        """Do nothing. A subclass waits until the journal has all entries."""

    @asynccontextmanager
    async def opened(self, told: Told) -> AsyncIterator[Stage]:
        """Open a new copy at the time at which the story ended, with a worker called `first`."""
        await self.restore()
        stage = Stage(self, journal=JOURNAL)
        stage.move(told.now_ms - stage.now)
        for _ in range(OPS_OF_THE_STORY):  # skip the ops of the story: the stage counts from 1 again
            stage.op()
        async with stage:
            await self.settle_down(stage)
            yield stage


async def answers(data: OldData, told: Told, chapter: str) -> Any:  # noqa: ANN401 - what JSON can hold
    """Return the answers of a store in one of `CHAPTERS`."""
    async with data.opened(told) as stage:
        return plain(await CHAPTERS[chapter](stage, told))


def told_of(fixture: Path) -> Told:
    """Return the facts about the story that the chapters need."""
    return msgspec.json.decode((fixture / "told.json").read_bytes(), type=Told)


def answered(fixture: Path, chapter: str) -> Any:  # noqa: ANN401 - what JSON can hold
    """Return the answers of the old version."""
    return msgspec.json.decode((fixture / f"{chapter}.json").read_bytes())


def plain(value: object) -> Any:  # noqa: ANN401 - what JSON can hold
    """Return a value for JSON: bytes as base64, mappings with sorted keys."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=_as_dict, order="sorted"))


def _as_dict(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(type(value).__name__)


# --- looking ----------------------------------------------------------------------------------------------


async def _look(stage: Stage, told: Told) -> Mapping[str, Any]:
    """Call every method that inspects a store."""
    store = stage.store
    messages = await store.search(ALL)
    found: dict[str, Any] = {
        "messages": messages,
        "pages": await _pages(store),
        "differ one by one": [each for each in messages if await store.get(each.record.id) != each],
        "gone": [await store.get(each) for each in ("cancelled", "ended version", "killer")],
        "of a lane": [each.record.id for each in await store.search(replace(ALL, lanes=("mails",)))],
        "between": [each.record.id for each in await store.search(replace(ALL, from_ms=told.now_ms, to_ms=FAR.ms))],
        "series": sorted([each.record.id for each in await store.series()]),
        "counts": await store.counts(),
        "load": await store.load(bucket_ms=HOUR_MS, buckets=48),
        "dead": await store.dead_letters(limit=1000),
        "dead of a lane": [each.key for each in await store.dead_letters(lane="mails")],
        "dead of an id": [each.key for each in await store.dead_letters(message_id="dead rejected")],
        "journal": [astuple(each) for each in await store.journal(limit=1000) if _is_old(each, stage, told)],
        "journal of an id": [each.event for each in await store.journal(message_id="failed")],
        "holds": sorted(await store.paused(), key=str),
        "positions": {source: await store.position(source) for source in SOURCES},
        "instances": [(each.name, each.lanes, each.seen_ms) for each in await store.instances()],
    }
    if isinstance(store, Transfer):
        found["blocked"] = await store.blocked()
    if isinstance(store, Scannable):
        found["tables"] = await asyncio.to_thread(_scanned, store)
    return found


async def _pages(store: Store) -> list[list[str]]:
    """Return the ids of all messages, in pages of 10."""
    pages: list[list[str]] = []
    after: tuple[int, str] | None = None
    while page := await store.search(Query(limit=10, after=after)):
        pages.append([each.record.id for each in page])
        after = page[-1].next_attempt_ms, page[-1].record.id
    return pages


def _scanned(store: Scannable) -> Mapping[str, list[list[Any]]]:
    """Read whole tables, as Spark's jobs do."""
    found: dict[str, list[list[Any]]] = {}
    for table, columns in SCANNED.items():
        scan = Scan(table=table, columns=columns)
        batches = [batch for part in store.scan_parts(scan) for batch in store.scan_part(scan, part)]
        rows = [list(row) for batch in batches for row in zip(*(batch[name] for name in columns), strict=True)]
        found[table] = sorted(rows, key=lambda row: str(row[0]))
    return found


async def _rest(stage: Stage) -> dict[str, Any]:
    """Return a summary of the store after a chapter."""
    messages = await stage.messages()
    return {
        "messages": {each.record.id: (each.record.revision, each.state, each.next_attempt_ms) for each in messages},
        "attempts": {each.record.id: each.record.attempt for each in messages if each.record.attempt},
        "dead": [(*each.key, each.reason) for each in await stage.dead()],
        "events": await _events(stage),
    }


def _is_old(entry: JournalEntry, stage: Stage, told: Told) -> bool:
    """Return whether the story has written an entry. A Kafka owner writes more entries as soon as it opens."""
    return stage.bench.counted_journal or entry.at_ms < told.now_ms


async def _events(stage: Stage) -> list[tuple[str, str, str]]:
    """Return the newest entries of the journal. For Kafka, return all: its partitions have no common order."""
    assert isinstance(stage.bench, OldData)
    await stage.bench.journal_is_whole(stage)
    events = [(each.event, each.id, each.detail) for each in await stage.store.journal(limit=1000)]
    return events[-100:] if stage.bench.counted_journal else sorted(events)


# --- claims of old tokens ---------------------------------------------------------------------------------


async def _settle(stage: Stage, told: Told) -> Mapping[str, Any]:
    """Renew and settle the claims of the story with their old tokens."""
    claimed = await stage.claimed({"mails": Demand(100)}, request=told.request)
    found: dict[str, Any] = {"repeated": [(each.record.id, _known(each, told)) for each in claimed.claims]}
    stage.move(1000)
    wrong = [_end(replace(each, token=each.token + 1), stage) for each in told.held]
    found["by other tokens"] = await stage.work.settle(wrong)
    renewed = [replace(each, token=_later(each.token, stage)) for each in told.held]
    renewals = [
        Renewal(old.id, old.revision, old.token, new.token) for old, new in zip(told.held, renewed, strict=True)
    ]
    outcomes = await stage.work.renew(renewals)
    found["renewed"] = dict(zip([each.id for each in told.held], outcomes, strict=True))
    left = [each for each in renewed if each.id != "flight left"]
    settled = await stage.work.settle([_end(each, stage) for each in left])
    found["settled"] = dict(zip([each.id for each in left], settled, strict=True))
    stage.move(LEASE_MS)
    found["lapsed"] = (await stage.tidy(LANES)).lapsed
    return found | await _rest(stage)


def _known(claim: Claim, told: Told) -> bool:
    return Held(claim.record.id, claim.record.revision, claim.token) in told.held


def _later(token: int, stage: Stage) -> int:
    return token_for(stage.now + LEASE_MS, token_counter(token))


def _end(held: Held, stage: Stage) -> Settlement:
    """Return the settlement that the id of a claim names."""
    if held.id.endswith(("again", "late")):
        return Again(held.id, held.revision, held.token, stage.now + HOUR_MS, 1, "later")
    if held.id.endswith("dead"):
        return Dead(held.id, held.revision, held.token, "not_retryable", 1, "never")
    return Done(held.id, held.revision, held.token, stage.now + HOUR_MS if held.id.startswith("series") else None)


# --- commands ---------------------------------------------------------------------------------------------


async def _command(stage: Stage, told: Told) -> Mapping[str, Any]:
    """Repeat the last commands of the story. Then give new commands that depend on the memory of the store."""
    repeated = [_repeat(stage, *each) for each in told.commands]
    found: dict[str, Any] = {"repeated": await stage.store.apply(repeated)}
    if stage.store.traits.positions != "none":
        for source, position in SOURCES.items():
            await stage.store.position(source)
            moves = [SourcePosition(source, first, position + 1) for first in (position - 1, position)]
            puts = [stage.put(f"{source} {each.first}", FAR) for each in moves]
            found[source] = [await stage.store.apply([put], source=move) for put, move in zip(puts, moves, strict=True)]
    failed = await stage.record("failed")
    commands: list[Command] = [
        *[stage.put("ended version", FAR, conflict=Conflict.newer(version)) for version in (7, 8)],
        *[stage.put("versioned", FAR, conflict=Conflict.newer(version)) for version in (12, 13)],
        *[stage.put("dead rejected", FAR, conflict=Conflict.newer(version)) for version in (1, 99)],
        *[stage.put(each, FAR, conflict=Conflict.keep()) for each in ("plain", "flight left", "killer")],
        *[stage.put(each, FAR, conflict=Conflict.error()) for each in ("plain", "flight left", "cancelled")],
        stage.put("failed", FAR, conflict=Conflict.if_revision(failed.revision - 1)),
        stage.put("failed", FAR, conflict=Conflict.if_revision(failed.revision)),
        *[stage.put(each, FAR) for each in ("series", "flight replaced", "suspect 0")],
        *[Fire(stage.op(), each) for each in ("typed", "flight done", "cancelled")],
        *[Reschedule(stage.op(), each, After(HOUR_MS)) for each in ("packed", "flight done", "cancelled")],
        *[Cancel(stage.op(), each) for each in ("large", "flight done", "flight replaced", "ended series", "dropped")],
        Cancel(stage.op(), "cron", (failed.revision, None)),
    ]
    found["outcomes"] = [(each.id, outcome) for each in commands for outcome in await stage.store.apply([each])]
    back = replace(failed, envelope=replace(failed.envelope, id="moved"))
    found["put back"] = await stage.store.put_back([PutBack(back, stage.now)])
    return found | await _rest(stage)


def _repeat(stage: Stage, kind: str, message_id: str, op: str) -> Command:
    """Return a command of the story again. The store recognises it by its op alone."""
    commands: Mapping[str, Command] = {
        "Cancel": Cancel(b"", message_id),
        "Reschedule": Reschedule(b"", message_id, At(stage.now)),
        "Fire": Fire(b"", message_id),
        "Put": stage.put(message_id),
    }
    return replace(commands[kind], op=bytes.fromhex(op))


# --- deliveries -------------------------------------------------------------------------------------------


async def _deliver(stage: Stage, told: Told) -> Mapping[str, Any]:
    """Resume everything, and claim all messages as time passes. Return their order and their attempts."""
    for lane, address in await stage.store.paused():
        await stage.store.resume(lane, address)
    found: dict[str, Any] = {}
    for name, ms in (("now", 0), ("after the leases", 5 * LEASE_MS), ("a day later", DAY_MS)):
        stage.move(ms)
        found[name] = await _delivered(stage)
    stage.move(FAR.ms - stage.now)
    found["in 2090"] = await _delivered(stage)
    return found | await _rest(stage)


async def _delivered(stage: Stage) -> Mapping[str, list[Any]]:
    """Claim and settle all due messages. Return them by lane."""
    found: dict[str, list[Any]] = {lane: [] for lane in CLAIMED}
    due = replace(ALL, lanes=CLAIMED, to_ms=stage.now + 1)
    for _ in range(STEPS):
        claimed = await stage.claimed({lane: Demand(100) for lane in CLAIMED})
        for claim in claimed.claims:
            record = claim.record
            told = (record.attempt, record.lapses, record.kills, record.alone, record.no_retry, record.last_error)
            found[record.envelope.lane].append((delivery_id(record), *told))
        await stage.work.settle([_end_for_good(claim) for claim in claimed.claims])
        if not claimed.claims:
            if all(each.state is State.IN_FLIGHT for each in await stage.store.search(due)):
                break
            stage.move(STEP_MS)
            await asyncio.sleep(0 if stage.bench.leases_survive else PAUSE_S)
    return found if stage.bench.order_per_group else {lane: sorted(each) for lane, each in found.items()}


def _end_for_good(claim: Claim) -> Settlement:
    return Done(claim.record.id, claim.record.revision, claim.token)


# --- dead letters -----------------------------------------------------------------------------------------


async def _redrive(stage: Stage, told: Told) -> Mapping[str, Any]:
    """Redrive every dead letter except one. Purge this dead letter."""
    letters = await stage.dead()
    keys = [each.key for each in letters if each.record.id != "dead late"]
    purged = [each.key for each in letters if each.record.id == "dead late"]
    found: dict[str, Any] = {
        "purged": await stage.store.purge(purged),
        "redriven": [(*key, outcome) for key in keys for outcome in await stage.store.redrive([key])],
        "unknown": await stage.store.redrive([DeadKey("nobody", 1), *purged]),
    }
    records = [await stage.store.get(key.id) for key in keys]
    found["records"] = [each.record for each in records if each is not None]
    return found | await _rest(stage)


CHAPTERS: Mapping[str, Chapter] = {
    "look": _look,
    "settle": _settle,
    "command": _command,
    "deliver": _deliver,
    "redrive": _redrive,
}
"""The chapters, in their order."""

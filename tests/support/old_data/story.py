"""The story: a sequence of calls that leaves messages in every state that a store keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from msgspec import Struct
from msgspec.structs import replace

from aiodelay.core.transitions import KILLS_TO_DEATH, SUSPECT_LAPSES, occurrence_id
from aiodelay.core.values import (
    ATTEMPTED,
    CONTINUED,
    After,
    Again,
    At,
    Cancel,
    Claim,
    Command,
    Conflict,
    Dead,
    DeadReason,
    Demand,
    Done,
    Envelope,
    Fire,
    Late,
    PutBack,
    Record,
    Reschedule,
    SourcePosition,
    Stored,
)
from aiodelay.testing.conformance import Stage

__all__ = ["JOURNAL", "LANES", "SOURCES", "Held", "Told", "tell"]

JOURNAL = 500
"""The number of entries that the journal keeps: enough for the story and the chapters."""
BILLS, INVOICES, MAILS, ORDERS, REPORTS, STDOUT = LANES = (
    *("bills", "invoices", "mails", "orders", "reports", "stdout"),
)
HOUR_MS, FAR = 3_600_000, At(3_786_912_000_000)
"""An hour, and the instant 2090-01-01."""
SOURCES = {"kafka:requests/b9f3ba5c-0a53-4b8e-9d0a-3d4a7d1f5a01/0": 42, "import:0191f0a8": 7}
"""The position of each intake at the end of the story."""
OWN_ID = "0191f0a85c7a7c3e9a4b5d6e7f801234"
"""An id of the form that aiodelay generates, which Redis stores in 16 bytes."""
EVERY_MINUTE: Mapping[str, str | int] = {"e": 60_000, "s": 1_893_456_000_000}
EVERY_MONDAY: Mapping[str, str | int] = {"c": "0 9 * * mon", "z": "Europe/Paris", "m": "skip", "o": "skip"}
TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
RICH_TRACE = {**TRACE, "tracestate": "vendor=1", CONTINUED: "1"}
TRACEBACK = 'Traceback (most recent call last):\n  File "orders.py", line 7, in ship\nOSError: größe\n'


class Held(Struct, frozen=True):
    """A claim that the story has not settled. With these values, a later process settles or renews it."""

    id: str
    revision: int
    token: int


class Told(Struct, frozen=True):
    """The facts about the story that the chapters need.

    Attributes:
        now_ms: The time of the clock at the end.
        request: The request id of the last claim.
        held: All claims that the story has not settled, also claims on versions that were replaced since.
        commands: The last commands, whose ops the store still remembers: type, id, and op in hexadecimal.
    """

    now_ms: int
    request: str
    held: list[Held]
    commands: list[tuple[str, str, str]]


async def tell(stage: Stage) -> Told:
    """Play the story on a store."""
    commands: list[Command] = []
    await _fail(stage)
    await _end_processes(stage)
    await _recur(stage)
    await _store(stage)
    await _command(stage, commands)
    await _pause(stage)
    await _take_in(stage)
    held = [*await _leave_in_flight(stage, commands), *await _leave_in_trial(stage)]
    return Told(
        stage.now,
        "last",
        [Held(each.record.id, each.record.revision, each.token) for each in held],
        [(type(each).__name__, each.id, each.op.hex()) for each in commands],
    )


# --- failures ---------------------------------------------------------------------------------------------


async def _fail(stage: Stage) -> None:
    """Let attempts fail, so that one message has a retry and there is a dead letter for each reason."""
    await stage.stored(stage.put("failed", key=b"\xff", headers={"a": b"\x00"}, trace=TRACE))
    for attempt in range(1, 7):
        claim = await stage.claim_one()
        trace = {**RICH_TRACE, f"{ATTEMPTED}traceparent": TRACE["traceparent"]} if attempt == 6 else None
        due_ms = stage.now + HOUR_MS if attempt == 6 else stage.now
        await stage.end(replace(_again(claim, due_ms, attempt, f"error {attempt} ü"), trace=trace))
    for attempt, reason in enumerate(get_args(DeadReason), 1):
        due = At(stage.now - 5)
        await stage.stored(
            stage.put(f"dead {reason}", due, conflict=Conflict.newer(attempt), key=b"k", trace=RICH_TRACE)
        )
        await stage.end(_again(await stage.claim_one(), stage.now, attempt, "first"))
        await stage.end(_again(await stage.claim_one(), stage.now, attempt + 1, "second"))
        claim = await stage.claim_one()
        error, traceback = (None, None) if reason == "undecodable" else ("OSError: größe", TRACEBACK)
        await stage.end(_dead(claim, reason, attempt + 2, error, traceback=traceback))
        stage.move(1)
    await stage.stored(stage.put("dead although cancelled", At(stage.now - 5)))
    claim = await stage.claim_one()
    await stage.do(Cancel(stage.op(), claim.record.id))
    await stage.end(_dead(claim, "rejected", 1, "no"))
    await stage.stored(stage.put("late", At(stage.now - HOUR_MS), late=Late.dead_letter("1s")))
    await stage.stored(stage.put("dropped", At(stage.now - HOUR_MS), late=Late.drop("1s")))
    assert await stage.claim() == []


async def _end_processes(stage: Stage) -> None:
    """Let claims lapse, to make a killer, suspects (one of them with a kill), and a message with one lapse."""
    await stage.stored(stage.put("killer"))
    for _ in range(SUSPECT_LAPSES + KILLS_TO_DEATH):
        await stage.die()
    assert await stage.get("killer") is None
    await stage.stored(*[stage.put(f"suspect {n}") for n in range(4)])
    while not any([(await stage.record(f"suspect {n}")).kills for n in range(4)]):
        assert await stage.die()
    await stage.stored(stage.put("lapsed once", lane=INVOICES))
    async with stage.store.work("gone", (INVOICES,)) as gone:
        assert await stage.claim(lane=INVOICES, work=gone)
    await stage.lapse()


# --- series -----------------------------------------------------------------------------------------------


async def _recur(stage: Stage) -> None:
    """Let series recur, with retries and dead letters of their occurrences."""
    await stage.stored(stage.put("cron", FAR, lane=MAILS, rule=EVERY_MONDAY))
    await stage.stored(stage.put("series", lane=MAILS, rule=EVERY_MINUTE, late=Late.drop("90d"), payload=b"tick"))
    for attempt in (1, 2):
        await _retry(stage, attempt, then_ms=stage.now + 1)
        stage.move(1)
    due_ms = (await stage.record("series")).due_ms
    await stage.end(_dead(await stage.claim_one(MAILS), "rejected", 1, "no", then_ms=stage.now + HOUR_MS))
    assert (await stage.dead())[-1].record.id == occurrence_id("series", due_ms)
    await stage.stored(stage.put("ended series", lane=MAILS, rule=EVERY_MINUTE))
    await _retry(stage, 1, then_ms=stage.now + 1)
    stage.move(1)
    await stage.end(_done(await stage.claim_one(MAILS)))
    await stage.stored(stage.put("moved series", lane=MAILS, rule=EVERY_MINUTE))
    due_ms = (await stage.record("moved series")).due_ms
    await _retry(stage, 1, then_ms=stage.now + HOUR_MS)
    moved = await stage.do(Reschedule(stage.op(), occurrence_id("moved series", due_ms), After(2 * HOUR_MS)))
    assert isinstance(moved, Stored)


async def _retry(stage: Stage, attempt: int, *, then_ms: int) -> None:
    claim = await stage.claim_one(MAILS)
    await stage.end(_again(claim, stage.now + HOUR_MS, attempt, f"tick {attempt}", then_ms=then_ms))


# --- messages that wait -----------------------------------------------------------------------------------


async def _store(stage: Stage) -> None:
    """Store messages of all kinds, and end some whose versions and ops the store must remember."""
    await stage.stored(
        stage.put("plain", FAR, payload=b""),
        stage.put(OWN_ID, FAR, payload=bytes(range(256)), trace=TRACE),
        stage.put("ключ ✓", FAR, key=b"", headers={"é": b"", "a": b"\xff" * 20}),
        stage.put("typed", FAR, type_="order.placed", encoding="json", payload=b'{"id":7}'),
        stage.put("packed", FAR, encoding="msgpack", payload=b"\x81\xa2id\x07", trace=RICH_TRACE),
        stage.put("null", FAR, lane=STDOUT, address="online", encoding="null", payload=b"", key=b"k"),
        stage.put("drops", FAR, late=Late.drop("1h")),
        stage.put("buries", After(HOUR_MS), late=Late.dead_letter("2h")),
        stage.put("large", FAR, payload=b"0123456789abcdef" * 100),
        stage.put("versioned", FAR, conflict=Conflict.newer(12)),
        stage.put("newest version", FAR, conflict=Conflict.newer((1 << 63) - 1)),
        stage.put("replaced version", FAR, conflict=Conflict.newer(3)),
        stage.put("replaced version", FAR, conflict=Conflict.newer(5)),
        *[stage.put(f"for a user to {what}", FAR) for what in ("keep", "cancel", "end", "replace", "ask")],
    )
    await stage.stored(stage.put("ended version", lane=MAILS, conflict=Conflict.newer(7), payload=b"x" * 1500))
    await stage.end(_done(await stage.claim_one(MAILS)))


async def _command(stage: Stage, given: list[Command]) -> None:
    """Cancel, reschedule, fire and replace messages."""
    ids = ("cancelled", "moved", "fired", "replaced", "moved while it failed")
    await stage.stored(*[stage.put(each, After(HOUR_MS), lane=REPORTS) for each in ids])
    commands: list[Command] = [
        Cancel(stage.op(), "cancelled"),
        Cancel(stage.op(), "never there"),
        Reschedule(stage.op(), "moved", After(2 * HOUR_MS)),
        Fire(stage.op(), "fired"),
        stage.put("replaced", After(3 * HOUR_MS), lane=REPORTS),
        Reschedule(stage.op(), "moved while it failed", At(stage.now - 1)),
    ]
    await stage.store.apply(commands)
    given += commands
    claims = {each.record.id: each for each in await stage.claim(lane=REPORTS)}
    await stage.end(_again(claims.pop("moved while it failed"), stage.now + HOUR_MS, 1, "late"))
    for claim in claims.values():
        await stage.end(_again(claim, stage.now, claim.record.attempt))


async def _pause(stage: Stage) -> None:
    """Pause a lane and an address, so that their messages wait. The `Late` policy of one message applies meanwhile."""
    await stage.store.pause(BILLS)
    await stage.store.pause(STDOUT, "online")
    await stage.stored(
        stage.put("in a paused lane", lane=BILLS),
        stage.put("to a paused address", lane=STDOUT, address="online"),
        stage.put("late at a paused address", lane=STDOUT, address="online", late=Late.drop("1ms")),
        stage.put("to another address", lane=STDOUT, address="offline"),
    )
    await stage.end(_again(await stage.claim_one(STDOUT), stage.now + HOUR_MS, 0))
    stage.move(1000)
    await stage.tidy()


async def _take_in(stage: Stage) -> None:
    """Store commands with the position of an intake, and put back messages from sources."""
    for n, (source, position) in enumerate(SOURCES.items()):
        await stage.store.position(source)
        moved = SourcePosition(source, 0, position)
        (outcome,) = await stage.store.apply([stage.put(f"taken in {n}", FAR)], source=moved)
        assert isinstance(outcome, Stored)
    back = Record(
        Envelope("returned", ORDERS, payload=b"back", key=b"k", headers={"a": b"b"}),
        stage.now - HOUR_MS,
        stage.now - HOUR_MS,
        bytes(8),
        attempt=2,
        first_error="one",
        last_error="two",
        earlier_errors=("one",),
    )
    letter = replace(back, envelope=replace(back.envelope, id="returned dead"), traceback=TRACEBACK)
    messages = [PutBack(back, stage.now + HOUR_MS), PutBack(letter, letter.due_ms, "rejected")]
    assert [each.answer for each in await stage.store.put_back(messages)] == ["stored", "stored"]


# --- messages in flight -----------------------------------------------------------------------------------


async def _leave_in_flight(stage: Stage, given: list[Command]) -> Sequence[Claim]:
    """Leave claims open. Some of their versions are then replaced or cancelled."""
    names = ("done", "again", "dead", "renewed", "cancelled", "replaced", "replaced and ended", "late", "left")
    await stage.stored(stage.put("series replaced", lane=MAILS, rule=EVERY_MINUTE))
    claim = await stage.claim_one(MAILS)
    await stage.end(_again(claim, stage.now, 1, "tick", then_ms=stage.now + HOUR_MS))
    await stage.stored(
        *[stage.put(f"flight {name}", lane=MAILS, payload=name.encode()) for name in names],
        stage.put("series in flight", lane=MAILS, rule=EVERY_MINUTE),
        stage.put("series cancelled in flight", lane=MAILS, rule=EVERY_MINUTE),
    )
    claimed = await stage.claimed({MAILS: Demand(100)}, request="last")
    claims = {each.record.id: each for each in claimed.claims}
    stage.move(1000)
    claims["flight renewed"], _ = await stage.renew(claims["flight renewed"])
    replaced = ("flight replaced", "flight replaced and ended", "series replaced")
    commands: list[Command] = [
        *[Cancel(stage.op(), f"{what} cancelled{rest}") for what, rest in (("flight", ""), ("series", " in flight"))],
        *[stage.put(each, FAR, lane=MAILS) for each in replaced],
        Cancel(stage.op(), "flight replaced and ended"),
    ]
    await stage.store.apply(commands)
    given += commands
    return [*claims.values()]


async def _leave_in_trial(stage: Stage) -> Sequence[Claim]:
    """Leave a suspect with another worker, which tries it alone."""
    second = await stage.another_worker("second", (ORDERS,))
    return await stage.claim(1, ORDERS, work=second)


# --- short words ------------------------------------------------------------------------------------------


def _done(claim: Claim, then_ms: int | None = None) -> Done:
    return Done(claim.record.id, claim.record.revision, claim.token, then_ms)


def _again(claim: Claim, due_ms: int, attempt: int, error: str | None = None, *, then_ms: int | None = None) -> Again:
    return Again(claim.record.id, claim.record.revision, claim.token, due_ms, attempt, error, then_ms)


def _dead(
    claim: Claim,
    reason: DeadReason,
    attempt: int,
    error: str | None,
    *,
    then_ms: int | None = None,
    traceback: str | None = None,
) -> Dead:
    record = claim.record
    return Dead(record.id, record.revision, claim.token, reason, attempt, error, then_ms, traceback=traceback)

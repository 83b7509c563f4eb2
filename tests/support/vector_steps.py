"""`STEPS`: all calls of a store about one message, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from msgspec.structs import replace

from aiodelay.core import transitions as t
from aiodelay.core.values import (
    After,
    Again,
    At,
    Cancel,
    Command,
    Conflict,
    Dead,
    Done,
    Envelope,
    Fire,
    Late,
    Put,
    PutBack,
    Record,
    Renewal,
    Reschedule,
    Settlement,
)
from tests.support.vector_rulebook import PARKED, START_MS, Action, Claims, Leap, Play, Purge

__all__ = ["LEAPS", "PAUSED", "STEPS", "UNTIDIED", "Step"]

FAR_MS = START_MS + 3_600_000
RENEWED_MS = 20_000
LOW, HIGH = 1 << 53, (1 << 53) + 1  # a double holds only one of them
OFF = 2_048
"""The difference of another token: more than the number of claims at one instant."""

Step: TypeAlias = Callable[[Play], Action]
"""A function that returns the next call, made from the rulebook's state of the message."""

NOW = After(0)
FAR = At(FAR_MS)
RULE: Mapping[str, str | int] = {"e": 60_000}
OTHER_RULE: Mapping[str, str | int] = {"e": 90_000}
ChooseConflict: TypeAlias = Callable[[Play], Conflict]


def put(
    play: Play,
    conflict: Conflict | ChooseConflict = Conflict.replace(),  # noqa: B008 - frozen
    *,
    due: At | After = NOW,
    lane: int = 0,
    late: Late = Late.deliver(),  # noqa: B008 - frozen
    rule: Mapping[str, str | int] | None = None,
    address: str = "",
    loads: bool = False,
) -> Action:
    """Put a message whose payload is the number of the command."""
    chosen = conflict if isinstance(conflict, Conflict) else conflict(play)
    envelope = Envelope(
        play.id,
        play.lanes[lane],
        address,
        payload=b"%d" % len(play.commands),
        version=chosen.version,
        rule=rule,
    )
    if rule is not None and play.standing() is None:
        play.first_due_ms = t.due_of(due, play.now)
    return Action(Put(t.NO_OP if loads else play.op(), envelope, due, chosen, late))


def if_revision(play: Play, *, off: int) -> Conflict:
    """Return a conflict that names the stored revision plus `off`; with `off` 0, the stored revision itself."""
    standing = play.standing()
    return Conflict.if_revision(off + (1 if standing is None else standing.record.revision))


def cancel(play: Play, *, revision: int | None = None, due: int | None = None) -> Action:
    """Cancel the message; with numbers, only if its revision and due time are the stored ones plus these numbers."""
    standing = play.standing()
    if revision is None:
        return Action(Cancel(play.op(), play.id))
    has_revision, has_due_ms = (1, 1) if standing is None else (standing.record.revision, standing.record.due_ms)
    return Action(Cancel(play.op(), play.id, (has_revision + revision, None if due is None else has_due_ms + due)))


def reschedule(play: Play, due: At | After) -> Action:
    """Move the due time."""
    return Action(Reschedule(play.op(), play.id, due))


def to_occurrence(play: Play) -> Action:
    """Move a series to the due time of its first occurrence, of which a retry may be pending."""
    return reschedule(play, At(play.first_due_ms))


def beside(play: Play, kind: str) -> Action:
    """Change the first occurrence of a series, which is a separate message."""
    occurrence, op = t.occurrence_id(play.id, play.first_due_ms), play.op()
    changes: dict[str, Command] = {
        "cancel": Cancel(op, occurrence),
        "fire": Fire(op, occurrence),
        "reschedule": Reschedule(op, occurrence, FAR),
    }
    return Action(changes[kind])


def settle(play: Play, at: int, kind: str, *, then: int | None = None, off: int = 0, far: bool = False) -> Action:
    """Settle one of the claims: 0 is the first, -1 the last."""
    number, slot = play.slot(at)
    token = slot.token + off
    due_ms = FAR_MS if far else play.now
    attempt = 1 + len(play.actions)
    settlements: dict[str, Settlement] = {
        "done": Done(slot.id, slot.revision, token, then),
        "again": Again(slot.id, slot.revision, token, due_ms, attempt, f"error {attempt}", then),
        "release": Again(slot.id, slot.revision, token, due_ms, 0, None, then),
        "dead": Dead(slot.id, slot.revision, token, "rejected", attempt, f"error {attempt}", then),
        "traced": Again(slot.id, slot.revision, token, due_ms, attempt, "the same", then, {"traceparent": "00-1"}),
        "told": Dead(slot.id, slot.revision, token, "attempts_exhausted", attempt, "last", then, {"a": "b"}, "Trace\n"),
    }
    return Action(settlements[kind], number, off)


def then_now(play: Play, kind: str) -> Action:
    """Settle the last claim. The next occurrence is due at once, but not at the same due time."""
    return settle(play, -1, kind, then=play.now + 1)


def renew(play: Play, at: int, *, off: int = 0, ends_trial: bool = False) -> Action:
    """Renew one of the claims."""
    number, slot = play.slot(at)
    to = t.token_for(play.now + RENEWED_MS, t.token_counter(slot.token))
    return Action(Renewal(slot.id, slot.revision, slot.token + off, to, ends_trial), number, off)


def redrive(play: Play, *, oldest: bool = False) -> Action:
    """Redrive a dead letter."""
    return Action(play.key(oldest=oldest))


def purge(play: Play) -> Action:
    """Purge a dead letter."""
    return Action(Purge(play.key()))


def put_back(play: Play, *, dead: bool = False, beside: bool = False, version: int | None = None) -> Action:
    """Put back a message that left the store before the case began, or the first occurrence of a series."""
    message_id = t.occurrence_id(play.id, play.first_due_ms) if beside else play.id
    envelope = Envelope(message_id, play.lanes[0], payload=b"back", version=version)
    op = (play.number << 16 | 0xFFFF).to_bytes(8, "big")
    record = Record(envelope, START_MS - 1000, START_MS - 1000, op, attempt=1, first_error="elsewhere")
    record = replace(record, last_error="elsewhere")
    return Action(PutBack(record, START_MS - 500, "rejected" if dead else None))


def repeat(play: Play, at: int) -> Action:
    """Repeat a command with the same op."""
    if not play.commands:
        return Action(Cancel(play.op(), play.id))
    return Action(play.commands[at])


PAUSED = "put, paused"
PUTS: dict[str, Step] = {
    "put": put,
    "put far": partial(put, due=FAR),
    "put keep": partial(put, conflict=Conflict.keep()),
    "put error": partial(put, conflict=Conflict.error()),
    "put if the revision": partial(put, conflict=partial(if_revision, off=0)),
    "put if another revision": partial(put, conflict=partial(if_revision, off=1)),
    "put newer, low": partial(put, conflict=Conflict.newer(LOW)),
    "put newer, high": partial(put, conflict=Conflict.newer(HIGH)),
    "load newer, high": partial(put, conflict=Conflict.newer(HIGH), loads=True, due=FAR),
    "put into the other lane": partial(put, lane=1),
    "append": partial(put, conflict=Conflict.append()),
    "append far, until there are two": partial(put, conflict=Conflict("append", max_items=2, max_bytes=6), due=FAR),
    "append into the other lane": partial(put, conflict=Conflict.append(), lane=1),
    "put, late is dropped": partial(put, late=Late.drop("5s")),
    "put, late is dead": partial(put, late=Late.dead_letter("5s")),
    PAUSED: partial(put, address=PARKED),
    "put series": partial(put, rule=RULE),
    "put series, far": partial(put, rule=RULE, due=FAR),
    "put series newer, low": partial(put, conflict=Conflict.newer(LOW), rule=RULE),
    "put series, keep": partial(put, conflict=Conflict.keep(), rule=RULE),
    "put series, keep another rule": partial(put, conflict=Conflict.keep(), rule=OTHER_RULE),
    "put series, late is dead": partial(put, rule=RULE, late=Late.dead_letter("5s")),
}
CHANGES: dict[str, Step] = {
    "cancel": cancel,
    "cancel the revision": partial(cancel, revision=0),
    "cancel the revision and due time": partial(cancel, revision=0, due=0),
    "cancel another due time": partial(cancel, revision=0, due=1),
    "cancel another revision": partial(cancel, revision=1),
    "reschedule now": partial(reschedule, due=NOW),
    "reschedule far": partial(reschedule, due=FAR),
    "reschedule to the occurrence": to_occurrence,
    "fire": lambda play: Action(Fire(play.op(), play.id)),
    "cancel the occurrence": partial(beside, kind="cancel"),
    "fire the occurrence": partial(beside, kind="fire"),
    "reschedule the occurrence": partial(beside, kind="reschedule"),
    "repeat the last command": partial(repeat, at=-1),
    "repeat the first command": partial(repeat, at=0),
}
CLAIMS: dict[str, Step] = {
    "claim": lambda play: Action(Claims()),
    "done": partial(settle, at=-1, kind="done"),
    "done, then": partial(settle, at=-1, kind="done", then=FAR_MS),
    "done, then now": partial(then_now, kind="done"),
    "again": partial(settle, at=-1, kind="again"),
    "again far": partial(settle, at=-1, kind="again", far=True),
    "again, then": partial(settle, at=-1, kind="again", then=FAR_MS),
    "again, then now": partial(then_now, kind="again"),
    "again, traced": partial(settle, at=-1, kind="traced"),
    "release": partial(settle, at=-1, kind="release"),
    "dead": partial(settle, at=-1, kind="dead"),
    "dead, then": partial(settle, at=-1, kind="told", then=FAR_MS),
    "first done": partial(settle, at=0, kind="done"),
    "first again, then": partial(settle, at=0, kind="again", then=FAR_MS),
    "first dead": partial(settle, at=0, kind="told"),
    "done with another token": partial(settle, at=-1, kind="done", off=OFF),
    "renew": partial(renew, at=-1),
    "renew first": partial(renew, at=0),
    "renew with another token": partial(renew, at=-1, off=OFF),
    "renew, the trial is over": partial(renew, at=-1, ends_trial=True),
}
UNTIDIED = "leases end, untidied"
LEAPS = ("leases end", UNTIDIED)
OTHERS: dict[str, Step] = {
    "leases end": lambda play: Action(Leap(is_tidied=True)),
    UNTIDIED: lambda play: Action(Leap(is_tidied=False)),
    "redrive": redrive,
    "redrive oldest": partial(redrive, oldest=True),
    "purge": purge,
    "put back": put_back,
    "put back, low": partial(put_back, version=LOW),
    "put back dead": partial(put_back, dead=True),
    "put back the occurrence": partial(put_back, beside=True),
}
STEPS: dict[str, Step] = PUTS | CHANGES | CLAIMS | OTHERS

"""The shortest evidence of a violation: the fewest calls and runs of the messages concerned that still show it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from aiodelay.core.transitions import base_id

from . import events as h
from .story import Story

__all__ = ["Group", "lines_of", "shortest"]

Group: TypeAlias = list[h.Event]
"""The events of one call, one run or one process that are shown together or not at all."""


def shortest(
    events: Sequence[h.Event], ids: Collection[str], is_shown: Callable[[list[h.Event]], bool]
) -> list[h.Event]:
    """Return the fewest events that still show a violation, in order.

    Args:
        events: The whole history.
        ids: The messages concerned.
        is_shown: Returns whether some events show the violation.
    """
    groups = _groups(events, frozenset(ids))
    claims = _claims_of_runs(groups)
    size = len(groups)
    while size:
        i = 0
        while i < len(groups):
            fewer = groups[:i] + groups[i + size :]
            if _runs_have_claims(fewer, claims) and is_shown(_in_order(fewer)):
                groups = fewer
            else:
                i += size
        size //= 2
    return _in_order(groups)


def _in_order(groups: list[Group]) -> list[h.Event]:
    return sorted((event for group in groups for event in group), key=lambda event: event.at_ns)


def _groups(events: Sequence[h.Event], ids: frozenset[str]) -> list[Group]:
    """Return the groups with the events of these messages and of the processes, without what concerns others."""
    groups: dict[object, Group] = defaultdict(list)
    calls: dict[tuple[str, int], h.Event] = {}
    for event in events:
        match event:
            case h.Invoked() | h.Claiming() | h.Settling() | h.Renewing():
                calls[event.process, event.call] = event
            case h.Returned() if groups.get((event.process, event.call)):  # a repeated command is answered again
                groups[event.process, event.call].append(event)
            case h.Returned() | h.Claimed() | h.Settled() | h.Renewed():
                asked = calls.pop((event.process, event.call), None)
                groups[event.process, event.call] += [] if asked is None else _call(asked, event, ids)
            case h.RunStarted() | h.RunEnded():
                if base_id(event.delivery_id.rsplit("/", 2)[0]) in ids:
                    groups[event.process, event.delivery_id, event.attempt, event.token].append(event)
            case h.PuttingBack():
                batch = [each for each in event.batch if base_id(each[0]) in ids]
                groups[event.process, event.at_ns] += [replace(event, batch=batch)] if batch else []
            case h.Process():
                is_scheduler = event.what in ("opened", "closed")
                groups[event.process, "scheduler" if is_scheduler else event.at_ns].append(event)
            case h.Resources():
                groups[event.process, "resources"].append(event)
            case h.Final():
                groups["final"].append(_final(event, ids))
            case _:
                groups[event.process, event.at_ns].append(event)
    for key, asked in calls.items():
        groups[key] += _call(asked, None, ids)
    return sorted(filter(None, groups.values()), key=lambda group: group[0].at_ns)


def _call(asked: h.Event, answer: h.Event | None, ids: frozenset[str]) -> Group:
    """Return the two events of a call, without the messages that are not concerned; empty if none is."""
    ends = [] if answer is None else [answer]
    match asked, answer:
        case h.Invoked(), _:
            return [asked, *ends] if base_id(asked.id) in ids else []
        case h.Claiming(), h.Claimed():
            notes = [note for note in answer.claims if base_id(note.id) in ids]
            return [asked, replace(answer, claims=notes)] if notes else []
        case ((h.Settling() | h.Renewing()), _):
            kept = [i for i, message_id in enumerate(_ids_of(asked)) if base_id(message_id) in ids]
            if not kept:
                return []
            if isinstance(answer, h.Settled | h.Renewed):
                ends = [replace(answer, outcomes=[answer.outcomes[i] for i in kept])]
            return [replace(asked, batch=[asked.batch[i] for i in kept]), *ends]
    return []


def _ids_of(asked: h.Settling | h.Renewing) -> list[str]:
    if isinstance(asked, h.Settling):
        return [note.id for note in asked.batch]
    return [message_id for message_id, _, _ in asked.batch]


def _final(event: h.Final, ids: frozenset[str]) -> h.Final:
    pending = [note for note in event.pending if base_id(note.id) in ids]
    dead = [letter for letter in event.dead if base_id(letter[0]) in ids]
    return replace(event, pending=pending, dead=dead, leases=0 if ids else event.leases)


def _claims_of_runs(groups: list[Group]) -> dict[int, int]:
    """Return, for each group of a run, the group of its claim. Groups are named by `id`."""
    story = Story(_in_order(groups))
    owners = {id(event): id(group) for group in groups for event in group}
    calls = {
        (event.process, event.call): id(group) for group in groups for event in group if isinstance(event, h.Claimed)
    }
    return {
        owners[id(attempt.start)]: calls[attempt.lease.process, attempt.lease.call]
        for attempt in story.attempts
        if attempt.lease is not None
    }


def _runs_have_claims(groups: list[Group], claims: dict[int, int]) -> bool:
    kept = set(map(id, groups))
    return all(claims[run] in kept for run in kept & claims.keys())


# --- as text ----------------------------------------------------------------------------------------------


def lines_of(events: Sequence[h.Event]) -> Iterator[str]:
    """Yield a line for each event: the time since the first event, the process, and what happened."""
    if not events:
        return
    begins_ns = events[0].at_ns
    width = max(len(event.process) for event in events)
    for event in events:
        for text in _texts(event):
            yield f"{(event.at_ns - begins_ns) / 1e6:>10.1f} ms  {event.process:<{width}}  {text}"


def _texts(event: h.Event) -> Iterator[str]:  # noqa: PLR0912 - one case per event
    match event:
        case h.Invoked():
            due = "" if event.at_ms is None else f", {_when(event.at_ms, event)}"
            yield f"asks to {event.op} {event.id}{due}"
        case h.Returned():
            known = f", revision {event.revision}, {_when(event.due_ms, event)}" if event.revision else ""
            yield f"is answered: {event.answer or event.outcome}{known}"
        case h.Claiming():
            yield "asks for messages"
        case h.Claimed():
            for note in event.claims:
                lapses = f", lapsed {note.lapses} times" if note.lapses else ""
                yield f"claims {note.id} revision {note.revision}, {_when(note.due_ms, event)}{lapses}"
        case h.RunStarted():
            yield f"begins attempt {event.attempt} at {event.delivery_id}"
        case h.RunEnded():
            yield f"ends attempt {event.attempt} at {event.delivery_id}: {event.result}"
        case h.Settling():
            yield from (f"asks to settle {note.id} revision {note.revision} as {note.kind}" for note in event.batch)
        case h.Settled() | h.Renewed():
            yield f"is answered: {', '.join(event.outcomes)}"
        case h.Renewing():
            yield from (f"asks to renew the lease of {message_id}" for message_id, _, _ in event.batch)
        case h.PuttingBack():
            yield from (f"puts {message_id} revision {revision} back" for message_id, revision in event.batch)
        case h.Process():
            yield f"the process is {event.what}" + (f" with code {event.code}" if event.what == "ended" else "")
        case h.Blocked():
            yield "its event loop is blocked"
        case h.Moved():
            yield f"the store moves {event.messages} messages of {event.lane}"
        case h.Loss():
            yield "a server takes over that lacks the last writes"
        case h.Resources():
            yield f"{event.phase}: {event.tasks} tasks, {event.threads} threads, {event.files} files"
        case h.Final():
            yield f"in the end the store holds: {_held(event)}"


def _held(event: h.Final) -> str:
    held = [f"{note.id} revision {note.revision} ({note.state})" for note in event.pending]
    held += [f"{message_id} revision {revision} (dead letter: {reason})" for message_id, revision, reason in event.dead]
    held += [f"{event.leases} leases"] if event.leases else []
    return ", ".join(held) or "none of these messages"


def _when(due_ms: int, event: h.Event) -> str:
    left_ms = due_ms - event.wall_ms
    return f"due in {left_ms} ms" if left_ms >= 0 else f"due {-left_ms} ms ago"

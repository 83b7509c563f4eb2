"""Decisions about a put whose id may already be stored: the rules of `Conflict`, as pure functions.

docs/guarantees.md, "The same id again", has the table of these cases.

The version of a throttled message is the beginning of its window, in the store's time. So a store that remembers the
version of an ended message remembers the window too.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec.structs import replace

from .values import Conflict, ConflictMode, Record, Refused

__all__ = ["FOR_ONE_RUN", "VERSIONED", "Verdict", "known_version", "outdated", "put_verdict", "timed"]

Verdict: TypeAlias = Literal["stored", "replaced", "kept", "in_flight"]
"""How a put ends that is not refused."""

VERSIONED = frozenset({"newer", "throttle", "throttle_last"})
"""The modes that depend on the versions of messages that have ended."""
FOR_ONE_RUN = frozenset({"earlier", "later", "debounce", "throttle", "throttle_last", "append"})
"""The modes that a recurring message cannot have, because they are about the due time or the payload of one run."""


def put_verdict(
    conflict: Conflict,
    rule: object,
    current: Record | None,
    *,
    in_flight: bool,
    ended_version: int | None,
    due_ms: int,
    now_ms: int,
) -> Verdict | Refused:
    """Return how a put ends when its id may already be stored, or why it is refused.

    `kept` without a stored message: the window of an ended message is not over.

    Args:
        conflict: The put's conflict mode.
        rule: The put's recurrence rule, encoded; None if the message does not recur.
        current: The record that is stored under this id, or None.
        in_flight: Whether that record is leased.
        ended_version: The highest version of the messages that ended or were replaced under this id; None if the store
            remembers none.
        due_ms: The due time that the put asks for, epoch ms.
        now_ms: The store's time, epoch ms.
    """
    known = known_version(current, ended_version)
    refused = _refused(conflict, current, known)
    if refused is not None:
        return refused
    is_kept = conflict.mode == "throttle" and _is_within(conflict, known, now_ms)
    if current is not None and not is_kept:
        is_kept = _stays(conflict.mode, rule, current, in_flight=in_flight, due_ms=due_ms)
    if is_kept:
        return "in_flight" if in_flight else "kept"
    return "stored" if current is None else "replaced"


def _refused(conflict: Conflict, current: Record | None, known: int | None) -> Refused | None:
    match conflict.mode:
        case "newer" if conflict.version is not None and known is not None and conflict.version <= known:
            return outdated(conflict, *_standing(current), known)
        case "if_revision" if current is None or current.revision != conflict.revision or current.appended is not None:
            return outdated(conflict, *_standing(current))
        case "error" if current is not None:
            return Refused("duplicate")
    return None


def _stays(mode: ConflictMode, rule: object, current: Record, *, in_flight: bool, due_ms: int) -> bool:
    """Return whether the stored message stays because of the mode and the new message's rule or due time."""
    standing = current.envelope.rule
    match mode:
        case "keep":
            return rule is None or standing is None or standing == rule
        case "earlier":
            return not in_flight and due_ms >= current.due_ms
        case "later":
            return not in_flight and due_ms <= current.due_ms
    return False


def timed(
    conflict: Conflict,
    record: Record,
    current: Record | None,
    *,
    in_flight: bool,
    ended_version: int | None,
    now_ms: int,
) -> Record:
    """Return the record that a put writes, with the due time that the modes `debounce` and `throttle` give it.

    Args:
        conflict: The put's conflict mode.
        record: The record with the due time that the put asks for.
        current: The record that the new record replaces, or None.
        in_flight: Whether that record is leased.
        ended_version: As for `put_verdict`.
        now_ms: The store's time, epoch ms.
    """
    waiting = None if current is None or in_flight or current.attempt or current.lapses else current
    if conflict.mode == "debounce":
        begun = None if waiting is None else waiting.debounced_ms
        since_ms = now_ms if begun is None else min(begun, now_ms)  # the clock may have stepped back
        due_ms = now_ms + (conflict.quiet_ms or 0)
        if conflict.max_wait_ms is not None:
            due_ms = min(due_ms, since_ms + conflict.max_wait_ms)
        return replace(_due_at(record, due_ms), debounced_ms=since_ms)
    if conflict.window_ms is None:
        return record
    known = known_version(current, ended_version)
    if known is None or not _is_within(conflict, known, now_ms):
        return _with_version(record, now_ms)
    if waiting is not None:
        return _with_version(_due_at(record, waiting.due_ms), known)
    next_window_ms = known if known > now_ms else known + conflict.window_ms
    return _with_version(_due_at(record, next_window_ms), next_window_ms)


def known_version(current: Record | None, ended_version: int | None) -> int | None:
    """Return the highest version of the stored message and of the ended messages of an id; None if none has one."""
    stored_version = None if current is None else current.envelope.version
    return max((each for each in (stored_version, ended_version) if each is not None), default=None)


def _is_within(conflict: Conflict, known: int | None, now_ms: int) -> bool:
    """Return whether the window that began at `known` is not over.

    The window of the last message of a window begins at the end of that window, so it may begin after `now_ms`. A
    version that lies further ahead is no beginning of a window, or the clock has stepped back.
    """
    window_ms = conflict.window_ms or 0
    return known is not None and -window_ms <= now_ms - known < window_ms


def _due_at(record: Record, due_ms: int) -> Record:
    expires_ms = record.expires_ms - record.due_ms + due_ms if record.late else 0
    return replace(record, due_ms=due_ms, expires_ms=expires_ms)


def _with_version(record: Record, version: int) -> Record:
    return replace(record, envelope=replace(record.envelope, version=version))


def _standing(current: Record | None) -> tuple[int, int]:
    return (0, 0) if current is None else (current.revision, current.due_ms)


def outdated(conflict: Conflict | None, revision: int, due_ms: int, known_version: int | None = None) -> Refused:
    """Return the refusal of a command that names another revision or version than the stored one.

    Args:
        conflict: The conflict of the refused put; None for a refused cancel.
        revision: The revision of the stored message, or 0.
        due_ms: The due time of the stored message, in ms since 1970, or 0.
        known_version: For a conflict by version: the highest known version of the id.
    """
    if conflict is None:
        why = "another is meant"
    elif conflict.mode == "newer":
        why = f"version {conflict.version} is not newer than {known_version}"
    else:
        why = f"not revision {conflict.revision}"
    stands = f"revision {revision}" if revision else "nothing"
    return Refused("outdated", f"{why}; {stands} stands", revision, due_ms)

"""What happens to a record, as functions of values and a time: every store applies the same ones.

Nothing here waits, reads a clock or touches storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from aiodelay.errors import InputError, shortened

from .values import (
    EARLIER_ERRORS,
    MAX_CLAIM_MESSAGES,
    MAX_LEASE_MS,
    After,
    Again,
    At,
    Cancel,
    Conflict,
    Dead,
    LateAction,
    Put,
    PutBack,
    Record,
    Refused,
    Settlement,
    Stored,
)

__all__ = [
    "DEAD_LEASES",
    "KILLS_TO_DEATH",
    "NO_OP",
    "RIGHTING_MS",
    "SILENT_LEASES",
    "SUSPECT_LAPSES",
    "TRIAL_MS",
    "Trials",
    "after_failure",
    "after_lapse",
    "after_trial",
    "ahead_since",
    "as_occurrence",
    "base_id",
    "cancel_refused",
    "delivery_id",
    "due_of",
    "ends_by_itself",
    "fired",
    "first_answer",
    "has_died",
    "is_killer",
    "is_late",
    "is_lease_over",
    "is_lease_too_long",
    "is_release",
    "is_silent",
    "is_suspect",
    "joined",
    "loads_of",
    "moved",
    "next_revision",
    "occurrence_id",
    "occurrence_of",
    "outdated",
    "put_due_of",
    "put_verdict",
    "rearmed",
    "record_of",
    "redriven",
    "retry_place",
    "returned",
    "token_counter",
    "token_deadline_ms",
    "token_for",
    "tokens_held",
    "trial_ms",
]

SUSPECT_LAPSES = 2
"""From this many lapses on, a message is claimed in trials only."""
TRIAL_MS, LONGEST_TRIAL_MS = 1_000, 60_000
"""How long a suspect's first trial lasts, and the longest one."""
KILLS_TO_DEATH = 3
"""A message is given up as `killed_worker` once this many processes ended while they tried it alone."""
SILENT_LEASES, DEAD_LEASES = 4, 2
"""How many leases a process must be silent before others may take a suspect from it, and before it counts as ended.

The first is about its messages about that suspect, a minute with leases of 15 s; the second about any sign of life.
"""
NO_OP = bytes(8)
"""The op of what no command wrote (a retried occurrence, a redriven dead letter), or one that is not remembered."""
RIGHTING_MS = MAX_LEASE_MS // 3
"""For so long after a step back of the clock, holders may set their leases right: the longest renewal interval."""
TOKEN_EPOCH_MS = 1_735_689_600_000
"""2025-01-01T00:00:00Z. Token = (deadline - epoch) * 4096 + counter: exact in a double until 2094."""
_COUNTERS = 4096
_DUE_DIGITS = 10  # at least: a shorter number after `~` may end an id that a caller chose


def token_for(deadline_ms: int, counter: int) -> int:
    """Return the token of a lease that ends at `deadline_ms`; `counter` keeps tokens of one instant apart."""
    return (deadline_ms - TOKEN_EPOCH_MS) * _COUNTERS + counter % _COUNTERS


def token_deadline_ms(token: int) -> int:
    """Return when the token's lease ends."""
    return token // _COUNTERS + TOKEN_EPOCH_MS


def token_counter(token: int) -> int:
    """Return the counter that a renewal keeps."""
    return token % _COUNTERS


def is_lease_over(token: int, now_ms: int) -> bool:
    """Say whether the lease has ended."""
    return token_deadline_ms(token) <= now_ms


def is_lease_too_long(token: int, now_ms: int) -> bool:
    """Say whether the token's lease ends further ahead than any may: the clock has stepped back since."""
    return token_deadline_ms(token) > now_ms + MAX_LEASE_MS


def tokens_held(now_ms: int) -> tuple[int, int]:
    """Return the first token of a lease that is not over, and the first of one that is too long."""
    return token_for(now_ms + 1, 0), token_for(now_ms + MAX_LEASE_MS + 1, 0)


def ahead_since(since_ms: int, now_ms: int) -> int:
    """Return since when leases that are too long have been seen.

    From `RIGHTING_MS` after that time on they are over: a holder that lives has renewed its lease meanwhile, which sets
    its end by the new time.

    Args:
        since_ms: What this function returned when such a lease was seen last, 0 = never. A time that is ahead, or past
            by more than two times `RIGHTING_MS`, is of another step of the clock.
        now_ms: The store's time; such a lease is there now.
    """
    return since_ms if since_ms <= now_ms <= since_ms + 2 * RIGHTING_MS else now_ms


def occurrence_id(series: str, due_ms: int) -> str:
    """Return the id under which a series' occurrence is retried beside the series."""
    return f"{series}~{due_ms:0{_DUE_DIGITS}}"


def base_id(message_id: str) -> str:
    """Return the id that the caller chose: of an occurrence, its series'."""
    found = occurrence_of(message_id)
    return message_id if found is None else found[0]


def occurrence_of(message_id: str) -> tuple[str, int] | None:
    """Return (series, due) of an occurrence's id, None for any other id."""
    if "~" not in message_id:  # nearly all, and ten times as fast as the pattern
        return None
    series, tilde, due = message_id.rpartition("~")
    if tilde and len(due) >= _DUE_DIGITS and due.isascii() and due.isdigit():
        return series, int(due)
    return None


def delivery_id(record: Record) -> str:
    """Return what consumers de-duplicate by: the same for every attempt at one occurrence of one revision.

    An occurrence is told by the due time in its id: redriven, it is due at another, which others may share. Any other
    message is told by the due time of its put, also once it was moved.
    """
    message_id, due_ms = occurrence_of(record.envelope.id) or (record.envelope.id, _put_due_ms(record))
    return f"{message_id}/{record.revision}/{due_ms}"


def put_due_of(given: str, due_ms: int) -> int | None:
    """Return the `put_due_ms` of a message that has this delivery id and is due then."""
    written = given.rpartition("/")[2]
    put_due_ms = int(written) if written.isascii() and written.isdigit() else due_ms
    return None if put_due_ms == due_ms else put_due_ms


def _put_due_ms(record: Record) -> int:
    return record.due_ms if record.put_due_ms is None else record.put_due_ms


def next_revision(now_ms: int, last: int | None) -> int:
    """Return a revision above `last`, the newest one known of this id."""
    return now_ms if last is None or last < now_ms else last + 1


def due_of(due: At | After, now_ms: int) -> int:
    """Return the due time as epoch ms: what is past stays past, so that `Late` can judge it, but not before 1970."""
    return now_ms + due.ms if isinstance(due, After) else max(due.ms, 0)


def first_answer(record: Record) -> Stored:
    """Return what the put that made this record was answered, as long as nothing has moved it since."""
    return Stored("stored", record.revision, record.due_ms)


def record_of(put: Put, due_ms: int, revision: int) -> Record:
    """Return the record that a put writes."""
    late = put.late
    return Record(
        put.envelope,
        revision,
        due_ms,
        put.op,
        due_ms + late.after_ms if late.action else 0,
        late.action,
    )


def loads_of(puts: Sequence[Put]) -> list[Put]:
    """Return the puts of a bulk load, guarded by their versions alone.

    Raises:
        InputError: A put is of another kind.
    """
    for put in puts:
        version = put.conflict.version
        if put.conflict.mode != "newer" or version is None or put.envelope.version != version:
            given = f"{put.conflict.mode}, version {put.envelope.version}"
            raise InputError(f"conflict of {shortened(put.id)}", given, "Conflict.newer(version), and that version")
    return [put if put.op is NO_OP else replace(put, op=NO_OP) for put in puts]


def put_verdict(
    conflict: Conflict,
    rule: object,
    current: Record | None,
    *,
    in_flight: bool,
    ended_version: int | None,
) -> Literal["stored", "replaced", "kept", "in_flight"] | Refused:
    """Decide the row "the same id again" of docs/guarantees.md for a put.

    Args:
        conflict: The put's.
        rule: The put's recurrence rule, encoded.
        current: The record stored under this id now.
        in_flight: Whether that one is leased.
        ended_version: The version of the id's tombstone, if a message that carried one has ended or was replaced.
    """
    if conflict.mode == "newer" and conflict.version is not None:
        stored_version = None if current is None else current.envelope.version
        known = max((v for v in (stored_version, ended_version) if v is not None), default=-1)
        if conflict.version <= known:
            return outdated(conflict, *_standing(current), known)
    if conflict.mode == "if_revision" and (current is None or current.revision != conflict.revision):
        return outdated(conflict, *_standing(current))
    if current is None:
        return "stored"
    if conflict.mode == "error":
        return Refused("duplicate")
    standing = current.envelope.rule
    if conflict.mode == "keep" and (rule is None or standing is None or standing == rule):
        return "in_flight" if in_flight else "kept"
    return "replaced"


def cancel_refused(cancel: Cancel, current: Record | None) -> Refused | None:
    """Return why a message may not be cancelled: it is not there, or not the one that is meant; None if it may."""
    if current is None:
        return Refused("not_found")
    if cancel.only in (None, (current.revision, current.due_ms), (current.revision, None)):
        return None
    return outdated(None, current.revision, current.due_ms)


def _standing(current: Record | None) -> tuple[int, int]:
    return (0, 0) if current is None else (current.revision, current.due_ms)


def outdated(conflict: Conflict | None, revision: int, due_ms: int, known_version: int | None = None) -> Refused:
    """Return the refusal of a command that names another revision or version than the one that stands.

    Args:
        conflict: The refused put's; None refuses a cancel.
        revision: The revision of the message that stands; 0 where none does.
        due_ms: The due time of the message that stands, in ms since 1970; 0 where none does.
        known_version: The highest version known of the id, of a conflict by version.
    """
    if conflict is None:
        why = "another is meant"
    elif conflict.mode == "newer":
        why = f"version {conflict.version} is not newer than {known_version}"
    else:
        why = f"not revision {conflict.revision}"
    stands = f"revision {revision}" if revision else "nothing"
    return Refused("outdated", f"{why}; {stands} stands", revision, due_ms)


def moved(record: Record, due_ms: int) -> Record:
    """Return the record with its due time moved, and the time from which it is late with it.

    A series' occurrences are told apart by their due times: one that is still being retried is stepped over. Any other
    message keeps the due time of its put for its delivery id.
    """
    while due_ms in record.live:
        due_ms += 1
    expires_ms = record.expires_ms - record.due_ms + due_ms if record.expires_ms else 0
    put_due_ms = _put_due_ms(record) if record.envelope.rule is None else None
    return replace(record, due_ms=due_ms, expires_ms=expires_ms, put_due_ms=put_due_ms)


def fired(record: Record, now_ms: int) -> Record:
    """Return the record due now; the due time of one that is overdue or waits for a retry stays what it was."""
    return record if record.due_ms <= now_ms else moved(record, now_ms)


def is_suspect(record: Record) -> bool:
    """Say whether the message may be what ends the processes that take it, so that it is claimed in trials only."""
    return record.lapses >= SUSPECT_LAPSES


def trial_ms(record: Record) -> int:
    """Return how long a suspect's trial lasts: twice as long after each lapse that followed a trial it came through."""
    return min(TRIAL_MS << min(record.lapses - SUSPECT_LAPSES, 6), LONGEST_TRIAL_MS)


class Trials(Struct, frozen=True):
    """How the search for killers among suspects stands, which are tried in the order of their lane.

    Attributes:
        tried: Size of the last group, 0 once it is known to have ended its process.
        hot: How many suspects, the first of their lanes when that group was taken, hold at least one killer.
        suspected_ms: When a message last became a suspect.
        killed_ms: When the process of the last kill was last heard of.
    """

    tried: int = 0
    hot: int = 0
    suspected_ms: int = 0
    killed_ms: int = 0

    @property
    def most(self) -> int:
        """Largest size of the next group: half of `hot` less the last group, or all if that is none."""
        hot = self._hot_left()
        return (hot + 1) // 2 if hot else MAX_CLAIM_MESSAGES

    def begun(self, size: int) -> Trials:
        """Return how the search stands once a trial of `size` suspects has begun, none of which has a kill yet."""
        return replace(self, tried=size, hot=self._hot_left())

    def died(self, left: int) -> Trials:
        """Return how it stands after a lapse in a trial of a group, `left` of which were still held."""
        return replace(self, tried=0, hot=left) if self.tried else self

    def lapsed(self, before: Record, after: Record, *, beat_ms: int, now_ms: int) -> Trials:
        """Return how it stands after a message lapsed whose process was last heard of at `beat_ms`."""
        if is_suspect(after) and not is_suspect(before):
            return replace(self, suspected_ms=now_ms)
        return replace(self, killed_ms=beat_ms) if after.kills > before.kills else self

    def kills_of(self, suspect: Record) -> int:
        """Return how many kills a suspect has at the beginning of a trial.

        None, if another message became a suspect after the last process ended: that message ran beside the suspect, or
        may have, and may have ended the process.
        """
        return 0 if self.suspected_ms > self.killed_ms else suspect.kills

    def _hot_left(self) -> int:
        """Return `hot` without the group that came through the last trial."""
        return max(self.hot - self.tried, 0)


def is_killer(record: Record) -> bool:
    """Say whether the message has ended enough processes to be given up without another run.

    Of a recurring message the store cannot work out the next occurrence: its claim is given out, and whoever takes it
    settles it as `Dead("killed_worker")` without running it.
    """
    return record.kills >= KILLS_TO_DEATH


def is_silent(heard_ms: int, lease_ms: int, now_ms: int) -> bool:
    """Say whether another process may take a suspect whose holder last confirmed it at `heard_ms`.

    A time as far ahead was written before a step back of the clock.
    """
    return abs(now_ms - heard_ms) >= SILENT_LEASES * lease_ms


def has_died(seen_ms: int, lease_ms: int, now_ms: int) -> bool:
    """Say whether a process that is silent has ended; a process that lives is heard of at its housekeeping, too."""
    return abs(now_ms - seen_ms) >= DEAD_LEASES * lease_ms


def after_lapse(record: Record, *, is_tried: bool, has_died: bool) -> Record | Literal["killed_worker"]:
    """Return the record after its lease ended unsettled, or the reason to give it up.

    A recurring message is never given up here (`is_killer`), and neither is a cancelled one, which its store drops.

    Args:
        record: As it was claimed.
        is_tried: Its trial was not over. Such a lapse says nothing of a member of a group: half of the group is next.
        has_died: The process that had claimed it has ended. A store need know this only of a message claimed alone.
    """
    kills = min(record.kills + 1, 255) if record.alone and has_died else record.kills
    lapses = record.lapses if is_tried else min(record.lapses + 1, 255)
    lapsed = replace(record, lapses=lapses, kills=kills, alone=False)
    if is_killer(lapsed) and record.envelope.rule is None and not record.no_retry:
        return "killed_worker"
    return lapsed


def after_trial(record: Record) -> Record:
    """Return the record of a suspect that came through its trial; its lapses count on until it is settled."""
    return replace(record, alone=False) if record.alone else record


def is_late(record: Record, now_ms: int) -> bool:
    """Say whether the record's `Late` policy applies to a claim now."""
    return record.late is not LateAction.DELIVER and now_ms > record.expires_ms


def ends_by_itself(record: Record, now_ms: int) -> bool:
    """Say whether a store ends the message now because it is late; of a recurring one, the caller settles the claim."""
    return is_late(record, now_ms) and record.envelope.rule is None


def retry_place(record: Record, due_ms: int) -> int:
    """Return when a message settled as `Again` stands next: never before its due time, whatever the clock has done."""
    return max(due_ms, record.due_ms)


def after_failure(record: Record, settlement: Again | Dead) -> Record:
    """Return the record with the attempt that has just ended counted, and its error and trace kept.

    The traceback stands for that attempt alone: the one before is never kept.
    """
    error, envelope = settlement.error, record.envelope
    return replace(
        record,
        envelope=envelope if settlement.trace is None else replace(envelope, trace=settlement.trace),
        attempt=settlement.attempt,
        lapses=0,
        kills=0,
        alone=False,
        first_error=error if record.first_error is None else record.first_error,
        last_error=record.last_error if error is None else error,
        earlier_errors=_earlier_errors(record, error),
        traceback=settlement.traceback if isinstance(settlement, Dead) else None,
    )


def _earlier_errors(record: Record, error: str | None) -> tuple[str, ...]:
    """Return the errors that stand before `error`, the newest; one that repeats the last error adds nothing."""
    last = record.last_error
    if error is None or last is None or error == last:
        return record.earlier_errors
    return (*record.earlier_errors, last)[-EARLIER_ERRORS:]


def is_release(record: Record, settlement: Settlement) -> bool:
    """Say whether a message that a source gave out was never run: it stays what it is, where it came from."""
    return (
        isinstance(settlement, Again)
        and settlement.error is None
        and settlement.attempt == record.attempt
        and settlement.due_ms <= record.due_ms
    )


def returned(record: Record, settlement: Again | Dead) -> PutBack:
    """Return a message that a source gave out as it goes back to a store after an attempt."""
    failed = after_failure(record, settlement)
    if isinstance(settlement, Dead):
        return PutBack(failed, failed.due_ms, settlement.reason)
    return PutBack(failed, settlement.due_ms)


def joined(series: Record, due_ms: int) -> Record:
    """Return a series' record with the occurrence of that due time among those that go on beside it."""
    return replace(series, live=(*series.live, due_ms))


def rearmed(record: Record, due_ms: int, *, retrying: bool) -> Record:
    """Return a series' record at its next occurrence; `retrying`: the occurrence just run goes on beside it."""
    series = joined(record, record.due_ms) if retrying else record
    return replace(
        moved(series, due_ms),
        attempt=0,
        lapses=0,
        kills=0,
        alone=False,
        first_error=None,
        last_error=None,
        earlier_errors=(),
    )


def as_occurrence(record: Record) -> Record:
    """Return a series' current occurrence as a record of its own, to be retried or kept as a dead letter."""
    envelope = replace(record.envelope, id=occurrence_id(record.envelope.id, record.due_ms), rule=None)
    return replace(record, envelope=envelope, op=NO_OP, live=())


def redriven(record: Record, op: bytes, revision: int, now_ms: int) -> Record:
    """Return a dead letter's record as a new life, due now; errors and attempts start again."""
    return Record(
        record.envelope,
        revision,
        now_ms,
        op,
        record.expires_ms - record.due_ms + now_ms if record.expires_ms else 0,
        record.late,
    )

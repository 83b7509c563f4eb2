"""Decisions about one record, as pure functions of values and a time. All stores apply the same decisions.

Nothing here waits, reads a clock or touches storage. Some words:

- A *lapse* of a message is a lease that ended unsettled. After `SUSPECT_LAPSES` lapses, the message is a *suspect*.
- A *trial* is a claim of suspects only, to find a *killer*: a message that ends the processes that take it.
- A *kill* is a process that ended while it tried one suspect alone. The suspect counts its kills.
- The *place* of a message is the time of its next attempt, epoch ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from aiodelay.errors import InputError, shortened

from .conflicts import outdated
from .values import (
    EARLIER_ERRORS,
    MAX_CLAIM_MESSAGES,
    MAX_LEASE_MS,
    After,
    Again,
    At,
    Cancel,
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
    "put_due_of",
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
"""A message with this many lapses is a suspect: it is claimed in trials only."""
TRIAL_MS, LONGEST_TRIAL_MS = 1_000, 60_000
"""The length of a suspect's first trial, and of the longest trial."""
KILLS_TO_DEATH = 3
"""A message is given up as `killed_worker` once this many processes ended while they tried it alone."""
SILENT_LEASES, DEAD_LEASES = 4, 2
"""Limits for the silence of a process, as numbers of leases.

If a process has not confirmed a suspect for `SILENT_LEASES` leases (a minute with leases of 15 s), other processes may
take the suspect. If it has given no sign of life for `DEAD_LEASES` leases, it counts as ended.
"""
NO_OP = bytes(8)
_DELIVER = LateAction.DELIVER  # each look-up in the enum takes as long as a call
"""The op of a record that no command wrote (a retried occurrence, a redriven dead letter), or whose op is not kept."""
RIGHTING_MS = MAX_LEASE_MS // 3
"""The time in which holders correct their leases after the clock has stepped back: the longest renewal interval."""
TOKEN_EPOCH_MS = 1_735_689_600_000
"""2025-01-01T00:00:00Z. Token = (deadline - epoch) * 4096 + counter: exact in a double until 2094."""
_COUNTERS = 4096
_DUE_DIGITS = 10  # at least this many digits: an id that a caller chose may end in `~` and fewer digits
_MOST_DUE_DIGITS = 15  # of 48 bits


def token_for(deadline_ms: int, counter: int) -> int:
    """Return the token of a lease that ends at `deadline_ms`. `counter` distinguishes tokens of one instant."""
    return (deadline_ms - TOKEN_EPOCH_MS) * _COUNTERS + counter % _COUNTERS


def token_deadline_ms(token: int) -> int:
    """Return when the token's lease ends, epoch ms."""
    return token // _COUNTERS + TOKEN_EPOCH_MS


def token_counter(token: int) -> int:
    """Return the counter in a token. A renewal gives the claim a new token with the same counter."""
    return token % _COUNTERS


def is_lease_over(token: int, now_ms: int) -> bool:
    """Return whether the lease has ended."""
    return token_deadline_ms(token) <= now_ms


def is_lease_too_long(token: int, now_ms: int) -> bool:
    """Return whether a lease ends too far ahead, because the clock has stepped back since the claim."""
    return token_deadline_ms(token) > now_ms + MAX_LEASE_MS


def tokens_held(now_ms: int) -> tuple[int, int]:
    """Return the smallest tokens of two kinds of leases: those that are not over, and those that end too far ahead."""
    return token_for(now_ms + 1, 0), token_for(now_ms + MAX_LEASE_MS + 1, 0)


def ahead_since(since_ms: int, now_ms: int) -> int:
    """Return since when a store has seen leases that end too far ahead after a step back of its clock, in epoch ms.

    A store calls this function when it sees such a lease. `RIGHTING_MS` after the returned time, the store treats these
    leases as ended. By then, each living holder has renewed its lease, and the new end fits the clock.

    Args:
        since_ms: The last result of this function; 0 = there is none. If this time is in the future, or more than twice
            `RIGHTING_MS` ago, it belongs to an earlier step of the clock: the result is then `now_ms`.
        now_ms: The store's time.
    """
    return since_ms if since_ms <= now_ms <= since_ms + 2 * RIGHTING_MS else now_ms


def occurrence_id(series: str, due_ms: int) -> str:
    """Return the id under which an occurrence of a series is retried."""
    return f"{series}~{due_ms:0{_DUE_DIGITS}}"


def base_id(message_id: str) -> str:
    """Return the id that the caller chose; for an occurrence, the id of its series."""
    found = occurrence_of(message_id)
    return message_id if found is None else found[0]


def occurrence_of(message_id: str) -> tuple[str, int] | None:
    """Return (series, due) for the id of an occurrence; None for any other id."""
    if "~" not in message_id:  # true for nearly all ids, and ten times as fast as `rpartition`
        return None
    series, tilde, due = message_id.rpartition("~")
    if tilde and len(due) >= _DUE_DIGITS and due.isascii() and due.isdigit():
        return series, int(due)
    return None


def delivery_id(record: Record) -> str:
    """Return the key by which consumers recognise repeated deliveries of one occurrence of one revision.

    The key is the same for every attempt. For an occurrence, the key contains the due time in the occurrence's id,
    because a redrive changes the due time itself. For any other message, the key contains the due time of the put,
    which a later change of the due time does not affect.
    """
    message_id, due_ms = occurrence_of(record.envelope.id) or (record.envelope.id, _put_due_ms(record))
    return f"{message_id}/{record.revision}/{due_ms}"


def put_due_of(given: str, due_ms: int) -> int | None:
    """Return the `put_due_ms` of a message with this delivery id and this due time."""
    written = given.rpartition("/")[2]
    is_time = written.isascii() and written.isdigit() and len(written) <= _MOST_DUE_DIGITS
    put_due_ms = int(written) if is_time else due_ms
    return None if put_due_ms == due_ms else put_due_ms


def _put_due_ms(record: Record) -> int:
    return record.due_ms if record.put_due_ms is None else record.put_due_ms


def next_revision(now_ms: int, last: int | None) -> int:
    """Return a revision above `last`, the newest known revision of this id."""
    return now_ms if last is None or last < now_ms else last + 1


def due_of(due: At | After, now_ms: int) -> int:
    """Return the due time in epoch ms.

    A past time is kept, so that the `Late` policy can apply. A time before 1970 becomes 1970.
    """
    return now_ms + due.ms if isinstance(due, After) else max(due.ms, 0)


def first_answer(record: Record) -> Stored:
    """Return the answer to the put that made this record. The record must still have the due time of that put."""
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
    """Return the puts of a bulk load without ops: only their versions protect against repeats.

    Raises:
        InputError: A put has another conflict mode, or no version.
    """
    for put in puts:
        version = put.conflict.version
        if put.conflict.mode != "newer" or version is None or put.envelope.version != version:
            given = f"{put.conflict.mode} with version {version}, and the message has version {put.envelope.version}"
            raise InputError(f"conflict of {shortened(put.id)}", given, "Conflict.newer(version of the message)")
    return [put if put.op is NO_OP else replace(put, op=NO_OP) for put in puts]


def cancel_refused(cancel: Cancel, current: Record | None) -> Refused | None:
    """Return why a cancel is refused: its message does not exist or is another version. None = it is not refused.

    A message that got items since its claim is another version: the caller may not know the items.
    """
    if current is None:
        return Refused("not_found")
    if cancel.only is None:
        return None
    if current.appended is None and cancel.only in ((current.revision, current.due_ms), (current.revision, None)):
        return None
    return outdated(None, current.revision, current.due_ms)


def moved(record: Record, due_ms: int) -> Record:
    """Return the record with another due time. Its `expires_ms` moves by the same amount.

    Due times distinguish the occurrences of a series. So for a series, the function skips a due time whose occurrence
    is still being retried. Any other record keeps the due time of its put, because the delivery id contains it.
    """
    while due_ms in record.live:
        due_ms += 1
    expires_ms = record.expires_ms - record.due_ms + due_ms if record.expires_ms else 0
    put_due_ms = _put_due_ms(record) if record.envelope.rule is None else None
    return replace(record, due_ms=due_ms, expires_ms=expires_ms, put_due_ms=put_due_ms)


def fired(record: Record, now_ms: int) -> Record:
    """Return the record, due now. A record that is overdue or waits for a retry keeps its due time."""
    return record if record.due_ms <= now_ms else moved(record, now_ms)


def is_suspect(record: Record) -> bool:
    """Return whether the message is a suspect: it may have ended the processes that took it."""
    return record.lapses >= SUSPECT_LAPSES


def trial_ms(record: Record) -> int:
    """Return the length of a suspect's trial in ms. It doubles with each lapse that follows a survived trial."""
    return min(TRIAL_MS << min(record.lapses - SUSPECT_LAPSES, 6), LONGEST_TRIAL_MS)


class Trials(Struct, frozen=True):
    """The state of the search for killers among suspects.

    A trial takes a group of suspects, in the order of their lane. If the process of a trial ends, its group contains a
    killer, and the next trial takes half of the group.

    Attributes:
        tried: The size of the last group; 0 once that group is known to have ended its process.
        hot: When that group was taken, the first `hot` suspects of the lanes contained at least one killer; 0 = no
            killer is known to be among them.
        suspected_ms: When a message last became a suspect, epoch ms.
        killed_ms: The last sign of life of the process that ended in the last kill, epoch ms.
    """

    tried: int = 0
    hot: int = 0
    suspected_ms: int = 0
    killed_ms: int = 0

    @property
    def most(self) -> int:
        """The largest size of the next group: half of the `hot` suspects that are left, or else a full claim."""
        hot = self._hot_left()
        return (hot + 1) // 2 if hot else MAX_CLAIM_MESSAGES

    def begun(self, size: int) -> Trials:
        """Return the state after the trial of a group has begun: `size` suspects, none of which has a kill."""
        return replace(self, tried=size, hot=self._hot_left())

    def died(self, left: int) -> Trials:
        """Return the state after a lapse in the trial of a group. The trial still had `left` suspects."""
        return replace(self, tried=0, hot=left) if self.tried else self

    def lapsed(self, before: Record, after: Record, *, beat_ms: int, now_ms: int) -> Trials:
        """Return the state after the lapse of a message whose process gave its last sign of life at `beat_ms`."""
        if is_suspect(after) and not is_suspect(before):
            return replace(self, suspected_ms=now_ms)
        return replace(self, killed_ms=beat_ms) if after.kills > before.kills else self

    def kills_of(self, suspect: Record) -> int:
        """Return the number of kills with which a suspect begins a trial.

        If another message became a suspect after the last kill, the number is 0. That other message may have run beside
        the suspect, and may have ended the process.
        """
        return 0 if self.suspected_ms > self.killed_ms else suspect.kills

    def _hot_left(self) -> int:
        """Return how many of the `hot` suspects are left after the group that survived the last trial."""
        return max(self.hot - self.tried, 0)


def is_killer(record: Record) -> bool:
    """Return whether the message has ended enough processes to be given up without another run.

    A store cannot compute the next occurrence of a recurring message. So the store gives out the claim, and the worker
    settles it as `Dead("killed_worker")` without a run.
    """
    return record.kills >= KILLS_TO_DEATH


def is_silent(heard_ms: int, lease_ms: int, now_ms: int) -> bool:
    """Return whether another process may take a suspect whose holder last confirmed it at `heard_ms`.

    It may after `SILENT_LEASES` leases without a confirmation. It also may if `heard_ms` is that far in the future: the
    clock has then stepped back.
    """
    return abs(now_ms - heard_ms) >= SILENT_LEASES * lease_ms


def has_died(seen_ms: int, lease_ms: int, now_ms: int) -> bool:
    """Return whether a silent process has ended. Housekeeping of a living process counts as a sign of life."""
    return abs(now_ms - seen_ms) >= DEAD_LEASES * lease_ms


def after_lapse(record: Record, *, is_tried: bool, has_died: bool) -> Record | Literal["killed_worker"]:
    """Return the record after its lease has ended unsettled, or the reason to give the message up.

    This function never gives up a recurring message (see `is_killer`). It never gives up a cancelled message either:
    the store drops a cancelled message.

    Args:
        record: The record as it was claimed.
        is_tried: Whether the lease ended during the message's trial. Then `lapses` does not grow. If a group was tried,
            any of its messages may have caused the lapse, and half of the group is tried next. If the message was tried
            alone and its process has ended, `kills` grows.
        has_died: Whether the process that had claimed the message has ended. Stores need to know this only for a
            message that is tried alone.
    """
    kills = min(record.kills + 1, 255) if record.alone and has_died else record.kills
    lapses = record.lapses if is_tried else min(record.lapses + 1, 255)
    lapsed = replace(record, lapses=lapses, kills=kills, alone=False)
    if is_killer(lapsed) and record.envelope.rule is None and not record.no_retry:
        return "killed_worker"
    return lapsed


def after_trial(record: Record) -> Record:
    """Return the record of a suspect that survived its trial. The suspect keeps its lapses until it is settled."""
    return replace(record, alone=False) if record.alone else record


def is_late(record: Record, now_ms: int) -> bool:
    """Return whether the record's `Late` policy applies to a claim now."""
    return record.late is not _DELIVER and now_ms > record.expires_ms


def ends_by_itself(record: Record, now_ms: int) -> bool:
    """Return whether the store itself ends this late message. If the message recurs, its worker settles it instead."""
    return record.late is not _DELIVER and is_late(record, now_ms) and record.envelope.rule is None


def retry_place(record: Record, due_ms: int) -> int:
    """Return the next place of a message settled as `Again`: not before its due time, even if the clock has stepped."""
    return max(due_ms, record.due_ms)


def after_failure(record: Record, settlement: Again | Dead) -> Record:
    """Return the record with the ended attempt counted, and its error and trace kept.

    After a run, lapses and kills begin at 0 again. A message that is given back without a run keeps them: the run that
    may end the process has not happened. Only a dead letter has a traceback: that of the ended attempt.
    """
    error, envelope = settlement.error, record.envelope
    has_run = not is_release(record, settlement)
    return replace(
        record,
        envelope=envelope if settlement.trace is None else replace(envelope, trace=settlement.trace),
        attempt=settlement.attempt,
        lapses=0 if has_run else record.lapses,
        kills=0 if has_run else record.kills,
        alone=False,
        first_error=error if record.first_error is None else record.first_error,
        last_error=record.last_error if error is None else error,
        earlier_errors=_earlier_errors(record, error),
        traceback=settlement.traceback if isinstance(settlement, Dead) else None,
    )


def _earlier_errors(record: Record, error: str | None) -> tuple[str, ...]:
    """Return the errors that precede `error`, the newest error. If it repeats the last error, the list stays as is."""
    last = record.last_error
    if error is None or last is None or error == last:
        return record.earlier_errors
    return (*record.earlier_errors, last)[-EARLIER_ERRORS:]


def is_release(record: Record, settlement: Settlement) -> bool:
    """Return whether a settlement gives back a message without a run."""
    return (
        isinstance(settlement, Again)
        and settlement.error is None
        and settlement.attempt == record.attempt
        and settlement.due_ms <= record.due_ms
    )


def returned(record: Record, settlement: Again | Dead) -> PutBack:
    """Return a source's message in the form in which it is put into a store after an attempt."""
    failed = after_failure(record, settlement)
    if isinstance(settlement, Dead):
        return PutBack(failed, failed.due_ms, settlement.reason)
    return PutBack(failed, settlement.due_ms)


def joined(series: Record, due_ms: int) -> Record:
    """Return a series' record that lists the occurrence of this due time as being retried."""
    return replace(series, live=(*series.live, due_ms))


def rearmed(record: Record, due_ms: int, *, retrying: bool) -> Record:
    """Return a series' record at its next occurrence.

    Args:
        record: The series' record at the occurrence that just ran.
        due_ms: The due time of the next occurrence, epoch ms.
        retrying: Whether the occurrence that just ran is retried as a message of its own.
    """
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
    """Return a series' current occurrence as a record of its own, for a retry or a dead letter."""
    envelope = replace(record.envelope, id=occurrence_id(record.envelope.id, record.due_ms), rule=None)
    return replace(record, envelope=envelope, op=NO_OP, live=())


def redriven(record: Record, op: bytes, revision: int, now_ms: int) -> Record:
    """Return a dead letter's record as a new message that is due now. Errors and attempts start again."""
    return Record(
        record.envelope,
        revision,
        now_ms,
        op,
        record.expires_ms - record.due_ms + now_ms if record.expires_ms else 0,
        record.late,
    )

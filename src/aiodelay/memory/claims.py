"""What dispatching processes do: claim, settle, renew, tidy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from aiodelay import transitions as t
from aiodelay.model import (
    MAX_CLAIM_BYTES,
    MAX_CLAIM_MESSAGES,
    Again,
    Claim,
    Claimed,
    Dead,
    Demand,
    Done,
    Lane,
    LaneState,
    Record,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    Tidied,
)

from .tables import Tables, Trial, Worker
from .waiting import Entry, Standing

__all__ = ["Claims"]

MAX_MS = 1 << 48
MOST_ASIDE = 2_000
"""Most messages that a claim steps over: suspects that others try, or others among suspects."""


@dataclass(slots=True)
class _Group:
    """What one demand gets of a claim: messages of its lane and of the lane's aliases."""

    lanes: tuple[Lane, ...]
    demand: Demand
    taken: list[Entry] = field(default_factory=list)
    bytes: int = 0

    def take(self, entry: Entry, size: int) -> None:
        self.taken.append(entry)
        self.bytes += size


@dataclass(slots=True)
class _Taking:
    """A claim in the making: of a group of suspects, or of other messages.

    `max_lapses`: Most lapses of a message that it may take, if it does not begin with a suspect.
    `most_tried`: Most suspects that it may take, if it begins with one.
    """

    groups: list[_Group]
    now: int
    max_lapses: int
    most_tried: int
    is_trial: bool = False
    aside: list[Entry] = field(default_factory=list)

    def takes(self, record: Record) -> bool:
        """Say whether a message may join. A suspect that has ended a process alone is tried alone again."""
        if not self.messages:
            self.is_trial = t.is_suspect(record)
            self.most_tried = min(self.most_tried, 1) if record.kills else self.most_tried
        if not self.is_trial:
            return record.lapses <= self.max_lapses and not t.is_suspect(record)
        return t.is_suspect(record) and self.messages < self.most_tried and not (self.messages and record.kills)

    @property
    def messages(self) -> int:
        return sum(len(group.taken) for group in self.groups)

    @property
    def bytes(self) -> int:
        return sum(group.bytes for group in self.groups)


class Claims(Tables):
    """The role of dispatching processes."""

    # --- claims -------------------------------------------------------------------------------------------

    def claim(self, demand: Mapping[Lane, Demand], lease_ms: int, turn: int, worker: Worker) -> Claimed:
        """Lease what is due; `turn` says whose turn it is to be served first."""
        now, number = self.now_ms(), next(self._claims)
        self._return_lapsed(now, MAX_CLAIM_MESSAGES)
        groups = [_Group((lane, *each.aliases), each) for lane, each in demand.items() if each.messages > 0]
        first = turn % len(groups) if groups else 0
        max_lapses = min((each.max_lapses for each in demand.values()), default=0)
        may_try = max_lapses >= t.SUSPECT_LAPSES and not self._is_trying(now)
        most_tried = self._search.most if may_try else 0
        taking = _Taking(groups[first:] + groups[:first], now, max_lapses, most_tried)
        entries = self._take(taking)
        token = t.token_for(now + lease_ms, number)
        if taking.is_trial and entries:
            self._begin_trial(entries, Trial(worker, lease_ms, now))
        claims = [self._lease(entry, token, now) for entry in entries]
        return Claimed(claims, now, self._next_look_ms(taking, demand))

    def _next_look_ms(self, taking: _Taking, demand: Mapping[Lane, Demand]) -> int | None:
        """Return when to look again; messages that were stepped over are looked for once a second, and hide nobody."""
        aside, taking.aside = taking.aside, []
        has_tried = taking.is_trial and taking.messages > 0
        next_ms = None if has_tried else self._next_due_ms(demand)
        for entry in aside:
            self._lanes[entry.record.envelope.lane].add(entry)
        if has_tried:
            return self._next_due_ms(demand)
        return min(next_ms or MAX_MS, taking.now + t.TRIAL_MS) if aside else next_ms

    def _take(self, taking: _Taking) -> Sequence[Entry]:
        """Take every group's equal share first, then what the others left."""
        for parts in (len(taking.groups), 1):
            for group in taking.groups:
                self._fill(group, parts, taking)
        return [entry for group in taking.groups for entry in group.taken]

    def _fill(self, group: _Group, parts: int, taking: _Taking) -> None:
        """Take a group's messages, up to one of `parts` equal shares of a claim."""
        messages, size_taken = taking.messages, taking.bytes
        most = min(group.demand.messages, max(1, MAX_CLAIM_MESSAGES // parts))
        while len(group.taken) < most and messages < MAX_CLAIM_MESSAGES:
            entry = self._first_due(group.lanes, taking.now)
            if entry is None:
                return
            if not taking.takes(entry.record):
                if len(taking.aside) >= MOST_ASIDE or (taking.is_trial and messages == taking.most_tried > 0):
                    return
                self._lanes[entry.record.envelope.lane].take_first()
                taking.aside.append(entry)
                continue
            size = entry.record.envelope.size
            if messages and not _fits(size, size_taken, group, MAX_CLAIM_BYTES // parts):
                return
            self._lanes[entry.record.envelope.lane].take_first()
            group.take(entry, size)
            messages, size_taken = messages + 1, size_taken + size

    def _first_due(self, lanes: Sequence[Lane], now: int) -> Entry | None:
        """Return the first message of these lanes that is due, left where it is; end what is late on the way."""
        found: Entry | None = None
        for lane in lanes:
            while (entry := self._lanes[lane].first()) is not None and entry.place_ms <= now:
                if not t.ends_by_itself(entry.record, now):
                    found = entry if found is None or entry.order < found.order else found
                    break
                self._expire(entry, now)
        return found

    def _lease(self, entry: Entry, token: int, now: int) -> Claim:
        entry.token, entry.standing = token, Standing.LEASED
        self._leased[entry.record.id] = entry
        self._note("claimed", entry.record, now)
        return Claim(entry.record, token)

    def claim_again(self, claims: Sequence[Claim], demand: Mapping[Lane, Demand]) -> Claimed:
        """Answer the repetition of a claim: what it leased, as far as it still is."""
        entries = [(self._leased.get(claim.record.id), claim.token) for claim in claims]
        held = [Claim(entry.record, token) for entry, token in entries if entry is not None and entry.token == token]
        return Claimed(held, self.now_ms(), self._next_due_ms(demand))

    def _next_due_ms(self, demand: Mapping[Lane, Demand]) -> int | None:
        """Return when something may be claimed in the lanes that were asked for: a due time or the end of a lease."""
        lanes = {lane for name, each in demand.items() if each.messages > 0 for lane in (name, *each.aliases)}
        due = [entry.place_ms for lane in lanes if (entry := self._lanes[lane].first()) is not None]
        now, leased = self.now_ms(), self._leased.values()
        tokens = [
            entry.token
            for entry in leased
            if entry.record.envelope.lane in lanes
            and not (t.is_lease_over(entry.token, now) and self._is_in_doubt(entry, now))
        ]
        return min(due + [t.token_deadline_ms(token) for token in tokens], default=None)

    # --- settling -----------------------------------------------------------------------------------------

    def settle_one(self, settlement: Settlement) -> SettleOutcome:
        """End a claim that is still held, in one step with what follows from it."""
        entry = self._entries.get(settlement.id)
        if entry is None or entry.token != settlement.token:
            was_replaced = self._end_superseded(settlement.id, settlement.revision, settlement.token)
            is_newer = entry is not None and entry.record.revision > settlement.revision
            return SettleOutcome.SUPERSEDED if was_replaced or is_newer else SettleOutcome.GONE
        now, record = self.now_ms(), entry.record
        recurs = record.envelope.rule is not None and not record.no_retry
        then_due_ms = settlement.then_due_ms if recurs else None
        self._take_out(entry)
        lives_on = self._end_attempt(record, settlement, now, beside=then_due_ms is not None)
        if then_due_ms is not None:
            self._remember_answer(record, now)
            series = t.rearmed(record, then_due_ms, retrying=lives_on)
            self._insert(series, series.due_ms)
        elif not lives_on:
            self._forget(record, now)
        return SettleOutcome.SETTLED

    def _end_attempt(self, record: Record, settlement: Settlement, now: int, *, beside: bool) -> bool:
        """Do with a message what the settlement says; say whether it is tried again, `beside` its series or not."""
        match settlement:
            case Again() if not record.no_retry:
                failed = t.after_failure(record, settlement)
                if beside:
                    failed = t.as_occurrence(failed)
                    self._fence(failed.id)
                self._insert(failed, t.retry_place(failed, settlement.due_ms))
                self._note("again", failed, now, settlement.error or "")
                return True
            case Again():
                self._note("dropped", record, now, "cancelled in flight")
            case Dead():
                self._bury(t.after_failure(record, settlement), settlement.reason, now)
            case Done():
                self._note(settlement.outcome, record, now)
        return False

    def _fence(self, message_id: str) -> None:
        """Let a claim on what stands under this id settle nothing: something else takes its place."""
        there = self._entries.get(message_id)
        if there is not None:
            self._supersede(there)

    def renew(self, renewal: Renewal) -> RenewOutcome:
        """Set a lease from one token to another, unless somebody else has taken the message."""
        entry, tokens = self._entries.get(renewal.id), (renewal.token, renewal.to)
        is_superseded = self._renew_superseded(renewal.id, renewal.revision, tokens)
        if entry is None or entry.token not in tokens:
            return RenewOutcome.SUPERSEDED if is_superseded else RenewOutcome.LOST
        entry.token = renewal.to
        if renewal.ends_trial:
            entry.record = t.after_trial(entry.record)
            self._trials.pop(renewal.id, None)
        return RenewOutcome.CANCELLED if entry.record.no_retry else RenewOutcome.RENEWED

    # --- housekeeping -------------------------------------------------------------------------------------

    def tidy(self, worker: Worker, lanes: Collection[Lane], limit: int) -> Tidied:
        """Do a bounded step of housekeeping, as `Work.tidy` promises it."""
        now = self.now_ms()
        worker.lanes, worker.seen_ms = frozenset(lanes), now
        lapsed = self._return_lapsed(now, limit)
        expired = self._expire_late(now, limit)
        self._forget_superseded(now)
        for remembered in (self._answers, self._revisions, self._tombstones):
            remembered.forget(now, 100 * limit)
        states = [self._lane_state(name, now) for name, lane in self._lanes.items() if lane.messages]
        return Tidied(now, lapsed, expired, states)

    def _return_lapsed(self, now: int, limit: int) -> int:
        """Put back what was claimed and not settled in time; end what must not be tried again."""
        over = [
            entry
            for entry in self._leased.values()
            if self._is_over(entry.token, now) and not self._is_in_doubt(entry, now)
        ][:limit]
        for entry in over:
            trial = self._trials.get(entry.record.id)
            is_tried, beat_ms = trial is not None, now if trial is None else trial.beat_ms
            record = t.after_lapse(entry.record, is_tried=is_tried, has_died=self._has_died(entry))
            if is_tried and not entry.record.alone:
                self._search = self._search.died(len(self._group()))
            if record != "killed_worker":
                self._search = self._search.lapsed(entry.record, record, beat_ms=beat_ms, now_ms=now)
            if record == "killed_worker":
                self._bury(replace(entry.record, kills=t.KILLS_TO_DEATH, alone=False), "killed_worker", now)
                self._end(entry, now)
            elif record.no_retry:
                self._note("dropped", record, now, "cancelled in flight")
                self._end(entry, now)
            else:
                self._insert(record, entry.place_ms, entry.sequence if is_tried else None)
                self._note("lapsed", record, now)
        return len(over)

    def _begin_trial(self, entries: Sequence[Entry], trial: Trial) -> None:
        self._trials |= {entry.record.id: trial for entry in entries}
        first = entries[0].record
        if not first.kills:
            self._search = self._search.begun(len(entries))
        if len(entries) == 1:
            entries[0].record = replace(first, alone=True, kills=self._search.kills_of(first))

    def _is_trying(self, now: int) -> bool:
        """Say whether suspects are being tried; a lone one in doubt, whose lease is over, keeps no others waiting."""
        return any(not (entry.record.alone and self._is_over(entry.token, now)) for entry in self._tried())

    def _tried(self) -> list[Entry]:
        found = (self._entries.get(message_id) for message_id in self._trials)
        return [entry for entry in found if entry is not None]

    def _group(self) -> list[Entry]:
        """Return the suspects that are tried together."""
        return [entry for entry in self._tried() if not entry.record.alone]

    def _is_in_doubt(self, entry: Entry, now: int) -> bool:
        """Say whether the process of a lone suspect may hold it still: it is known, and was heard of not long ago."""
        trial = self._trials.get(entry.record.id) if entry.record.alone else None
        if trial is None or trial.worker not in self._workers:
            return False
        return not t.is_silent(trial.beat_ms, trial.lease_ms, now)

    def _has_died(self, entry: Entry) -> bool:
        """Say whether the worker that had claimed a suspect is gone: its process is this one, and lives."""
        trial = self._trials.get(entry.record.id)
        return trial is None or trial.worker not in self._workers

    def beat(self, worker: Worker, ids: Collection[str]) -> None:
        """Note that a process lives and holds these claims; called from a thread of its own."""
        worker.seen_ms = self.now_ms()
        for message_id in ids:
            trial = self._trials.get(message_id)
            if trial is not None and trial.worker is worker:
                trial.beat_ms = worker.seen_ms

    def _forget_superseded(self, now: int) -> None:
        """Forget claims on what was replaced that nobody has settled in time."""
        claims = [claim for claims in self._superseded.values() for claim in claims.items()]
        for (message_id, revision), token in claims:
            if self._is_over(token, now):
                self._end_superseded(message_id, revision, token)

    def _expire_late(self, now: int, limit: int) -> int:
        """End what is late, also in lanes that nobody serves; what is held waits until it is released."""
        expired = 0
        while expired < limit and (entry := self._expiring.first()) is not None:
            if not (entry.place_ms <= now and t.ends_by_itself(entry.record, now)):
                break
            self._expiring.pop()
            if self._lanes[entry.record.envelope.lane].holds(entry):
                self._expiring_held.append(entry)
            else:
                self._expire(entry, now)
                expired += 1
        return expired

    def _lane_state(self, name: Lane, now: int) -> LaneState:
        lane = self._lanes[name]
        waiting = [entry.place_ms for address in lane.blocked for entry in lane.parked(address)]
        waiting += [] if (first := lane.first()) is None else [first.place_ms]
        oldest = min((place_ms for place_ms in waiting if place_ms <= now), default=None)
        return LaneState(name, oldest, self._is_served(name, now))


def _fits(size: int, size_taken: int, group: _Group, share: int) -> bool:
    """Say whether a claim that holds some messages has room for one more; a group's first may exceed its demand."""
    if size_taken + size > MAX_CLAIM_BYTES or group.bytes + size > share:
        return False
    return not group.taken or group.bytes + size <= group.demand.max_bytes

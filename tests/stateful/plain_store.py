"""A plain model of a store: one dict, no indexes, and no code shared with the stores.

Each method is told what a store answered, checks it, and does the same here. Where rules leave it free, it follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from msgspec import structs

from aiodelay.core.values import (
    Again,
    At,
    Cancel,
    Claimed,
    Command,
    Dead,
    DeadKey,
    DeadLetter,
    DeadReason,
    Demand,
    Envelope,
    Fire,
    Lane,
    LateAction,
    Outcome,
    Put,
    Record,
    Refused,
    Renewal,
    RenewOutcome,
    Reschedule,
    Settlement,
    SettleOutcome,
    Snapshot,
    State,
    Stored,
)

WINDOW_MS = 30_000
TOMBSTONE_MS = 86_400_000
LEASE_MS, MOST_LEASE_MS = 15_000, 60_000
SILENCE_MS = 60_000
"""Four leases."""

Look = Callable[[str], Snapshot | None]


@dataclass(slots=True)
class Message:
    """A message, as mutable as can be."""

    envelope: Envelope
    revision: int
    due_ms: int
    place_ms: int
    late: LateAction = LateAction.DELIVER
    limit_ms: int = 0
    order: int | None = None  # None: came back, so that its order among those of the same time is free
    attempt: int = 0
    lapses: int = 0
    kills: int = 0
    is_cancelled: bool = False
    live: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    burst_ms: int | None = None
    came_in_flight: list[bytes] = field(default_factory=list)
    came_for_ms: int | None = None
    token: int | None = None
    lease_ends_ms: int = 0
    was_alone: bool = False
    tried_by: int | None = None
    tried_ms: int = 0
    was_over: bool = False
    """Of what was replaced in flight: its lease was over at some time, so that a store may have forgotten it."""

    @property
    def recurs(self) -> bool:
        return self.envelope.rule is not None

    @property
    def is_suspect(self) -> bool:
        return self.lapses >= 2

    def is_late(self, now: int) -> bool:
        return self.late is not LateAction.DELIVER and now > self.due_ms + self.limit_ms

    def is_over(self, now: int) -> bool:
        return self.token is not None and self.lease_ends_ms <= now

    @property
    def is_on_trial(self) -> bool:
        return self.token is not None and self.tried_by is not None

    def is_tried(self, now: int) -> bool:
        return self.is_on_trial and not (self.was_alone and self.is_over(now))

    def may_be_over(self, now: int) -> bool:
        return self.is_over(now) or (self.token is not None and self.lease_ends_ms > now + MOST_LEASE_MS)

    def check(self, record: Record) -> None:
        """Compare with what a store shows."""
        assert record.envelope == self.envelope
        assert (record.revision, record.due_ms) == (self.revision, self.due_ms)
        assert (record.attempt, record.lapses, record.kills) == (self.attempt, self.lapses, self.kills)
        assert (record.no_retry, list(record.live)) == (self.is_cancelled, self.live)
        assert record.alone == (self.is_on_trial and self.was_alone)
        assert record.first_error == (self.errors[0] if self.errors else None)
        assert record.last_error == (self.errors[-1] if self.errors else None)
        told = [error for error, _ in groupby(self.errors)]
        assert list(record.earlier_errors) == told[:-1][-4:]
        assert record.debounced_ms == self.burst_ms, (record, self)
        assert record.appended == (b"\n".join(self.came_in_flight) if self.came_in_flight else None)
        assert record.appended_due_ms == self.came_for_ms
        assert record.late is self.late
        if self.late is not LateAction.DELIVER:
            assert record.expires_ms == self.due_ms + self.limit_ms


class PlainStore:
    """Checks a store step by step."""

    def __init__(self) -> None:
        self.messages: dict[str, Message] = {}
        self.dead: dict[DeadKey, tuple[int, DeadReason, Message]] = {}
        self.held: set[tuple[Lane, str | None]] = set()
        self.sent: dict[bytes, tuple[int, Command, Outcome]] = {}
        self.position: int | None = None
        self._superseded: dict[tuple[str, int], Message] = {}  # replaced in flight, by id and revision
        self._tokens: set[tuple[str, int]] = set()
        self._ended: dict[str, tuple[int, int]] = {}
        self._tombstones: dict[str, tuple[int, int]] = {}
        self._faded: dict[str, int] = {}  # versions that a store may have forgotten, or not yet
        self._orders = 0
        self._tried, self._hot = 0, 0  # the last group of suspects, and how many hold a killer
        self._suspected_ms, self._killed_ms = (
            0,
            0,
        )  # when a message last became one, and when the last kill's trial began
        self.outlives_processes = True  # a store that ends with its process knows nothing of the end of a process
        self.seen: dict[int, int] = {}  # when each worker was heard of

    def time_passed(self, now: int) -> None:
        """Forget what a store may have forgotten by now."""
        self.sent = {op: each for op, each in self.sent.items() if each[0] + WINDOW_MS > now}
        self._ended = {each: (until, last) for each, (until, last) in self._ended.items() if until > now}
        for message_id, (until, version) in list(self._tombstones.items()):
            if until <= now:
                del self._tombstones[message_id]
                self._faded[message_id] = max(version, self._faded.get(message_id, -1))
        for message in self._superseded.values():
            message.was_over |= message.may_be_over(now)

    def _older_in_flight(self, message_id: str, now: int) -> set[bool]:
        """Return what may be said of whether a version that was replaced is in flight; a series' retry is one too."""
        claims = [each for (key, _), each in self._superseded.items() if message_id in (key, series_of(key))]
        older = [each for each in claims if not each.is_over(now)]
        if any(not each.was_over for each in older):
            return {True}
        return {True, False} if older else {False}

    # --- commands -----------------------------------------------------------------------------------------

    def command(self, command: Command, outcome: Outcome, now: int) -> None:
        """Check and do a command that has not been sent before."""
        match command:
            case Put():
                self._put(command, outcome, now)
            case Cancel():
                self._cancel(command, outcome, now)
            case Reschedule():
                self._reschedule(command, outcome, now)
            case Fire():
                self._fire(command, outcome, now)
        self.sent[command.op] = (now, command, outcome)

    def _put(self, put: Put, outcome: Outcome, now: int) -> None:
        old = self.messages.get(put.id)
        if put.conflict.mode == "append" and old is not None:
            self._append(put, old, outcome, now)
            return
        if self._is_refused(put, old, outcome):
            return
        assert isinstance(outcome, Stored)
        due_ms = max(put.due.ms, 0) if isinstance(put.due, At) else now + put.due.ms
        began = self._window_began(put, old, now, outcome)
        if self._is_kept(put, old, due_ms, began):
            answer = "kept" if old is None or old.token is None else "in_flight"
            assert (outcome.answer, outcome.is_older_in_flight) == (answer, False)
            kept = (0, began) if old is None else (old.revision, old.due_ms)
            assert (outcome.revision, outcome.due_ms) == kept
            return
        due_ms, version, burst_ms = self._times(put, old, due_ms, began, now)
        assert (outcome.answer, outcome.due_ms) == ("stored" if old is None else "replaced", due_ms)
        last = old.revision if old is not None else self._ended.get(put.id, (0, 0))[1]
        assert outcome.revision >= max(now, last + 1)
        if old is not None:
            self._end_retries(put.id, now, is_replaced=True)
            self._end(old, now)
            self._supersede(old)
        if put.conflict.window_ms is not None and version is not None:
            self._forget_later_windows(put.id, version, now)
        assert outcome.is_older_in_flight in (self._older_in_flight(put.id, now) if old is not None else {False})
        self._orders += 1
        late = put.late
        self.messages[put.id] = Message(
            structs.replace(put.envelope, version=version),
            outcome.revision,
            due_ms,
            due_ms,
            late.action,
            late.after_ms,
            self._orders,
            burst_ms=burst_ms,
        )

    def _forget_later_windows(self, message_id: str, began: int, now: int) -> None:
        """Forget windows that lie too far ahead after a step back of the clock: a call has begun another window."""
        if self._tombstones.get(message_id, (0, -1))[1] > began:
            self._tombstones[message_id] = (now + TOMBSTONE_MS, began)
        if self._faded.get(message_id, -1) > began:
            del self._faded[message_id]

    def _append(self, put: Put, old: Message, outcome: Outcome, now: int) -> None:
        item, stored = put.envelope, old.envelope
        if old.recurs or (item.lane, item.address) != (stored.lane, stored.address):
            assert isinstance(outcome, Refused)
            assert outcome.reason == "duplicate"
            return
        assert isinstance(outcome, Stored)
        most = put.conflict.max_items or math.inf
        if old.token is not None:
            old.came_in_flight.append(item.payload)
            due_ms = max(put.due.ms, 0) if isinstance(put.due, At) else now + put.due.ms
            due_ms = due_ms if old.came_for_ms is None else min(due_ms, old.came_for_ms)
            old.came_for_ms = min(due_ms, now) if len(old.came_in_flight) >= most else due_ms
            assert outcome == Stored("replaced", old.revision, old.came_for_ms, is_older_in_flight=True)
            return
        assert outcome.revision >= max(now, old.revision + 1)
        self._end(old, now)
        self._orders += 1
        new = replace(
            old,
            envelope=structs.replace(stored, payload=stored.payload + b"\n" + item.payload),
            revision=outcome.revision,
            order=None if old.order is None else self._orders,
        )
        if new.envelope.payload.count(b"\n") + 1 >= most and new.due_ms > now:
            new.due_ms = new.place_ms = now
        self.messages[put.id] = new
        assert (outcome.answer, outcome.due_ms) == ("replaced", new.due_ms)
        assert outcome.is_older_in_flight in self._older_in_flight(put.id, now)

    def _is_refused(self, put: Put, old: Message | None, outcome: Outcome) -> bool:
        mode, version = put.conflict.mode, put.conflict.version
        if mode == "newer":
            assert version is not None
            known = {self._tombstones[put.id][1]} if put.id in self._tombstones else set()
            if old is not None and old.envelope.version is not None:
                known.add(old.envelope.version)
            if known and version <= max(known):
                assert isinstance(outcome, Refused)
                assert outcome.reason == "outdated"
                return True
            return version <= self._faded.get(put.id, -1) and isinstance(outcome, Refused)
        if mode == "if_revision" and (old is None or put.conflict.revision != old.revision or old.came_in_flight):
            assert isinstance(outcome, Refused)
            assert outcome.reason == "outdated"
            return True
        if old is not None and mode == "error":
            assert outcome == Refused("duplicate")
            return True
        return False

    @staticmethod
    def _is_kept(put: Put, old: Message | None, due_ms: int, began: int | None) -> bool:
        match put.conflict.mode:
            case "throttle":
                return began is not None
            case "keep" if old is not None:
                return not (old.recurs and put.envelope.rule not in (None, old.envelope.rule))
            case "earlier" if old is not None and old.token is None:
                return due_ms >= old.due_ms
            case "later" if old is not None and old.token is None:
                return due_ms <= old.due_ms
        return False

    @staticmethod
    def _times(
        put: Put, old: Message | None, due_ms: int, began: int | None, now: int
    ) -> tuple[int, int | None, int | None]:
        """Return the due time of a message that is stored, its version, and when its burst began."""
        conflict = put.conflict
        untouched = old if old is not None and old.token is None and old.attempt == old.lapses == 0 else None
        if conflict.quiet_ms is not None:
            burst_ms = now if untouched is None or untouched.burst_ms is None else min(untouched.burst_ms, now)
            ends_ms = math.inf if conflict.max_wait_ms is None else burst_ms + conflict.max_wait_ms
            return int(min(now + conflict.quiet_ms, ends_ms)), None, burst_ms
        if conflict.window_ms is None:
            return due_ms, conflict.version, None
        if began is None:
            return due_ms, now, None
        if untouched is not None:
            return untouched.due_ms, began, None
        # The last message of a window opens the next window, also if that message has ended before the window.
        ends_ms = next(each for each in (began, began + conflict.window_ms) if each > now)
        return ends_ms, ends_ms, None

    def _window_began(self, put: Put, old: Message | None, now: int, outcome: Stored) -> int | None:
        """Return when the present window of an id began; None if no window is under way."""
        window_ms = put.conflict.window_ms
        if window_ms is None:
            return None
        stored = None if old is None else old.envelope.version
        began = max(-1 if stored is None else stored, self._tombstones.get(put.id, (0, -1))[1])
        faded = self._faded.get(put.id, -1)
        if faded > began and outcome.due_ms in (faded, faded + window_ms):
            began = faded
        return began if began >= 0 and now - window_ms < began <= now + window_ms else None

    def _cancel(self, command: Cancel, outcome: Outcome, now: int) -> None:
        message = self.messages.get(command.id)
        if message is None:
            assert outcome == Refused("not_found")
            return
        revision, due_ms = message.revision, message.due_ms
        if command.only is not None and (command.only[0] != revision or message.came_in_flight):
            assert isinstance(outcome, Refused)
            assert outcome.reason == "outdated"
            return
        retry_in_flight = self._end_retries(command.id, now)
        in_flight = message.token is not None
        if in_flight:
            message.is_cancelled = True
            message.came_in_flight, message.came_for_ms = [], None
        else:
            self._end(message, now)
        told = {in_flight or retry_in_flight or older for older in self._older_in_flight(command.id, now)}
        assert outcome in [Stored("in_flight" if each else "cancelled", revision, due_ms) for each in told]

    def _end_retries(self, series_id: str, now: int, *, is_replaced: bool = False) -> bool:
        retries = [retry for each, retry in self.messages.items() if series_of(each) == series_id]
        for retry in retries:
            if retry.token is not None and not is_replaced:
                retry.is_cancelled = True
            else:
                self._end(retry, now)
                self._supersede(retry)
        return any(retry.token is not None for retry in retries)

    def _supersede(self, old: Message | None) -> None:
        if old is not None and old.token is not None:
            self._superseded[old.envelope.id, old.revision] = old

    def _reschedule(self, command: Reschedule, outcome: Outcome, now: int) -> None:
        message = self.messages.get(command.id)
        if message is None or message.token is not None:
            assert outcome == Refused("not_found" if message is None else "too_late")
            return
        due = command.due
        self._move(message, max(due.ms, 0) if isinstance(due, At) else now + due.ms)
        message.place_ms, message.order = message.due_ms, None
        assert outcome == Stored("rescheduled", message.revision, message.due_ms)

    def _fire(self, command: Fire, outcome: Outcome, now: int) -> None:
        message = self.messages.get(command.id)
        if message is None or message.token is not None:
            assert outcome == Refused("not_found" if message is None else "in_flight")
            return
        if message.due_ms > now:
            self._move(message, now)
        message.place_ms, message.order = min(message.place_ms, now), None
        assert outcome == Stored("fired", message.revision, message.due_ms)

    @staticmethod
    def _move(message: Message, due_ms: int) -> None:
        while due_ms in message.live:
            due_ms += 1
        message.due_ms = due_ms

    # --- claims -------------------------------------------------------------------------------------------

    def claim(self, demand: Mapping[Lane, Demand], claimed: Claimed, now: int, who: int, look: Look) -> None:
        """Check and do a claim that has not been sent before."""
        assert claimed.now_ms == now
        taken = {claim.record.id for claim in claimed.claims}
        self._follow(now, look, taken)
        by_lane = {
            lane: [claim.record.id for claim in claimed.claims if claim.record.envelope.lane == lane] for lane in demand
        }
        gave_all = [self._check_lane(lane, each, by_lane[lane], now) for lane, each in demand.items()]
        max_lapses = min((each.max_lapses for each in demand.values()), default=0)
        assert all(self.messages[each].lapses <= max_lapses for each in taken)
        suspects = [self.messages[each] for each in taken if self.messages[each].is_suspect]
        is_trying = any(each.is_tried(now) for each in self.messages.values())
        if suspects:
            assert len(suspects) == len(taken), "suspects were given out beside others"
            assert len(suspects) == 1 or not any(each.kills for each in suspects), "a killer was tried in a group"
            hot = max(self._hot - self._tried, 0)
            assert len(suspects) <= ((hot + 1) // 2 or 500)
            if not suspects[0].kills:
                self._tried, self._hot = len(suspects), hot
            elif self._suspected_ms > self._killed_ms:
                suspects[0].kills = 0
            assert not is_trying, "two groups are tried at a time"
        else:
            assert all(gave_all), "something was due and not given"
        left = [m for lane in demand for m in self._claimable(lane, now) if m.envelope.id not in taken]
        if not taken and not is_trying:
            assert not [m for m in left if m.lapses <= max_lapses], "a suspect was due and not given"
        for claim in claimed.claims:
            message = self.messages[claim.record.id]
            assert message.token is None, "given out twice"
            message.token, message.lease_ends_ms = claim.token, now + LEASE_MS
            message.tried_by, message.tried_ms = (who, now) if suspects else (None, 0)
            message.was_alone = len(suspects) == 1
            message.check(claim.record)
            assert (claim.record.id, claim.token) not in self._tokens, "a token repeats"
            self._tokens.add((claim.record.id, claim.token))
        looks = {self._next_ms(list(demand), now)}
        aside = [m for m in left if m.is_suspect or m.lapses > max_lapses]
        if aside and not suspects:
            behind = self._next_ms(list(demand), now, but=aside)
            looks = (looks if taken else set()) | {min(behind or now + 1000, now + 1000)}
        assert claimed.next_due_ms in looks

    def _claimable(self, lane: Lane, now: int) -> list[Message]:
        return [
            message
            for message in self.messages.values()
            if message.envelope.lane == lane
            and message.token is None
            and message.place_ms <= now
            and not self._is_held(message)
            and (message.recurs or not message.is_late(now))
        ]

    def _check_lane(self, lane: Lane, demand: Demand, ids: Sequence[str], now: int) -> bool:
        """Check that a lane gave its first messages, in order; say whether it gave all it could."""
        claimable = self._claimable(lane, now)
        assert {m.envelope.id for m in claimable}.issuperset(ids)
        assert len(ids) <= demand.messages
        taken = [self.messages[each] for each in ids]
        left = [m for m in claimable if m.envelope.id not in ids and m.lapses <= demand.max_lapses and not m.is_suspect]
        for number, one in enumerate(taken):
            for other in [] if one.is_suspect else [*taken[number + 1 :], *left]:
                assert one.place_ms <= other.place_ms
                if one.place_ms == other.place_ms and one.order is not None and other.order is not None:
                    assert one.order < other.order
        return len(ids) == demand.messages or not left

    def _is_held(self, message: Message) -> bool:
        lane, address = message.envelope.lane, message.envelope.address
        return (lane, None) in self.held or (lane, address) in self.held

    def _next_ms(self, lanes: Sequence[Lane], now: int, *, but: Sequence[Message] = ()) -> int | None:
        there = [message for message in self.messages.values() if message.envelope.lane in lanes]
        places = [
            message.place_ms
            for message in there
            if message.token is None and not self._is_held(message) and message not in but
        ]
        leased = [message for message in there if message.token is not None]
        ends = [each.lease_ends_ms for each in leased if not (each.is_over(now) and self._is_in_doubt(each, now))]
        return min(places + ends, default=None)

    def still_leased(self, claims: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Return what a claim, repeated, must give: (id, token)."""
        return [(each, token) for each, token in claims if each in self.messages and self.messages[each].token == token]

    # --- settlements --------------------------------------------------------------------------------------

    def settle(self, settlement: Settlement, outcome: SettleOutcome, now: int) -> None:
        """Check and do a settlement."""
        message = self.messages.get(settlement.id)
        if message is None or message.token != settlement.token:
            is_newer = message is not None and message.revision > settlement.revision
            older = self._superseded.get((settlement.id, settlement.revision))
            if older is not None and older.token == settlement.token:
                del self._superseded[settlement.id, settlement.revision]
                if older.was_over and not is_newer:  # it may have been forgotten
                    assert outcome is not SettleOutcome.SETTLED
                    return
                is_newer = True
            assert outcome is (SettleOutcome.SUPERSEDED if is_newer else SettleOutcome.GONE)
            return
        assert outcome is SettleOutcome.SETTLED
        recurs = message.recurs and not message.is_cancelled and settlement.then_due_ms is not None
        if isinstance(settlement, Again | Dead):
            ended = self._attempted(message, settlement)
        if isinstance(settlement, Again) and not message.is_cancelled:
            retry = self._as_occurrence(ended) if recurs else ended
            retry.place_ms, retry.order = max(settlement.due_ms, retry.due_ms), None
            retry.came_in_flight = message.came_in_flight
            self._gather(retry, now)
            if recurs:
                self._supersede(self.messages.get(retry.envelope.id))
            self.messages[retry.envelope.id] = retry
            if recurs:
                message.live.append(message.due_ms)
        elif not recurs:
            self._end_run(message, now)
        if isinstance(settlement, Dead):
            self._bury(ended, settlement.reason, now)
        if recurs:
            self._rearm(message, settlement.then_due_ms or 0)

    @staticmethod
    def _gather(message: Message, now: int) -> None:
        """Give a message that is tried again the items that came while it was in flight."""
        if message.came_in_flight:
            payload = b"\n".join([message.envelope.payload, *message.came_in_flight])
            message.envelope = structs.replace(message.envelope, payload=payload)
            message.revision = max(now, message.revision + 1)
            message.came_in_flight, message.came_for_ms = [], None

    def _end_run(self, message: Message, now: int) -> None:
        """End a message after its last attempt; the items that came meanwhile are the next message."""
        if message.came_for_ms is None:
            self._end(message, now)
            return
        self.messages[message.envelope.id] = Message(
            structs.replace(message.envelope, payload=b"\n".join(message.came_in_flight)),
            max(now, message.revision + 1),
            message.came_for_ms,
            message.came_for_ms,
            message.late,
            message.limit_ms,
        )
        message.came_in_flight, message.came_for_ms = [], None

    @staticmethod
    def _attempted(message: Message, settlement: Again | Dead) -> Message:
        errors = message.errors if settlement.error is None else [*message.errors, settlement.error]
        return Message(
            message.envelope,
            message.revision,
            message.due_ms,
            message.place_ms,
            message.late,
            message.limit_ms,
            attempt=settlement.attempt,
            is_cancelled=message.is_cancelled,
            live=list(message.live),
            errors=errors,
            burst_ms=message.burst_ms,
        )

    @staticmethod
    def _as_occurrence(message: Message) -> Message:
        envelope = message.envelope
        message.envelope = Envelope(
            occurrence_id(envelope.id, message.due_ms),
            envelope.lane,
            envelope.address,
            payload=envelope.payload,
            version=envelope.version,
        )
        message.live = []
        return message

    def _rearm(self, series: Message, due_ms: int) -> None:
        series.token, series.order = None, None
        series.attempt = series.lapses = series.kills = 0
        series.errors = []
        self._move(series, due_ms)
        series.place_ms = series.due_ms
        self.messages[series.envelope.id] = series

    def renew(self, renewal: Renewal, outcome: RenewOutcome, now: int, ends_ms: int) -> None:
        """Check and do a renewal until `ends_ms`."""
        message = self.messages.get(renewal.id)
        if message is None or message.token not in (renewal.token, renewal.to):
            older = self._superseded.get((renewal.id, renewal.revision))
            if older is None or older.token not in (renewal.token, renewal.to):
                assert outcome is RenewOutcome.LOST
            elif outcome is RenewOutcome.LOST:
                assert older.was_over
                del self._superseded[renewal.id, renewal.revision]
            else:
                assert outcome is RenewOutcome.SUPERSEDED
                older.token, older.lease_ends_ms, older.was_over = renewal.to, ends_ms, False
        else:
            assert outcome is (RenewOutcome.CANCELLED if message.is_cancelled else RenewOutcome.RENEWED)
            message.token, message.lease_ends_ms = renewal.to, ends_ms
            if renewal.ends_trial:
                message.tried_by = None

    # --- what happens by itself ---------------------------------------------------------------------------

    def tidied(self, now: int, look: Look) -> None:
        """Check that housekeeping has done all there is to do."""
        self._follow(now, look, set())
        for message in self.messages.values():
            is_stuck = message.is_over(now) and not self._is_in_doubt(message, now)
            assert not is_stuck, f"{message.envelope.id} is stuck in a lease"
            assert not self._must_end(message, now), f"{message.envelope.id} is late and still there"

    def _must_end(self, message: Message, now: int) -> bool:
        is_due = message.token is None and message.place_ms <= now and not self._is_held(message)
        return is_due and message.is_late(now) and not message.recurs

    def _follow(self, now: int, look: Look, taken: set[str]) -> None:
        """Do here what the store has done by itself: returned what lapsed, ended what is late."""
        for message_id, message in list(self.messages.items()):
            if message.may_be_over(now):
                snapshot = look(message_id)
                if message_id in taken or snapshot is None or snapshot.state is not State.IN_FLIGHT:
                    self._lapse(message, now)
        for message_id, message in list(self.messages.items()):
            if self._must_end(message, now) and look(message_id) is None:
                if message.late is LateAction.DEAD_LETTER:
                    self._bury(message, "late", now)
                self._end(message, now)

    def _is_in_doubt(self, message: Message, now: int) -> bool:
        return message.is_on_trial and message.was_alone and abs(now - message.tried_ms) < SILENCE_MS

    def _lapse(self, message: Message, now: int) -> None:
        if message.is_on_trial and not message.was_alone and self._tried:
            left = [m for m in self.messages.values() if m.is_on_trial and not m.was_alone]
            self._tried, self._hot = 0, len(left)
        message.token, message.order = None, None
        message.lapses += message.tried_by is None
        if message.tried_by is None and message.lapses == 2:
            self._suspected_ms = now
        if message.tried_by is not None and message.was_alone and self._has_ended(message.tried_by, now):
            message.kills += 1
            if message.kills < 3 or message.recurs or message.is_cancelled:
                self._killed_ms = message.tried_ms
        message.tried_by = None
        if message.is_cancelled:
            self._end_run(message, now)
        elif message.kills >= 3 and not message.recurs:
            self._bury(message, "killed_worker", now)
            self._end_run(message, now)
        else:
            self._gather(message, now)

    def _has_ended(self, who: int, now: int) -> bool:
        return self.outlives_processes and abs(now - self.seen[who]) >= SILENCE_MS // 2

    def _bury(self, message: Message, reason: DeadReason, now: int) -> None:
        if message.recurs:
            message = self._as_occurrence(message)
        message.token = None
        self.dead[DeadKey(message.envelope.id, message.revision)] = (now, reason, message)

    def _end(self, message: Message, now: int) -> None:
        message_id, version = message.envelope.id, message.envelope.version
        if self.messages.get(message_id) is message:
            del self.messages[message_id]
        series, tilde, due = message_id.rpartition("~")
        if tilde:
            if series in self.messages and int(due) in self.messages[series].live:
                self.messages[series].live.remove(int(due))
            return
        self._ended[message_id] = (now + WINDOW_MS, message.revision)
        if version is not None:
            known = self._tombstones.get(message_id, (0, -1))[1]
            self._tombstones[message_id] = (now + TOMBSTONE_MS, max(version, known))

    # --- dead letters -------------------------------------------------------------------------------------

    def redrive(self, key: DeadKey, outcome: Outcome, now: int) -> None:
        """Check and do a redrive."""
        series_id, tilde, due = key.id.rpartition("~")
        series = self.messages.get(series_id) if tilde else None
        series = series if series is not None and series.recurs else None
        stands = series is not None and series.due_ms == int(due)
        if key not in self.dead or key.id in self.messages or stands:
            assert outcome == Refused("exists" if key in self.dead else "not_found")
            return
        _, _, old = self.dead.pop(key)
        assert isinstance(outcome, Stored)
        last = max(key.revision, self._ended.get(key.id, (0, 0))[1])
        assert outcome.revision >= max(now, last + 1)
        assert (outcome.answer, outcome.due_ms) == ("stored", now)
        if series is not None:
            series.live.append(int(due))
        self.messages[key.id] = Message(old.envelope, outcome.revision, now, now, old.late, old.limit_ms)

    # --- looking ------------------------------------------------------------------------------------------

    def check(self, snapshots: Sequence[Snapshot], letters: Sequence[DeadLetter], now: int) -> None:
        """Compare all that can be seen."""
        by_place = sorted(self.messages.values(), key=lambda message: (message.place_ms, message.envelope.id))
        assert [each.record.id for each in snapshots] == [message.envelope.id for message in by_place]
        for snapshot, message in zip(snapshots, by_place, strict=True):
            message.check(snapshot.record)
            assert snapshot.next_attempt_ms == message.place_ms
            assert snapshot.state is self._state(message, now)
        by_time = sorted((at_ms, key) for key, (at_ms, _, _) in self.dead.items())
        assert [(letter.at_ms, letter.key) for letter in letters] == by_time
        for letter in letters:
            _, reason, message = self.dead[letter.key]
            assert letter.reason == reason
            message.check(letter.record)

    def _state(self, message: Message, now: int) -> State:
        if message.token is not None:
            return State.IN_FLIGHT
        if self._is_held(message):
            return State.HELD
        return State.OVERDUE if message.place_ms <= now else State.SCHEDULED


def series_of(message_id: str) -> str | None:
    series, tilde, _ = message_id.rpartition("~")
    return series if tilde else None


def occurrence_id(series: str, due_ms: int) -> str:
    return f"{series}~{due_ms:010d}"

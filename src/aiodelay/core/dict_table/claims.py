"""`DictClaiming`: claims the messages of a `DictTable`, keeps the leases, and does the table's housekeeping.

The *place* of a message (`place_ms`) is the time of its next attempt, epoch ms. It orders the messages of a lane.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count
from typing import Protocol

from aiodelay.core import transitions as t
from aiodelay.core.fair_share import FairShare
from aiodelay.core.rules import Rules
from aiodelay.core.values import MAX_CLAIM_MESSAGES, Claim, Claimed, Demand, Lane, LaneState, Tidied, lanes_of

from .entries import LEASED, Entry
from .table import DictTable, Trial, Worker

__all__ = ["DictClaiming", "LaneHeads", "LaneOrder"]

MAX_MS = 1 << 48


class LaneOrder(Protocol):
    """The order in which messages leave their lanes."""

    def first_due(self, lanes: Sequence[Lane], now: int) -> Entry | None:
        """Return the first due message of these lanes, without removing it. End the late messages before it."""
        ...

    def next_due_ms(self, lanes: Iterable[Lane], now: int) -> int | None:
        """Return the place of the next message of these lanes, whether it is due or not; None if there is none."""
        ...

    def oldest_ms(self, lane: Lane, now: int) -> int | None:
        """Return the place of the first due message of a lane; None if no message is due."""
        ...


class LaneHeads:
    """Orders messages by place, then by the order of scheduling (implements `LaneOrder`)."""

    def __init__(self, table: DictTable, rules: Rules[Entry]) -> None:
        self._table, self._rules = table, rules

    def first_due(self, lanes: Sequence[Lane], now: int) -> Entry | None:
        found: Entry | None = None
        for lane in lanes:
            queue = self._table.lanes[lane]
            while (entry := queue.first_due(now)) is not None:
                if not t.ends_by_itself(entry.record, now):
                    found = entry if found is None or entry.order < found.order else found
                    break
                self._rules.expire(entry, now)
        return found

    def next_due_ms(self, lanes: Iterable[Lane], now: int) -> int | None:
        return _earliest(self._table.lanes[lane].next_ms(now) for lane in lanes)

    def oldest_ms(self, lane: Lane, now: int) -> int | None:
        oldest_ms = self._table.lanes[lane].oldest_ms()
        return oldest_ms if oldest_ms is not None and oldest_ms <= now else None


class _ClaimHead:
    """The due messages of some lanes, for one claim (implements `Head`)."""

    def __init__(self, heads: _ClaimHeads, lanes: Sequence[Lane]) -> None:
        self._heads, self._lanes = heads, lanes
        self._first: Entry | None = None

    def first(self) -> Entry | None:
        self._first = self._heads.order.first_due(self._lanes, self._heads.now)
        return self._first

    def take(self) -> None:
        if self._first is not None:
            self._heads.table.lanes[self._first.record.envelope.lane].take_first()

    def step_over(self) -> None:
        if self._first is not None:
            self._heads.table.lanes[self._first.record.envelope.lane].step_over_first()
            self._heads.aside.append(self._first)


class _ClaimHeads:
    """The lanes of one claim, and the messages that the claim has skipped (implements `Heads`)."""

    def __init__(self, table: DictTable, order: LaneOrder, now: int) -> None:
        self.table, self.order, self.now = table, order, now
        self.aside: list[Entry] = []

    def of(self, lanes: Sequence[Lane]) -> _ClaimHead:
        return _ClaimHead(self, lanes)

    def put_back(self) -> None:
        """Put the skipped messages back into their lanes."""
        for entry in self.aside:
            self.table.lanes[entry.record.envelope.lane].add(entry)


class DictClaiming:
    """The claims on a table's messages.

    Args:
        table: The messages.
        rules: The rules of this table.
        order: The order in which messages leave their lanes.
        numbers: A counter. Its numbers distinguish the tokens of claims that are made in the same millisecond.
    """

    def __init__(self, table: DictTable, rules: Rules[Entry], order: LaneOrder, numbers: count[int]) -> None:
        self._table, self._rules, self._order, self._numbers = table, rules, order, numbers
        self._ahead_since = 0
        self._expiring_held: list[Entry] = []

    # --- claims -------------------------------------------------------------------------------------------

    def claim(self, demand: Mapping[Lane, Demand], lease_ms: int, turn: int, worker: Worker, now: int) -> Claimed:
        """Lease due messages. `turn` decides which lane the claim serves first."""
        number = next(self._numbers)
        self.return_lapsed(now, MAX_CLAIM_MESSAGES)
        heads = _ClaimHeads(self._table, self._order, now)
        share = self._share(demand, heads, turn, now)
        entries = share.take()
        has_tried = share.is_trial and bool(entries)
        if has_tried:
            self._table.trials.begin(entries, Trial(worker, lease_ms, now))
            self._rules.begin_trial(entries)
        token = t.token_for(now + lease_ms, number)
        claims = [self._lease(entry, token, now) for entry in entries]
        limited = frozenset(filter(self._table.is_limited, lanes_of(demand)))
        next_due_ms, next_by_lane = self._next_claim_ms(heads, demand, now, has_tried=has_tried)
        return Claimed(claims, now, next_due_ms, limited, next_by_lane)

    def _share(self, demand: Mapping[Lane, Demand], heads: _ClaimHeads, turn: int, now: int) -> FairShare[Entry]:
        return FairShare(demand, heads, turn=turn, most_tried=lambda: self._most_tried(now))

    def _most_tried(self, now: int) -> int:
        return 0 if self._is_trying(now) else self._table.trials.search().most

    def _is_trying(self, now: int) -> bool:
        """Return whether a trial is under way. A suspect that is tried alone counts only until its lease is over."""
        tried = self._table.trials.tried()
        return any(not (entry.record.alone and self._is_over(entry.token, now)) for entry in tried)

    def _next_claim_ms(
        self, heads: _ClaimHeads, demand: Mapping[Lane, Demand], now: int, *, has_tried: bool
    ) -> tuple[int | None, Mapping[Lane, int | None] | None]:
        """Return when to claim again, epoch ms, and the same for each lane.

        If this claim skipped messages, claim again within a second. The times of the lanes are then unknown.
        """
        if has_tried:
            heads.put_back()
        times = self._next_by_lane(lanes_of(demand), now)
        if heads.aside and not has_tried:
            heads.put_back()
            return min(_earliest(times.values()) or MAX_MS, now + t.TRIAL_MS), None
        return _earliest(times.values()), times

    def _lease(self, entry: Entry, token: int, now: int) -> Claim:
        entry.token, entry.state = token, LEASED
        self._table.leased[entry.record.id] = entry
        self._rules.table.note("claimed", entry.record, now)
        return Claim(entry.record, token)

    def claim_again(self, claims: Sequence[Claim], demand: Mapping[Lane, Demand], now: int) -> Claimed:
        """Answer a repeated claim: return the messages that still have the leases of the first claim."""
        entries = [(self._table.leased.get(claim.record.id), claim.token) for claim in claims]
        held = [Claim(entry.record, token) for entry, token in entries if entry is not None and entry.token == token]
        return Claimed(held, now, self.next_due_ms(demand, now))

    def next_due_ms(self, demand: Mapping[Lane, Demand], now: int) -> int | None:
        """Return when a message of the demanded lanes may be claimed: a due time or the end of a lease."""
        return _earliest(self._next_by_lane(lanes_of(demand), now).values())

    def _next_by_lane(self, lanes: Collection[Lane], now: int) -> dict[Lane, int | None]:
        dues_ms = {lane: self._order.next_due_ms([lane], now) for lane in lanes}
        least: dict[Lane, int] = {}
        is_in_doubt = self._table.trials.is_in_doubt
        for entry in self._table.leased.values():
            lane = entry.record.envelope.lane
            if lane in dues_ms and not (t.is_lease_over(entry.token, now) and is_in_doubt(entry, now)):
                least[lane] = min(entry.token, least.get(lane, entry.token))
        ends_ms = {lane: t.token_deadline_ms(token) for lane, token in least.items()}
        return {
            lane: ends_ms.get(lane) if due is None else min(due, ends_ms.get(lane, due))
            for lane, due in dues_ms.items()
        }

    # --- housekeeping -------------------------------------------------------------------------------------

    def tidy(self, worker: Worker, lanes: Collection[Lane], limit: int, now: int) -> Tidied:
        """Do a bounded step of housekeeping; see `Work.tidy`."""
        worker.lanes, worker.seen_ms = frozenset(lanes), now
        lapsed = self.return_lapsed(now, limit)
        expired = self._expire_late(now, limit)
        self._forget_superseded(now)
        self._table.answers.forget(now, 100 * limit)
        states = [self.lane_state(name, now) for name, lane in self._table.lanes.items() if lane.messages]
        return Tidied(now, lapsed, expired, states)

    def has_over(self, now: int) -> bool:
        """Return whether a lease is over, so that `return_lapsed` would return its message."""
        leased, is_in_doubt = self._table.leased.values(), self._table.trials.is_in_doubt
        if not leased or not t.is_lease_over(min([entry.token for entry in leased]), now):
            return False
        return any(t.is_lease_over(entry.token, now) and not is_in_doubt(entry, now) for entry in leased)

    def return_lapsed(self, now: int, limit: int) -> int:
        """Put messages whose leases have ended back into their lanes. Return the number of these messages."""
        is_in_doubt = self._table.trials.is_in_doubt
        over = [
            entry
            for entry in self._table.leased.values()
            if self._is_over(entry.token, now) and not is_in_doubt(entry, now)
        ][:limit]
        for entry in over:
            self._rules.lapse(entry, now)
        return len(over)

    def _is_over(self, token: int, now: int) -> bool:
        """Return whether a lease is over.

        If the end of a lease is too far ahead, the clock has stepped back. Such a lease counts as over when its holder
        has had `RIGHTING_MS` to correct it.
        """
        if not t.is_lease_too_long(token, now):
            return t.is_lease_over(token, now)
        self._ahead_since = t.ahead_since(self._ahead_since, now)
        return self._ahead_since + t.RIGHTING_MS <= now

    def beat(self, worker: Worker, ids: Collection[str], now: int) -> None:
        """Note that a process lives and holds the claims on these messages. A separate thread may call this method."""
        worker.seen_ms = now
        self._table.trials.beat(worker, ids)

    def _forget_superseded(self, now: int) -> None:
        """Remove claims on replaced messages if their leases have ended."""
        for message_id, revision, token in self._table.superseded:
            if self._is_over(token, now):
                self._table.superseded.end(message_id, revision, token)

    def _expire_late(self, now: int, limit: int) -> int:
        """End late messages, also in lanes that no worker serves. Paused messages wait until they are resumed."""
        expired, expiring = 0, self._table.expiring
        while expired < limit and (entry := expiring.first()) is not None:
            if not (entry.place_ms <= now and t.ends_by_itself(entry.record, now)):
                break
            expiring.pop()
            if self._table.lanes[entry.record.envelope.lane].is_paused(entry):
                self._expiring_held.append(entry)
            else:
                self._rules.expire(entry, now)
                expired += 1
        return expired

    def recheck_released(self) -> None:
        """Check again the messages that were paused when they became late."""
        for entry in self._expiring_held:
            self._table.expiring.push(max(entry.place_ms, entry.record.expires_ms + 1), entry)
        self._expiring_held.clear()

    def lane_state(self, lane: Lane, now: int) -> LaneState:
        """Return the state of a lane."""
        return LaneState(lane, self._order.oldest_ms(lane, now), self._table.workers.serve(lane, now))


def _earliest(times: Iterable[int | None]) -> int | None:
    return min((time_ms for time_ms in times if time_ms is not None), default=None)

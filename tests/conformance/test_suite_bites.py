"""The store suite can fail: each store here breaks one rule, and the test of that rule must fail.

And it skips what a store declares not to have, and runs on any loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, cast

import pytest
from msgspec.structs import replace

from aiodelay.backends.memory.store import _MemoryWork
from aiodelay.core import transitions as t
from aiodelay.core.dict_table.claims import DictClaiming, LaneHeads
from aiodelay.core.dict_table.entries import Entry, ExpiringDict
from aiodelay.core.dict_table.table import DictTable, Worker
from aiodelay.core.fair_share import FairShare
from aiodelay.core.rules import Rules
from aiodelay.core.values import (
    Cancel,
    Claim,
    Claimed,
    Command,
    Dead,
    Demand,
    Done,
    Lane,
    Outcome,
    Put,
    PutBack,
    Record,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    SourcePosition,
    Stored,
)
from aiodelay.errors import StoreTooNewError
from aiodelay.memory import MemoryStore
from aiodelay.ports import Store, Work
from aiodelay.testing.clock import VirtualClock, VirtualLoop
from aiodelay.testing.conformance import SAME_ID_TABLE, Stage, StoreConformance
from tests.support.versions import VersionedStore


class EarlyLanes(LaneHeads):
    def first_due(self, lanes: Sequence[Lane], now: int) -> Entry | None:
        return super().first_due(lanes, now + 1)


class Early(MemoryStore):
    _order_type = EarlyLanes


class EarlyAfterAStep(MemoryStore):
    def __init__(self, *, clock: VirtualClock, journal: int = 0) -> None:
        super().__init__(clock=clock, journal=journal)
        place = self._table.place
        self._table.place = lambda record, place_ms, sequence: place(  # type: ignore[method-assign]
            record, min(place_ms, self.now_ms() + 10), sequence
        )


class LosingClaims(DictClaiming):
    def return_lapsed(self, now: int, limit: int) -> int:
        for entry in [entry for entry in self._table.leased.values() if t.is_lease_over(entry.token, now)]:
            self._rules.end(entry, now)
        return 0


class Loses(MemoryStore):
    _claiming_type = LosingClaims


class KeepingClaims(DictClaiming):
    def return_lapsed(self, now: int, limit: int) -> int:
        return 0


class KeepsLeases(MemoryStore):
    _claiming_type = KeepingClaims


class TokenlessRules(Rules[Entry]):
    def settle(self, settlement: Settlement, now: int) -> SettleOutcome:
        entry = self.table.find(settlement.id)
        return super().settle(settlement if entry is None else replace(settlement, token=entry.token), now)


class IgnoresTokens(MemoryStore):
    _rules_type = TokenlessRules


class RepeatingClaims(DictClaiming):
    def _lease(self, entry: Entry, token: int, now: int) -> Claim:
        return super()._lease(entry, t.token_for(t.token_deadline_ms(token), 0), now)


class RepeatsTokens(MemoryStore):
    _claiming_type = RepeatingClaims


class OldestRules(Rules[Entry]):
    def put(self, put: Put, row: Entry | None, now: int) -> Outcome:
        if row is not None:
            return Stored("replaced", row.record.revision + 1, row.record.due_ms)
        return super().put(put, row, now)


class OldestWins(MemoryStore):
    _rules_type = OldestRules


class IdleCancels(Rules[Entry]):
    def cancel(self, command: Cancel, row: Entry | None, now: int) -> Outcome:
        if row is not None and row.token:
            return Stored("in_flight", row.record.revision, row.record.due_ms)
        return super().cancel(command, row, now)


class CancelsNothingInFlight(MemoryStore):
    _rules_type = IdleCancels


class ResurrectingRules(Rules[Entry]):
    def settle(self, settlement: Settlement, now: int) -> SettleOutcome:
        entry = self.table.find(settlement.id)
        outcome = super().settle(settlement, now)
        if entry is not None and isinstance(settlement, Done):
            self.table.insert(entry.record, now + 60_000)
        return outcome


class Resurrects(MemoryStore):
    _rules_type = ResurrectingRules


class SharingClaims(DictClaiming):
    def _lease(self, entry: Entry, token: int, now: int) -> Claim:
        claim = super()._lease(entry, token, now)
        self._table.lanes[entry.record.envelope.lane].add(entry)
        return claim


class Shares(MemoryStore):
    _claiming_type = SharingClaims


class LanesOfOneVisit(LaneHeads):
    is_left = False

    def first_due(self, lanes: Sequence[Lane], now: int) -> Entry | None:
        return None if self.is_left else super().first_due(lanes, now)


class EntersOnce(MemoryStore):
    _order_type = LanesOfOneVisit

    async def __aexit__(self, *exc_info: object) -> None:
        cast("LanesOfOneVisit", self._claiming._order).is_left = True


class TrimmingTable(DictTable):
    def place(self, record: Record, place_ms: int, sequence: int) -> None:
        envelope = replace(record.envelope, payload=record.envelope.payload.rstrip(b"\xff"))
        super().place(replace(record, envelope=envelope), place_ms, sequence)


class TrimsPayloads(MemoryStore):
    _table_type = TrimmingTable


class LastFirst(MemoryStore):
    def __init__(self, *, clock: VirtualClock, journal: int = 0) -> None:
        super().__init__(clock=clock, journal=journal)
        self._table.sequence = count(0, -1)


class RulesWithoutOps(Rules[Entry]):
    def apply(self, command: Command, now: int) -> Outcome:
        cast("DictTable", self.table).answers.by_op = ExpiringDict()
        return super().apply(command, now)


class ForgetsOps(MemoryStore):
    _rules_type = RulesWithoutOps


class RulesWithoutRevisions(Rules[Entry]):
    def apply(self, command: Command, now: int) -> Outcome:
        cast("DictTable", self.table).answers.revisions = ExpiringDict()
        return super().apply(command, now)


class ForgetsRevisions(MemoryStore):
    _rules_type = RulesWithoutRevisions


class RulesOfYesterday(Rules[Entry]):
    def apply(self, command: Command, now: int) -> Outcome:
        return super().apply(command, now - 86_400_000)


class NeverForgets(MemoryStore):
    _rules_type = RulesOfYesterday


class NewClaims(DictClaiming):
    def claim_again(self, claims: Sequence[Claim], demand: Mapping[Lane, Demand], now: int) -> Claimed:
        return self.claim(demand, 15_000, 1, Worker("first", (), 0), now)


class NewRequests(MemoryStore):
    _claiming_type = NewClaims


class Asleep(MemoryStore):
    traits = replace(MemoryStore.traits, safety_poll_ms=50)

    def __init__(self, *, clock: VirtualClock, journal: int = 0) -> None:
        super().__init__(clock=clock, journal=journal)
        self._table.workers.wake = lambda: None  # type: ignore[method-assign]


class _ForgetfulWork(_MemoryWork):
    async def wait(self, *, until_ms: int | None) -> None:
        self.clear()
        await super().wait(until_ms=until_ms)


class LosesSignals(MemoryStore):
    traits = replace(MemoryStore.traits, safety_poll_ms=50)

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        yield _ForgetfulWork(self._clock, self._rules, self._claiming, Worker(worker, lanes, self.now_ms()))


class WholeShare(FairShare[Entry]):
    def _fill(self, group: Any, parts: int) -> None:  # noqa: ANN401
        super()._fill(group, 1)


class UnfairClaims(DictClaiming):
    def _share(self, demand: Mapping[Lane, Demand], heads: Any, turn: int, now: int) -> FairShare[Entry]:  # noqa: ANN401
        return WholeShare(demand, heads, turn=turn, most_tried=lambda: self._most_tried(now))


class Unfair(MemoryStore):
    _claiming_type = UnfairClaims


class ClaimsOfOneTurn(DictClaiming):
    def claim(self, demand: Mapping[Lane, Demand], lease_ms: int, turn: int, worker: Worker, now: int) -> Claimed:
        return super().claim(demand, lease_ms, 0, worker, now)


class NoTurns(MemoryStore):
    _claiming_type = ClaimsOfOneTurn


class ClaimsWithoutLeaseEnds(DictClaiming):
    def _next_by_lane(self, lanes: Collection[Lane], now: int) -> dict[Lane, int | None]:
        return {lane: self._order.next_due_ms([lane], now) for lane in lanes}


class ForgetsLeaseEnds(MemoryStore):
    _claiming_type = ClaimsWithoutLeaseEnds


class TrustingClaims(DictClaiming):
    def return_lapsed(self, now: int, limit: int) -> int:
        lapsed = super().return_lapsed(now, limit)
        for entry in self._table.entries.values():
            entry.record = replace(entry.record, lapses=0)
        return lapsed


class TrustsAll(MemoryStore):
    _claiming_type = TrustingClaims


class CountingClaims(DictClaiming):
    def return_lapsed(self, now: int, limit: int) -> int:
        for entry in self._table.leased.values():
            entry.record = replace(entry.record, alone=True)
        return super().return_lapsed(now, limit)


class CountsEveryLapse(MemoryStore):
    _claiming_type = CountingClaims


class ClaimsBesideTrials(DictClaiming):
    def _is_trying(self, now: int) -> bool:
        return False


class TriesBeside(MemoryStore):
    _claiming_type = ClaimsBesideTrials


class ClaimsOfLapsed(DictClaiming):
    def claim(self, demand: Mapping[Lane, Demand], lease_ms: int, turn: int, worker: Worker, now: int) -> Claimed:
        wanted = {lane: replace(each, max_lapses=max(each.max_lapses, 1)) for lane, each in demand.items()}
        return super().claim(wanted, lease_ms, turn, worker, now)


class GivesWhatHasLapsed(MemoryStore):
    _claiming_type = ClaimsOfLapsed


class UndoubtingClaims(DictClaiming):
    def return_lapsed(self, now: int, limit: int) -> int:
        lapsed = super().return_lapsed(now, limit)
        trials = self._table.trials
        trials.set_search(replace(trials.search(), suspected_ms=0))
        return lapsed


class DoubtsNoKill(MemoryStore):
    _claiming_type = UndoubtingClaims


class DoubtingClaims(DictClaiming):
    def return_lapsed(self, now: int, limit: int) -> int:
        lapsed = super().return_lapsed(now, limit)
        trials = self._table.trials
        trials.set_search(replace(trials.search(), suspected_ms=now))
        return lapsed


class DoubtsEveryKill(MemoryStore):
    _claiming_type = DoubtingClaims


class NeverHalves(MemoryStore):
    def __init__(self, *, clock: VirtualClock, journal: int = 0) -> None:
        super().__init__(clock=clock, journal=journal)
        trials = self._table.trials
        trials.group_size = lambda: 2 * len(trials.tried())  # type: ignore[method-assign]


class HearsNobody(MemoryStore):
    def __init__(self, *, clock: VirtualClock, journal: int = 0) -> None:
        super().__init__(clock=clock, journal=journal)
        self._table.trials.is_in_doubt = lambda row, now: False  # type: ignore[method-assign]


class PatientClaims(DictClaiming):
    def _expire_late(self, now: int, limit: int) -> int:
        return 0


class NeverLate(MemoryStore):
    _claiming_type = PatientClaims


class RulesOfOneEnd(Rules[Entry]):
    def settle(self, settlement: Settlement, now: int) -> SettleOutcome:
        ends_series = isinstance(settlement, Dead)
        return super().settle(replace(settlement, then_due_ms=None) if ends_series else settlement, now)


class EndsSeries(MemoryStore):
    _rules_type = RulesOfOneEnd


class RulesOfLongLists(Rules[Entry]):
    def _leave_series(self, message_id: str) -> None:
        pass


class KeepsLiveLists(MemoryStore):
    _rules_type = RulesOfLongLists


class RulesWithoutSeries(Rules[Entry]):
    def _series_of(self, message_id: str) -> tuple[Entry | None, int]:
        return None, 0


class RedrivesApart(MemoryStore):
    _rules_type = RulesWithoutSeries


class RulesThatLeaveRetries(Rules[Entry]):
    def end_retries(self, series_id: str, now: int, *, is_replaced: bool = False) -> bool:
        return False


class LeavesRetries(MemoryStore):
    _rules_type = RulesThatLeaveRetries


class RulesWithoutRetriesInFlight(Rules[Entry]):
    def _has_superseded(self, message_id: str, now: int) -> bool:
        return any(each == message_id for each, _, _ in cast("DictTable", self.table).superseded)


class ForgetsRetriesInFlight(MemoryStore):
    _rules_type = RulesWithoutRetriesInFlight


class _RefusingWork(_MemoryWork):
    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        now = self._clock.now_ms()
        outcomes = await super().renew([each for each in renewals if not t.is_lease_too_long(each.to, now)])
        return outcomes or [RenewOutcome.LOST] * len(renewals)


class RefusesSteps(MemoryStore):
    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        known = Worker(worker, lanes, self.now_ms())
        self._table.workers.add(known)
        yield _RefusingWork(self._clock, self._rules, self._claiming, known)


class ClaimsAtOnce(DictClaiming):
    def _is_over(self, token: int, now: int) -> bool:
        return t.is_lease_over(token, now) or t.is_lease_too_long(token, now)


class TakesAtOnce(MemoryStore):
    _claiming_type = ClaimsAtOnce


class ClaimsByTheClock(DictClaiming):
    def _is_over(self, token: int, now: int) -> bool:
        return t.is_lease_over(token, now)


class WaitsForTheClock(MemoryStore):
    _claiming_type = ClaimsByTheClock


class LooksAtTheEndAlone(MemoryStore):
    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        if source is not None and source.position > (at := self._positions.get(source.source, 0)):
            source = replace(source, first=at)
        return await super().apply(commands, source=source)


class GoesOnWithoutItsPosition(MemoryStore):
    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        return await super().apply(commands, source=source and replace(source, is_stored=False))


class AppliesPassed(MemoryStore):
    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        outcomes = await super().apply(commands, source=source)
        return outcomes if source is None else [*await super().apply(commands[:1]), *outcomes[1:]]


class BusyLanes(LaneHeads):
    def next_due_ms(self, lanes: Iterable[Lane], now: int) -> int | None:
        return min((entry.place_ms for entry in self._table.entries.values()), default=None)


class BusyWhenHeld(MemoryStore):
    _order_type = BusyLanes


class RulesOfLastWord(Rules[Entry]):
    def put_back(self, message: PutBack, now: int) -> Stored:
        row = self.table.find(message.record.id)
        if row is not None:
            self.table.remove(row)
        self.table.insert(message.record, message.due_ms)
        return Stored("stored", message.record.revision, message.record.due_ms)


class PutsBackOverAll(MemoryStore):
    _rules_type = RulesOfLastWord


ROWS = {row.call: row for row in SAME_ID_TABLE}
BITES: list[tuple[type[MemoryStore], str, tuple[object, ...]]] = [
    (Early, "test_s1_never_early", ("at",)),
    (EarlyAfterAStep, "test_s1_holds_when_the_clock_steps_back", ()),
    (Loses, "test_s2_nothing_acknowledged_is_lost", ()),
    (KeepsLeases, "test_s3_expired_lease_is_claimable_again", ()),
    (KeepsLeases, "test_l1_tidy_returns_lapsed_leases", ()),
    (IgnoresTokens, "test_s3_an_old_token_settles_nothing", ()),
    (IgnoresTokens, "test_s4_the_latest_version_wins_over_one_in_flight", ()),
    (RepeatsTokens, "test_s3_every_claim_of_a_message_has_another_token", ()),
    (OldestWins, "test_s4_the_latest_version_wins", ()),
    (OldestWins, "test_same_id_again", ("replace", "in flight", ROWS["replace"].in_flight)),
    (CancelsNothingInFlight, "test_s5_cancelled_in_flight_ends_with_this_attempt", ("again",)),
    (Resurrects, "test_s6_nothing_ended_comes_back", ()),
    (Shares, "test_s7_two_workers_never_hold_the_same_message", ()),
    (EntersOnce, "test_r1_a_store_that_was_left_is_entered_again", ()),
    (TrimsPayloads, "test_s8_payload_arrives_identical", (b"\xff",)),
    (LastFirst, "test_s9_by_due_time_then_scheduling_order", ()),
    (ForgetsOps, "test_a_repeated_put_changes_nothing", ("done",)),
    (ForgetsOps, "test_a_repeated_command_changes_nothing", ("cancel", "pending", "stored again")),
    (ForgetsRevisions, "test_revisions_of_an_id_only_grow", ("done", 0)),
    (NeverForgets, "test_ops_are_remembered_for_the_retry_window_and_then_forgotten", ("put",)),
    (NewRequests, "test_a_claim_repeated_with_its_request_gives_the_same_messages", ()),
    (Asleep, "test_l2_wait_ends_when_a_message_may_be_earlier", ("put",)),
    (LosesSignals, "test_l2_a_signal_between_clear_and_wait_is_not_lost", ()),
    (Unfair, "test_l3_a_flooded_lane_leaves_the_others_their_share", ()),
    (NoTurns, "test_l3_lanes_are_served_first_in_turn", ()),
    (ForgetsLeaseEnds, "test_demand_no_lane_is_said_to_be_due_later_than_it_is", ()),
    (TrustsAll, "test_l5_suspects_are_tried_together_and_without_others", ()),
    (TriesBeside, "test_l5_one_group_of_suspects_is_tried_at_a_time", ()),
    (GivesWhatHasLapsed, "test_l5_a_claim_takes_what_has_lapsed_no_more_often_than_it_asks_for", ()),
    (DoubtsNoKill, "test_l5_kills_are_in_doubt_once_another_message_has_become_a_suspect", ()),
    (DoubtsEveryKill, "test_l5_a_message_that_kills_three_times_alone_is_given_up", ()),
    (NeverHalves, "test_l5_half_of_a_group_that_ended_its_process_is_tried_next", ()),
    (CountsEveryLapse, "test_l5_a_lapse_after_a_trial_is_one_more_and_no_kill", ()),
    (HearsNobody, "test_l5_a_suspect_is_left_to_a_process_that_beats", ()),
    (NeverLate, "test_late_policy", ("retry", "drop", "tidy")),
    (EndsSeries, "test_recurring_dead_letter_never_ends_the_series", ()),
    (KeepsLiveLists, "test_recurring_live_list_shrinks_as_occurrences_end", ("done",)),
    (RedrivesApart, "test_s5_recurring_redriven_occurrence_is_live_and_ends_with_its_series", ()),
    (RedrivesApart, "test_s2_recurring_occurrence_that_stands_again_is_not_redriven", ()),
    (ForgetsRetriesInFlight, "test_same_id_again", ("replace", "retrying", ROWS["replace"].replacing)),
    (ForgetsRetriesInFlight, "test_same_id_again", ("cancel", "replacing a retried", ROWS["cancel"].replacing)),
    (ForgetsRetriesInFlight, "test_s5_a_load_tells_of_an_older_version_in_flight", ("retried",)),
    (LeavesRetries, "test_s4_recurring_replace_ends_retries_of_the_old_series", ("again",)),
    (LeavesRetries, "test_recurring_cancel_ends_the_series_and_its_waiting_retries", ()),
    (RefusesSteps, "test_l1_a_holder_sets_its_lease_right_after_the_clock_stepped_back", ()),
    (TakesAtOnce, "test_l1_a_holder_sets_its_lease_right_after_the_clock_stepped_back", ()),
    (WaitsForTheClock, "test_l1_a_lease_that_nobody_sets_right_after_the_clock_stepped_back_is_returned", ()),
    (AppliesPassed, "test_s3_what_another_has_read_is_refused_whole", (4,)),
    (GoesOnWithoutItsPosition, "test_s2_a_reader_whose_position_is_gone_is_refused", ()),
    (LooksAtTheEndAlone, "test_s3_what_another_has_read_is_refused_whole", (4,)),
    (LooksAtTheEndAlone, "test_s3_what_another_has_read_is_refused_whole", (6,)),
    (BusyWhenHeld, "test_other_addresses_flow_past_a_held_one", ()),
    (PutsBackOverAll, "test_s1_what_is_put_back_is_not_early", ()),
    (PutsBackOverAll, "test_s4_what_is_put_back_takes_nobodys_place", ("pending",)),
    (PutsBackOverAll, "test_s6_a_dead_letter_is_put_back_once", ()),
]


def suite_on(store: type[MemoryStore]) -> StoreConformance:
    class Suite(StoreConformance):
        def make_store(self, clock: VirtualClock, *, journal: int = 0) -> MemoryStore:
            return store(clock=clock, journal=journal)

    return Suite()


@pytest.mark.parametrize(("store", "test", "values"), BITES, ids=lambda value: getattr(value, "__name__", None))
def test_a_store_that_breaks_a_rule_fails_its_test(
    store: type[MemoryStore], test: str, values: tuple[object, ...]
) -> None:
    getattr(suite_on(MemoryStore), test)(*values)
    with pytest.raises((AssertionError, TimeoutError)):
        getattr(suite_on(store), test)(*values)


# --- an ability that the reference store does not have --------------------------------------------------------


class LeavesRenewals(VersionedStore):
    def check(self, step: str) -> None:
        if step != "renew":
            super().check(step)


class ChecksAtOpening(LeavesRenewals):
    def check(self, step: str) -> None:
        if step == "open":
            super().check(step)


class ChecksClaims(LeavesRenewals):
    def check(self, step: str) -> None:
        if step == "claim":
            super().check(step)


class KnowsNothing(LeavesRenewals):
    def check(self, step: str) -> None:
        if self.recorded:
            raise StoreTooNewError(self.name, "uses features", "upgrade this process")


@pytest.mark.parametrize(
    ("store", "test"),
    [
        (ChecksAtOpening, "test_v1_a_version_that_does_not_know_a_feature_claims_nothing"),
        (ChecksClaims, "test_v1_a_version_that_does_not_know_a_feature_returns_no_lease"),
        (ChecksClaims, "test_v1_a_version_that_does_not_know_a_feature_opens_no_dispatching_role"),
        (KnowsNothing, "test_v1_a_version_that_knows_a_feature_goes_on"),
        (VersionedStore, "test_v1_a_claim_from_before_the_switch_is_renewed_and_settled"),
    ],
)
def test_a_store_that_mixes_up_versions_fails_its_test(store: type[VersionedStore], test: str) -> None:
    getattr(suite_on(LeavesRenewals), test)()
    with pytest.raises((AssertionError, StoreTooNewError, pytest.fail.Exception)):
        getattr(suite_on(store), test)()


# --- what a store does not have -----------------------------------------------------------------------------


class Plain(MemoryStore):
    traits = replace(MemoryStore.traits, conflicts=frozenset({"replace"}), cancel="recorded", durable=True)
    bulk_load = None  # type: ignore[assignment]


class PlainSuite(StoreConformance):
    order_per_group = counted_journal = False

    def make_store(self, clock: VirtualClock, *, journal: int = 0) -> MemoryStore:
        return Plain(clock=clock, journal=journal)


@pytest.mark.parametrize(
    ("test", "values", "reason"),
    [
        ("test_same_id_again", ("keep", "pending", ROWS["keep"].pending), "memory:// has no Conflict.keep"),
        ("test_newer_is_judged_by_version_where_the_stored_message_has_none", (), "memory:// has no Conflict.newer"),
        ("test_s5_cancelled_is_never_delivered", (), "memory:// records cancels"),
        ("test_s9_by_due_time_then_scheduling_order", (), "memory:// does not promise an order"),
        ("test_journal_is_trimmed_from_its_oldest_entry", (), "memory:// keeps its journal by age"),
        ("test_l2_wait_ends_by_what_another_process_puts", (), "memory:// does not wake other processes"),
        ("test_a_load_of_anything_else_is_refused_whole", (), "the store loads nothing in bulk"),
        ("test_v1_a_version_that_knows_a_feature_goes_on", (), "memory:// records no features"),
    ],
)
def test_what_a_store_declares_not_to_have_is_skipped_with_the_reason(
    test: str, values: tuple[object, ...], reason: str
) -> None:
    with pytest.raises(pytest.skip.Exception, match=reason):
        getattr(PlainSuite(), test)(*values)


def test_reopening_is_skipped_unless_a_store_is_durable_and_then_demanded() -> None:
    with pytest.raises(pytest.skip.Exception, match="is not durable"):
        suite_on(MemoryStore).test_s2_ops_survive_reopening()
    with pytest.raises(NotImplementedError, match="override reopen"):
        PlainSuite().test_s2_ops_survive_reopening()


def test_a_store_that_says_it_wakes_other_processes_must() -> None:
    class Suite(StoreConformance):
        wakes_other_processes = True

        def make_store(self, clock: VirtualClock, *, journal: int = 0) -> MemoryStore:
            return MemoryStore(clock=clock, journal=journal)

        def reopen(self, store: Store, clock: VirtualClock) -> MemoryStore:
            return MemoryStore(clock=clock)  # one that has nothing to do with the other

        def new_loop(self) -> VirtualLoop:
            return VirtualLoop()

    with pytest.raises(TimeoutError):
        Suite().test_l2_wait_ends_by_what_another_process_puts()


@pytest.mark.parametrize(
    ("test", "values"),
    [("test_s1_never_early", ("at",)), ("test_l2_wait_ends_when_a_message_may_be_earlier", ("put",))],
)
def test_the_suite_runs_on_another_loop(test: str, values: tuple[object, ...]) -> None:
    class Suite(StoreConformance):
        def make_store(self, clock: VirtualClock, *, journal: int = 0) -> MemoryStore:
            return MemoryStore(clock=clock, journal=journal)

        def new_loop(self) -> VirtualLoop:
            return VirtualLoop()

    getattr(Suite(), test)(*values)


@pytest.mark.parametrize("name", ["look", "crew", "holds", "graves", "diary"])
def test_the_store_of_a_stage_has_former_names_that_warn(name: str) -> None:
    stage = Stage(suite_on(MemoryStore))
    with pytest.warns(DeprecationWarning, match=f"stage.{name} is deprecated; use stage.store") as warned:
        assert getattr(stage, name) is stage.store
    assert warned[0].filename == __file__

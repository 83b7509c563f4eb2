"""The suite can fail: each of these stores breaks one rule, and the test of that rule must say so.

And it skips what a store declares not to have, and runs on any loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count

import pytest
from msgspec.structs import replace

from aiodelay import transitions as t
from aiodelay.memory import MemoryStore
from aiodelay.memory.claims import _Group, _Taking
from aiodelay.memory.store import _MemoryWork
from aiodelay.memory.tables import Worker
from aiodelay.memory.waiting import Entry, Remembered
from aiodelay.model import (
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
from aiodelay.ports import Store, Work
from aiodelay.testing.clock import VirtualClock, VirtualLoop
from aiodelay.testing.conformance import SAME_ID_TABLE, Stage, StoreConformance


class Early(MemoryStore):
    def _first_due(self, lanes: Sequence[Lane], now: int) -> Entry | None:
        return super()._first_due(lanes, now + 1)


class EarlyAfterAStep(MemoryStore):
    def _insert(self, record: Record, place_ms: int, sequence: int | None = None) -> None:
        super()._insert(record, min(place_ms, self.now_ms() + 10), sequence)


class Loses(MemoryStore):
    def _return_lapsed(self, now: int, limit: int) -> int:
        for entry in [entry for entry in self._leased.values() if t.is_lease_over(entry.token, now)]:
            self._end(entry, now)
        return 0


class KeepsLeases(MemoryStore):
    def _return_lapsed(self, now: int, limit: int) -> int:
        return 0


class IgnoresTokens(MemoryStore):
    def settle_one(self, settlement: Settlement) -> SettleOutcome:
        entry = self._entries.get(settlement.id)
        return super().settle_one(settlement if entry is None else replace(settlement, token=entry.token))


class RepeatsTokens(MemoryStore):
    def _lease(self, entry: Entry, token: int, now: int) -> Claim:
        return super()._lease(entry, t.token_for(t.token_deadline_ms(token), 0), now)


class OldestWins(MemoryStore):
    def _put(self, put: Put, entry: Entry | None, now: int) -> Outcome:
        if entry is not None:
            return Stored("replaced", entry.record.revision + 1, entry.record.due_ms)
        return super()._put(put, entry, now)


class CancelsNothingInFlight(MemoryStore):
    def _cancel(self, command: Cancel, entry: Entry | None, now: int) -> Outcome:
        if entry is not None and entry.token:
            return Stored("in_flight", entry.record.revision, entry.record.due_ms)
        return super()._cancel(command, entry, now)


class Resurrects(MemoryStore):
    def settle_one(self, settlement: Settlement) -> SettleOutcome:
        entry = self._entries.get(settlement.id)
        outcome = super().settle_one(settlement)
        if entry is not None and isinstance(settlement, Done):
            self._insert(entry.record, self.now_ms() + 60_000)
        return outcome


class Shares(MemoryStore):
    def _lease(self, entry: Entry, token: int, now: int) -> Claim:
        claim = super()._lease(entry, token, now)
        self._lanes[entry.record.envelope.lane].add(entry)
        return claim


class EntersOnce(MemoryStore):
    _is_left = False

    async def __aexit__(self, *exc_info: object) -> None:
        self._is_left = True

    def _first_due(self, lanes: Sequence[Lane], now: int) -> Entry | None:
        return None if self._is_left else super()._first_due(lanes, now)


class TrimsPayloads(MemoryStore):
    def _insert(self, record: Record, place_ms: int, sequence: int | None = None) -> None:
        envelope = replace(record.envelope, payload=record.envelope.payload.rstrip(b"\xff"))
        super()._insert(replace(record, envelope=envelope), place_ms, sequence)


class LastFirst(MemoryStore):
    def __init__(self, *, clock: VirtualClock, journal: int = 0) -> None:
        super().__init__(clock=clock, journal=journal)
        self._sequence = count(0, -1)


class ForgetsOps(MemoryStore):
    def _apply(self, command: Command, now: int) -> Outcome:
        self._answers = Remembered()
        return super()._apply(command, now)


class ForgetsRevisions(MemoryStore):
    def _apply(self, command: Command, now: int) -> Outcome:
        self._revisions = Remembered()
        return super()._apply(command, now)


class NeverForgets(MemoryStore):
    def _apply(self, command: Command, now: int) -> Outcome:
        return super()._apply(command, now - 86_400_000)


class NewRequests(MemoryStore):
    def claim_again(self, claims: Sequence[Claim], demand: Mapping[Lane, Demand]) -> Claimed:
        return self.claim(demand, 15_000, 1, Worker("first", (), 0))


class Asleep(MemoryStore):
    traits = replace(MemoryStore.traits, safety_poll_ms=50)

    def _wake(self) -> None:
        pass


class _ForgetfulWork(_MemoryWork):
    async def wait(self, *, until_ms: int | None) -> None:
        self.clear()
        await super().wait(until_ms=until_ms)


class LosesSignals(MemoryStore):
    traits = replace(MemoryStore.traits, safety_poll_ms=50)

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        yield _ForgetfulWork(self, Worker(worker, lanes, self.now_ms()))


class Unfair(MemoryStore):
    def _fill(self, group: _Group, parts: int, taking: _Taking) -> None:
        super()._fill(group, 1, taking)


class NoTurns(MemoryStore):
    def claim(self, demand: Mapping[Lane, Demand], lease_ms: int, turn: int, worker: Worker) -> Claimed:
        return super().claim(demand, lease_ms, 0, worker)


class TrustsAll(MemoryStore):
    def _return_lapsed(self, now: int, limit: int) -> int:
        lapsed = super()._return_lapsed(now, limit)
        for entry in self._entries.values():
            entry.record = replace(entry.record, lapses=0)
        return lapsed


class CountsEveryLapse(MemoryStore):
    def _return_lapsed(self, now: int, limit: int) -> int:
        for entry in self._leased.values():
            entry.record = replace(entry.record, alone=True)
        return super()._return_lapsed(now, limit)


class TriesBeside(MemoryStore):
    def _is_trying(self, now: int) -> bool:
        return False


class GivesWhatHasLapsed(MemoryStore):
    def claim(self, demand: Mapping[Lane, Demand], lease_ms: int, turn: int, worker: Worker) -> Claimed:
        wanted = {lane: replace(each, max_lapses=max(each.max_lapses, 1)) for lane, each in demand.items()}
        return super().claim(wanted, lease_ms, turn, worker)


class DoubtsNoKill(MemoryStore):
    def _return_lapsed(self, now: int, limit: int) -> int:
        lapsed = super()._return_lapsed(now, limit)
        self._search = replace(self._search, suspected_ms=0)
        return lapsed


class DoubtsEveryKill(MemoryStore):
    def _return_lapsed(self, now: int, limit: int) -> int:
        lapsed = super()._return_lapsed(now, limit)
        self._search = replace(self._search, suspected_ms=now)
        return lapsed


class NeverHalves(MemoryStore):
    def _group(self) -> list[Entry]:
        return self._tried() * 2


class HearsNobody(MemoryStore):
    def _is_in_doubt(self, entry: Entry, now: int) -> bool:
        return False


class NeverLate(MemoryStore):
    def _expire_late(self, now: int, limit: int) -> int:
        return 0


class EndsSeries(MemoryStore):
    def settle_one(self, settlement: Settlement) -> SettleOutcome:
        return super().settle_one(replace(settlement, then_due_ms=None) if isinstance(settlement, Dead) else settlement)


class KeepsLiveLists(MemoryStore):
    def _leave_series(self, message_id: str) -> None:
        pass


class RedrivesApart(MemoryStore):
    def _series_of(self, message_id: str) -> tuple[Entry | None, int]:
        return None, 0


class LeavesRetries(MemoryStore):
    def _end_retries(self, series_id: str, now: int, *, is_replaced: bool = False) -> bool:
        return False


class ForgetsRetriesInFlight(MemoryStore):
    def _has_superseded(self, message_id: str, now: int) -> bool:
        return any(each == message_id for each, _ in self._superseded.get(message_id, {}))


class RefusesSteps(MemoryStore):
    def renew(self, renewal: Renewal) -> RenewOutcome:
        is_refused = t.is_lease_too_long(renewal.to, self.now_ms())
        return RenewOutcome.LOST if is_refused else super().renew(renewal)


class TakesAtOnce(MemoryStore):
    def _is_over(self, token: int, now: int) -> bool:
        return t.is_lease_over(token, now) or t.is_lease_too_long(token, now)


class WaitsForTheClock(MemoryStore):
    def _is_over(self, token: int, now: int) -> bool:
        return t.is_lease_over(token, now)


class LooksAtTheEndAlone(MemoryStore):
    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        if source is not None and source.position > (at := self._positions.get(source.source, 0)):
            source = replace(source, first=at)
        return await super().apply(commands, source=source)


class AppliesPassed(MemoryStore):
    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        outcomes = await super().apply(commands, source=source)
        return outcomes if source is None else [*await super().apply(commands[:1]), *outcomes[1:]]


class BusyWhenHeld(MemoryStore):
    def _next_due_ms(self, demand: Mapping[Lane, Demand]) -> int | None:
        return min((entry.place_ms for entry in self._entries.values()), default=None)


class PutsBackOverAll(MemoryStore):
    def _put_back(self, message: PutBack, now: int) -> Stored:
        self._insert(message.record, message.due_ms)
        return Stored("stored", message.record.revision, message.record.due_ms)


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
    (OldestWins, "test_same_id_again", ("replace", "in flight", SAME_ID_TABLE[0].in_flight)),
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
    (ForgetsRetriesInFlight, "test_same_id_again", ("replace", "retrying", SAME_ID_TABLE[0].replacing)),
    (ForgetsRetriesInFlight, "test_same_id_again", ("cancel", "replacing a retried", SAME_ID_TABLE[8].replacing)),
    (ForgetsRetriesInFlight, "test_s5_a_load_tells_of_an_older_version_in_flight", ("retried",)),
    (LeavesRetries, "test_s4_recurring_replace_ends_retries_of_the_old_series", ("again",)),
    (LeavesRetries, "test_recurring_cancel_ends_the_series_and_its_waiting_retries", ()),
    (RefusesSteps, "test_l1_a_holder_sets_its_lease_right_after_the_clock_stepped_back", ()),
    (TakesAtOnce, "test_l1_a_holder_sets_its_lease_right_after_the_clock_stepped_back", ()),
    (WaitsForTheClock, "test_l1_a_lease_that_nobody_sets_right_after_the_clock_stepped_back_is_returned", ()),
    (AppliesPassed, "test_s3_what_another_has_read_is_refused_whole", (4,)),
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
        ("test_same_id_again", ("keep", "pending", SAME_ID_TABLE[1].pending), "memory:// has no Conflict.keep"),
        ("test_newer_is_judged_by_version_where_the_stored_message_has_none", (), "memory:// has no Conflict.newer"),
        ("test_s5_cancelled_is_never_delivered", (), "memory:// records cancels"),
        ("test_s9_by_due_time_then_scheduling_order", (), "memory:// does not promise an order"),
        ("test_journal_is_trimmed_from_its_oldest_entry", (), "memory:// keeps its journal by age"),
        ("test_l2_wait_ends_by_what_another_process_puts", (), "memory:// does not wake other processes"),
        ("test_a_load_of_anything_else_is_refused_whole", (), "the store loads nothing in bulk"),
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
    with pytest.warns(DeprecationWarning, match=f"stage.{name} is stage.store") as warned:
        assert getattr(stage, name) is stage.store
    assert warned[0].filename == __file__

"""Simulated processes keep the promises under every fault of the network, and the same seed makes the same run.

Their store is a memory store, or a SQLite file whose transactions fail.
Mutants without one load-bearing step each show that the simulation finds such bugs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aiodelay.backends.sqlite.writer import Job, Writer
from aiodelay.core import rules
from aiodelay.core.rules import Rules
from aiodelay.core.values import Claim, Command, Done, Outcome, Put, Settlement, SettleOutcome, Stored, Unknown
from aiodelay.engine.delivery.lease_book import Held, LeaseBook, Taker
from aiodelay.engine.delivery.run_settlements import RunSettlements
from aiodelay.engine.sending.command_sender import CommandSender
from aiodelay.engine.sending.group_commit import GroupCommit
from aiodelay.errors import StoreError
from aiodelay.testing.history import Limits, check
from tests.support.simulation import LANES, simulate

SEEDS, SQLITE_SEEDS = 200, 10
NIGHTLY_SEEDS, PART = 10_000, 1000
MUTANT_SEEDS = 30

each_part_of_the_night = pytest.mark.parametrize("first", range(0, NIGHTLY_SEEDS, PART))


def judge(seeds: range, folder: Path | None = None) -> None:
    """Check the histories of simulations on a memory store, or on SQLite files in a folder.

    The file of a seed that keeps the promises is removed.
    """
    for seed in seeds:
        path = folder and folder / f"{seed}.db"
        try:
            check(simulate(seed, path), Limits(in_order=LANES)).verify()
        except BaseException as error:
            error.add_note(f"the seed of the simulation is {seed}")
            raise
        if path:
            path.unlink()


@pytest.mark.parametrize("first", range(0, SEEDS, 25))  # in parts, which run side by side
def test_promises_hold_in_200_simulations(first: int) -> None:
    judge(range(first, first + 25))


@pytest.mark.storm
@each_part_of_the_night
def test_promises_hold_in_10000_simulations(first: int) -> None:
    judge(range(first, first + PART))


def test_promises_hold_in_10_simulations_of_sqlite(tmp_path: Path) -> None:
    judge(range(SQLITE_SEEDS), tmp_path)


@pytest.mark.storm
@each_part_of_the_night
def test_promises_hold_in_10000_simulations_of_sqlite(first: int, tmp_path: Path) -> None:
    judge(range(first, first + PART), tmp_path)


def test_a_seed_makes_the_same_run_again(tmp_path: Path) -> None:
    for seed in range(3):
        assert msgspec.json.encode(simulate(seed)) == msgspec.json.encode(simulate(seed))
        one, other = (simulate(seed, tmp_path / f"{seed} {n}.db") for n in range(2))
        assert msgspec.json.encode(one) == msgspec.json.encode(other)


# --- mutants ----------------------------------------------------------------------------------------------


def settles_without_a_token(patch: pytest.MonkeyPatch) -> None:
    settle = Rules.settle

    def mutant(self: Rules[Any], settlement: Settlement, now: int) -> SettleOutcome:
        row = self.table.find(settlement.id)
        return settle(self, settlement if row is None else msgspec.structs.replace(settlement, token=row.token), now)

    patch.setattr(Rules, "settle", mutant)


def ends_a_message_with_its_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rules, "lapse", lambda self, row, now: self._end_claimed(row, now))


def carries_out_a_command_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rules, "known_answer", lambda answers, command, row, now: None)


def retries_what_was_cancelled_in_flight(patch: pytest.MonkeyPatch) -> None:
    settle = Rules.settle

    def mutant(self: Rules[Any], settlement: Settlement, now: int) -> SettleOutcome:
        row = self.table.find(settlement.id)
        if row is not None and row.record.no_retry:
            self.table.update(row, msgspec.structs.replace(row.record, no_retry=False))
        return settle(self, settlement, now)

    patch.setattr(Rules, "settle", mutant)


def takes_a_failed_run_for_delivered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        RunSettlements, "after_failure", lambda self, held, error: RunSettlements.after_return(self, held, None)
    )


def takes_an_unknown_outcome_for_stored(patch: pytest.MonkeyPatch) -> None:
    judged = CommandSender._judged

    def mutant(self: CommandSender, command: Command, outcome: Outcome, since_ms: int) -> object:
        is_taken = isinstance(command, Put) and isinstance(outcome, Unknown)
        return judged(self, command, Stored("stored", 1, 1) if is_taken else outcome, since_ms)

    patch.setattr(CommandSender, "_judged", mutant)


def gives_the_answers_of_a_batch_to_other_callers(patch: pytest.MonkeyPatch) -> None:
    send = GroupCommit._send

    async def mutant(self: GroupCommit, batch: list[Any]) -> None:
        futures = [waiting.future for waiting in batch]
        for waiting, future in zip(batch, reversed(futures), strict=True):
            waiting.future = future
        await send(self, batch)

    patch.setattr(GroupCommit, "_send", mutant)


def stops_settling_at_an_error(patch: pytest.MonkeyPatch) -> None:
    async def mutant(self: LeaseBook) -> None:
        while True:
            self._wakeup.clear()
            try:
                due, batch = self.renewals_due(self._held.values()), self.outgoing.batch()
                if due:
                    await self._renew(due)
                elif batch:
                    await self._settle(batch)
                elif self._is_closing:
                    return
                else:
                    await self._wakeup.wait(1)
            except StoreError:
                return

    patch.setattr(LeaseBook, "run", mutant)


def settles_before_the_run(patch: pytest.MonkeyPatch) -> None:
    add = LeaseBook.add

    def mutant(self: LeaseBook, claims: Sequence[Claim], taker: Taker) -> list[Held]:
        added = add(self, claims, taker)
        for held in added:
            record = held.claim.record
            self.settle(held, Done(record.id, record.revision, held.claim.token))
        return added

    patch.setattr(LeaseBook, "add", mutant)


MUTANTS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    settles_without_a_token,
    ends_a_message_with_its_lease,
    carries_out_a_command_twice,
    retries_what_was_cancelled_in_flight,
    takes_a_failed_run_for_delivered,
    takes_an_unknown_outcome_for_stored,
    gives_the_answers_of_a_batch_to_other_callers,
    stops_settling_at_an_error,
    settles_before_the_run,
)


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_mutant_is_found(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, ExceptionGroup)):  # a mutant may also break the scheduler itself
        judge(range(MUTANT_SEEDS))


def test_a_writer_that_acknowledges_a_failed_commit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Writer._attempt

    def mutant(self: Writer, jobs: Sequence[Job[Any]], *, careful: bool) -> object:
        failed = attempt(self, jobs, careful=careful)
        return failed if any(job.answer is None for job in jobs) else None

    monkeypatch.setattr(Writer, "_attempt", mutant)
    with pytest.raises((AssertionError, ExceptionGroup)):
        judge(range(MUTANT_SEEDS), tmp_path)

"""`CommandRules`: rules for `apply`, above all for a repeated id and for a repeated op.

The module `cancelling` has the rules for `Cancel`, and for replaced versions that are still in flight.
"""

# ruff: noqa: D102 - the name of a test states its rule

from __future__ import annotations

from typing import Literal

import pytest

from aiodelay.core.values import (
    RETRY_WINDOW_MS,
    TOMBSTONE_WINDOW_MS,
    After,
    At,
    Cancel,
    Command,
    Conflict,
    Fire,
    Late,
    Outcome,
    Put,
    Refused,
    Reschedule,
    SourcePosition,
    Stored,
)

from .appending import AppendRules
from .cancelling import CancelRules, OldVersionRules
from .gathering import GatheringRules
from .stage import HOUR_MS, OTHER, Bench, Stage, again, dead, done, ending, staged
from .table import SAME_ID_TABLE, Cell

__all__ = ["CommandRules", "MoveRules", "PositionRules", "RepetitionRules", "SameIdRules"]

State = Literal["pending", "in flight", "replacing", "retrying", "replacing a retried", "done", "cancelled", "dead"]

_CONFLICTS = {
    "replace": Conflict.replace(),
    "keep": Conflict.keep(),
    "newer, higher version": Conflict.newer(6),
    "newer, same version": Conflict.newer(5),
    "newer, lower version": Conflict.newer(4),
    "earlier, due before": Conflict.earlier(),
    "earlier, due after": Conflict.earlier(),
    "later, due after": Conflict.later(),
    "later, due before": Conflict.later(),
    "debounce": Conflict.debounce("1s"),
    "throttle, in a window": Conflict.throttle("1m"),
    "throttle last, in a window": Conflict.throttle("1m", last=True),
    "throttle, no window": Conflict.throttle("1m"),
    "throttle last, no window": Conflict.throttle("1m", last=True),
    "append, the same kind": Conflict.append(),
    "append, another kind": Conflict.append(),
    "error": Conflict.error(),
}
_NO_CELLS = {
    ("redrive", "done"),  # there is no dead letter
    ("redrive", "cancelled"),
    ("throttle, in a window", "retrying"),  # a series begins no window
    ("throttle last, in a window", "retrying"),
    ("append, the same kind", "retrying"),  # a series is of another kind
}
_CELLS = [
    pytest.param(row.call, state, cell, id=f"{row.call}-{state}")
    for row in SAME_ID_TABLE
    for state, cell in (
        ("pending", row.pending),
        ("in flight", row.in_flight),
        ("replacing", row.replacing),
        ("retrying", row.replacing),
        ("replacing a retried", row.replacing),
        ("done", row.done),
        ("cancelled", row.done),
        ("dead", row.done),
    )
    if (row.call, state) not in _NO_CELLS
]
RULE = {"e": HOUR_MS}
AFTERWARDS = ("nothing", "claimed", "done", "dead", "again", "replaced", "cancelled", "rescheduled", "fired", "late")
"""The events that may happen to a message between a command and its repetition."""


async def _bring(stage: Stage, call: str, state: State) -> None:
    """Bring the message `m` into the state that a column of the table names."""
    if call == "redrive":
        await stage.stored(stage.put())
        await stage.end(dead(await stage.claim_one()))
    if call == "redrive" and state == "dead":
        return
    conflict = before = Conflict.replace()
    is_replaced = state.startswith("replacing")
    if call.startswith("newer"):
        conflict, before = Conflict.newer(5), Conflict.newer(4 if is_replaced else 5)
    elif call.endswith("in a window"):
        conflict = _CONFLICTS[call]
        before = before if is_replaced else conflict
    stage.needs_conflict(conflict.mode)
    due, rule = After(HOUR_MS if state in ("pending", "cancelled") else 0), RULE if "retr" in state else None
    await stage.stored(stage.put(due=due, conflict=before, rule=rule))
    if state == "cancelled":
        stage.needs_verdict()
        assert isinstance(await stage.do(Cancel(stage.op(), "m")), Stored)
    elif state != "pending":
        claim = await stage.claim_one()
        if rule is not None:
            await stage.end(again(claim, stage.now, then=stage.now + HOUR_MS))
            await stage.claim_one()
        if is_replaced:
            await stage.stored(stage.put(due=After(HOUR_MS), conflict=conflict))
        elif state in ("done", "dead"):
            await stage.end(ending(state, claim, due_ms=stage.now))


async def _happen(stage: Stage, what: str) -> None:
    """Let an event of `AFTERWARDS` happen to the message `m`."""
    match what:
        case "claimed":
            await stage.claim_one()
        case "done":
            await stage.end(done(await stage.claim_one()))
        case "dead":
            await stage.end(dead(await stage.claim_one()))
        case "again":
            await stage.end(again(await stage.claim_one(), stage.now + 1000))
        case "replaced" | "stored again":
            await stage.stored(stage.put(payload=b"another", due=After(HOUR_MS)))
        case "cancelled":
            stage.needs_verdict()
            assert isinstance(await stage.do(Cancel(stage.op(), "m")), Stored)
        case "rescheduled":
            assert isinstance(await stage.do(Reschedule(stage.op(), "m", After(HOUR_MS))), Stored)
        case "fired":
            assert isinstance(await stage.do(Fire(stage.op(), "m")), Stored)
        case "late":
            stage.move(1001)
            await stage.tidy()


class SameIdRules(Bench):
    """The rules for a command whose id is in use already, or was in use."""

    @pytest.mark.parametrize(("call", "state", "cell"), _CELLS)
    @staged
    async def test_same_id_again(self, stage: Stage, call: str, state: State, cell: Cell) -> None:
        await _bring(stage, call, state)
        before = await stage.get()
        outcome = await self._call(stage, call, before.record.revision if before else stage.now)
        assert (outcome.answer if isinstance(outcome, Stored) else outcome.reason) == cell.answer
        if cell.answer == "replaced":
            assert isinstance(outcome, Stored)
            assert outcome.is_older_in_flight is (state != "pending")
        after = await stage.get()
        if cell.stays == "nothing":
            assert after is None
        elif cell.stays == "old":
            assert after is not None
            assert before is not None
            assert after.record.revision == before.record.revision
            assert after.state is before.state
        elif cell.stays == "moved":
            assert after is not None
            assert before is not None
            assert after.record.revision == before.record.revision
            assert after.next_attempt_ms < before.next_attempt_ms
        else:
            assert isinstance(outcome, Stored)
            assert after is not None
            assert after.record.revision == outcome.revision
            assert before is None or after.record.revision > before.record.revision

    @staticmethod
    async def _call(stage: Stage, call: str, revision: int) -> Stored | Refused:
        """Make the call of a row of the table for the message `m`, which has this revision."""
        outcome: Outcome
        word, _, which = call.partition(", ")
        meant = revision + (which == "another")
        if call in _CONFLICTS or word == "if_revision":
            conflict = _CONFLICTS.get(call) or Conflict.if_revision(meant)
            stage.needs_conflict(conflict.mode)
            due = After(2 * HOUR_MS if which == "due after" else conflict.quiet_ms or 1)
            address = "elsewhere" if which == "another kind" else ""
            outcome = await stage.do(stage.put(due=due, conflict=conflict, address=address))
        elif word == "cancel":
            stage.needs_verdict()
            outcome = await stage.do(Cancel(stage.op(), "m", (meant, None) if which else None))
        elif call == "reschedule":
            outcome = await stage.do(Reschedule(stage.op(), "m", After(1)))
        elif call == "fire":
            outcome = await stage.do(Fire(stage.op(), "m"))
        else:
            (letter,) = await stage.dead()
            (outcome,) = await stage.store.redrive([letter.key])
        assert isinstance(outcome, Stored | Refused)
        return outcome

    @staged
    async def test_same_id_in_one_batch(self, stage: Stage) -> None:
        commands: list[Command] = [stage.put(), Cancel(stage.op(), "m"), stage.put(payload=b"2"), Fire(stage.op(), "m")]
        outcomes = await stage.store.apply(commands)
        assert [each.answer for each in outcomes if isinstance(each, Stored)] == [
            "stored",
            "cancelled",
            "stored",
            "fired",
        ]
        assert (await stage.claim_one()).record.envelope.payload == b"2"

    @pytest.mark.parametrize("end", ["done", "dead", "cancelled", "late", "replaced"])
    @staged
    async def test_newer_remembers_the_version_for_24_h(self, stage: Stage, end: str) -> None:
        stage.needs_conflict("newer")
        late = Late.drop("1s") if end == "late" else Late.deliver()
        await stage.stored(stage.put(conflict=Conflict.newer(5), late=late))
        await _happen(stage, end)
        stage.move(TOMBSTONE_WINDOW_MS - 1)
        await stage.tidy()
        assert isinstance(await stage.do(stage.put(conflict=Conflict.newer(5))), Refused)
        stage.move(1)
        await stage.tidy()
        assert isinstance(await stage.do(stage.put(conflict=Conflict.newer(5))), Stored)

    @staged
    async def test_newer_is_judged_by_version_where_the_stored_message_has_none(self, stage: Stage) -> None:
        stage.needs_conflict("newer")
        await stage.stored(stage.put())
        assert isinstance(await stage.do(stage.put(conflict=Conflict.newer(0))), Stored)

    @pytest.mark.parametrize("end", ["replaced", "done", "dead", "cancelled"])
    @pytest.mark.parametrize("back_ms", [0, HOUR_MS], ids=["same ms", "clock stepped back"])
    @staged
    async def test_revisions_of_an_id_only_grow(self, stage: Stage, end: str, back_ms: int) -> None:
        first = await stage.stored(stage.put())
        if end != "replaced":
            await _happen(stage, end)
        stage.step_back(back_ms)
        second = await stage.stored(stage.put())
        assert second.revision > first.revision >= stage.now


class RepetitionRules(Bench):
    """The rules for a command that repeats an op."""

    @pytest.mark.parametrize("afterwards", AFTERWARDS)
    @staged
    async def test_a_repeated_put_changes_nothing(self, stage: Stage, afterwards: str) -> None:
        late = Late.drop("1s") if afterwards == "late" else Late.deliver()
        put = stage.put(due=At(stage.now + (HOUR_MS if afterwards == "fired" else 0)), late=late)
        await self._check_repetition(stage, put, afterwards)

    @pytest.mark.parametrize("afterwards", AFTERWARDS[:-1])
    @staged
    async def test_a_repeated_put_that_replaced_changes_nothing(self, stage: Stage, afterwards: str) -> None:
        await stage.stored(stage.put(payload=b"replaced"))
        await self._check_repetition(stage, stage.put(), afterwards)

    @pytest.mark.parametrize("conflict", [Conflict.keep(), Conflict.error(), Conflict.newer(1)], ids=lambda c: c.mode)
    @pytest.mark.parametrize("afterwards", ["nothing", "claimed", "done", "cancelled", "replaced"])
    @staged
    async def test_a_repeated_put_that_stored_nothing_changes_nothing(
        self, stage: Stage, afterwards: str, conflict: Conflict
    ) -> None:
        stage.needs_conflict(conflict.mode)
        await stage.stored(stage.put(conflict=conflict))
        await self._check_repetition(stage, stage.put(conflict=conflict), afterwards)

    @pytest.mark.parametrize("kind", ["cancel", "reschedule", "fire"])
    @pytest.mark.parametrize("state", ["pending", "in flight", "done"])
    @pytest.mark.parametrize("afterwards", ["nothing", "stored again"])
    @staged
    async def test_a_repeated_command_changes_nothing(
        self, stage: Stage, kind: str, state: State, afterwards: str
    ) -> None:
        if kind == "cancel":
            stage.needs_verdict()
        await _bring(stage, kind, state)
        commands: dict[str, Command] = {
            "cancel": Cancel(stage.op(), "m"),
            "reschedule": Reschedule(stage.op(), "m", After(1000)),
            "fire": Fire(stage.op(), "m"),
        }
        await self._check_repetition(stage, commands[kind], afterwards)

    @staged
    async def test_a_replaced_put_repeated_does_not_resurrect_its_payload(self, stage: Stage) -> None:
        first = stage.put(payload=b"old")
        answer = await stage.stored(first)
        await stage.stored(stage.put(payload=b"new"))
        assert await stage.do(first) == answer
        claim = await stage.claim_one()
        assert claim.record.envelope.payload == b"new"
        await stage.end(done(claim))
        assert await stage.do(first) == answer
        assert await stage.claim() == []

    @staged
    async def test_a_repeated_put_says_again_that_an_older_version_is_in_flight(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        claim = await stage.claim_one()
        put = stage.put(due=After(HOUR_MS))
        first = await stage.do(put)
        await stage.settle(done(claim))
        await stage.stored(stage.put(due=After(HOUR_MS)))
        assert await stage.do(put) == first
        assert isinstance(first, Stored)
        assert first.is_older_in_flight

    @pytest.mark.parametrize("kind", ["put", "cancel"])
    @staged
    async def test_ops_are_remembered_for_the_retry_window_and_then_forgotten(self, stage: Stage, kind: str) -> None:
        put, cancel = stage.put(due=After(HOUR_MS)), Cancel(stage.op(), "m")
        first = [await stage.do(each) for each in (put, cancel)]
        stage.move(RETRY_WINDOW_MS - 1)
        await stage.tidy()
        assert [await stage.do(each) for each in (put, cancel)] == first
        assert await stage.get() is None
        stage.move(2)
        await stage.tidy()
        if kind == "put":
            outcome = await stage.do(put)
            assert isinstance(outcome, Stored)
            assert await stage.get() is not None
        else:
            await stage.stored(stage.put(due=After(HOUR_MS)))
            assert isinstance(await stage.do(cancel), Stored)
            assert await stage.get() is None

    @staged
    async def test_one_batch_may_hold_a_command_and_its_repetition(self, stage: Stage) -> None:
        put, cancel = stage.put(), Cancel(stage.op(), "m")
        outcomes = await stage.store.apply([put, put, cancel, cancel, put])
        assert (outcomes[0], outcomes[2]) == (outcomes[1], outcomes[3])
        assert outcomes[4] == outcomes[0]
        assert await stage.claim() == []

    async def _check_repetition(self, stage: Stage, command: Command, afterwards: str) -> None:
        """Check that a command repeated after another event returns the first answer and writes nothing."""
        first = await stage.do(command)
        await _happen(stage, afterwards)
        before = await stage.picture()
        assert await stage.do(command) == first
        assert await stage.picture() == before


class MoveRules(Bench):
    """The rules for `Reschedule` and `Fire`."""

    @staged
    async def test_reschedule_moves_the_message_and_nothing_else(self, stage: Stage) -> None:
        await stage.stored(stage.put(due=After(5000), late=Late.drop("1s"), key=b"k"))
        before = await stage.record()
        outcome = await stage.do(Reschedule(stage.op(), "m", After(2000)))
        assert outcome == Stored("rescheduled", before.revision, stage.now + 2000)
        after = await stage.record()
        assert (after.due_ms, after.expires_ms) == (stage.now + 2000, stage.now + 3000)
        assert (after.envelope, after.revision, after.op) == (before.envelope, before.revision, before.op)
        stage.move(1999)
        assert await stage.claim() == []
        stage.move(1)
        await stage.claim_one()

    @staged
    async def test_reschedule_gives_a_waiting_retry_a_new_due_time(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        await stage.end(again(await stage.claim_one(), stage.now + HOUR_MS, attempt=3, error="e"))
        await stage.do(Reschedule(stage.op(), "m", After(10)))
        stage.move(10)
        record = (await stage.claim_one()).record
        assert (record.due_ms, record.attempt, record.last_error) == (stage.now, 3, "e")

    @staged
    async def test_fire_makes_it_due_now(self, stage: Stage) -> None:
        await stage.stored(stage.put(due=After(5000)))
        outcome = await stage.do(Fire(stage.op(), "m"))
        assert isinstance(outcome, Stored)
        assert (outcome.answer, outcome.due_ms) == ("fired", stage.now)
        assert (await stage.claim_one()).record.due_ms == stage.now

    @staged
    async def test_fire_keeps_the_due_time_of_a_waiting_retry(self, stage: Stage) -> None:
        due_ms = (await stage.stored(stage.put())).due_ms
        await stage.end(again(await stage.claim_one(), stage.now + HOUR_MS))
        stage.move(1000)
        await stage.do(Fire(stage.op(), "m"))
        assert (await stage.claim_one()).record.due_ms == due_ms

    @staged
    async def test_fire_does_not_push_an_overdue_message_back(self, stage: Stage) -> None:
        stage.needs_order()
        await stage.stored(stage.put("first"))
        stage.move(10)
        await stage.stored(stage.put("second"))
        stage.move(10)
        await stage.do(Fire(stage.op(), "first"))
        assert await stage.ids() == ["first", "second"]


class PositionRules(Bench):
    """The rules for the positions of sources."""

    @staged
    async def test_position_moves_with_the_commands(self, stage: Stage) -> None:
        stage.needs_positions()
        (outcome,) = await stage.store.apply([stage.put("a")], source=SourcePosition("topic 0", 0, 5))
        assert isinstance(outcome, Stored)
        await stage.store.apply([stage.put("b")], source=SourcePosition("topic 1", 2, 2))
        assert [await stage.store.position(f"topic {i}") for i in range(3)] == [5, 2, None]
        assert sorted(await stage.ids()) == ["a", "b"]

    @pytest.mark.parametrize("first", [0, 4, 6])
    @staged
    async def test_s3_what_another_has_read_is_refused_whole(self, stage: Stage, first: int) -> None:
        """The stored position is 5. A batch that begins before it, or after it, comes from an outdated reader."""
        stage.needs_positions()
        await stage.stored(stage.put("kept", After(1)))
        await stage.store.apply([], source=SourcePosition("topic", 3, 5))
        before = await stage.picture()
        commands: list[Command] = [stage.put("a"), Cancel(stage.op(), "kept")]
        outcomes = await stage.store.apply(commands, source=SourcePosition("topic", first, 10))
        assert [each.reason for each in outcomes if isinstance(each, Refused)] == ["passed", "passed"]
        assert (await stage.picture(), await stage.store.position("topic")) == (before, 5)

    @staged
    async def test_s2_a_reader_goes_on_where_its_position_stands(self, stage: Stage) -> None:
        stage.needs_positions()
        steps = [("a", 3, 5), ("b", 5, 9), ("c", 9, 7)]  # 9 to 7: the stream itself was truncated
        for message_id, first, position in steps:
            (outcome,) = await stage.store.apply([stage.put(message_id)], source=SourcePosition("t", first, position))
            assert isinstance(outcome, Stored)
        assert (await stage.store.position("t"), sorted(await stage.ids())) == (7, ["a", "b", "c"])

    @staged
    async def test_s2_a_reader_whose_position_is_gone_is_refused(self, stage: Stage) -> None:
        """A store that has lost its last writes may have lost the first position of a source, too."""
        stage.needs_positions()
        lost = SourcePosition("topic", 5, 9, is_stored=True)
        (outcome,) = await stage.store.apply([stage.put("a")], source=lost)
        assert isinstance(outcome, Refused)
        assert (outcome.reason, await stage.store.position("topic"), await stage.ids()) == ("passed", None, [])
        for first, position in [(0, 5), (5, 9)]:
            step = SourcePosition("topic", first, position, is_stored=first > 0)
            (outcome,) = await stage.store.apply([stage.put(f"m{first}")], source=step)
            assert isinstance(outcome, Stored)
        assert (await stage.store.position("topic"), sorted(await stage.ids())) == (9, ["m0", "m5"])

    @staged
    async def test_a_refused_command_does_not_stop_its_batch(self, stage: Stage) -> None:
        stage.needs_positions(verdict=True)
        stage.needs_conflict("error")
        await stage.stored(stage.put("a", lane=OTHER))
        puts: list[Put] = [stage.put("a", conflict=Conflict.error()), stage.put("b")]
        refused, stored = await stage.store.apply(puts, source=SourcePosition("topic", 0, 1))
        assert (isinstance(refused, Refused), isinstance(stored, Stored)) == (True, True)
        assert await stage.store.position("topic") == 1
        (alone,) = await stage.store.apply(puts[:1], source=SourcePosition("topic", 1, 2))
        assert (alone, await stage.store.position("topic")) == (Refused("duplicate"), 2)


class CommandRules(
    SameIdRules,
    GatheringRules,
    AppendRules,
    RepetitionRules,
    MoveRules,
    PositionRules,
    CancelRules,
    OldVersionRules,
):
    """The rules for `Store.apply`."""

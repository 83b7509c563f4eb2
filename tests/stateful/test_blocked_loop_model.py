"""All interleavings of an event loop, the thread of its pulse, and their store, for one claim that nobody else takes.

The loop and the thread make the calls of one lease book (`engine/delivery/blocked_loop.py`). The loop stands still and
goes on at any time. A call is sent, carried out and answered in three steps, between which anything may happen. Its
answer may be lost, and it may be carried out later. Each control takes one rule away, and a promise must break.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import pytest

from aiodelay.core.values import Claim, Renewal, RenewOutcome, SettleOutcome
from aiodelay.engine.delivery.lease_book import Held, note_outcomes, note_renewal

LAST_TOKEN = 4
MOST_LOST = 2
SETTLED = -1
"""The token of the claim in the store once it is settled."""


def noted(token: int, renewal: tuple[int, int]) -> int:
    """Return the token of a claim after a renewal was answered, by the rule of the lease book."""
    held = held_with(token)
    note_renewal(held, Renewal("m", 1, *renewal), RenewOutcome.RENEWED)
    return held.claim.token


def better(known: SettleOutcome | None, answer: SettleOutcome) -> SettleOutcome | None:
    """Return the outcome of a settlement after another answer, by the rule of the lease book."""
    held = held_with(0)
    held.outcome = known
    note_outcomes([(held, answer)])
    return held.outcome


def held_with(token: int) -> Held:
    nothing = cast("Any", None)  # the rules read the token alone
    return Held(Claim(nothing, token), nothing, nothing, 0)


class Rules(NamedTuple):
    """The rules under test; a control replaces one of them."""

    noted: Callable[[int, tuple[int, int]], int] = noted
    better: Callable[[SettleOutcome | None, SettleOutcome], SettleOutcome | None] = better
    is_lost: Callable[[int, int], bool] = lambda token, asked: token == asked
    repeats: bool = True
    has_lock: bool = True


class Call(NamedTuple):
    """A call on its way: a renewal from `token` to `to`, or a settlement with `token` if `to` is None."""

    token: int
    to: int | None
    answer: RenewOutcome | SettleOutcome | None = None


class State(NamedTuple):
    """A state of the book, of the calls under way, and of the store.

    Attributes:
        stored: The token of the claim in the store.
        token: The token that the book knows.
        last: The last token that was given to a renewal.
        unanswered: The renewal to repeat.
        has_ended: Whether the run has ended.
        outcome: The answer to the settlement.
        late: Calls whose answers were lost, and which the store may still carry out.
        losses: The number of lost answers.
        is_over: Whether the book has dropped the claim.
    """

    is_blocked: bool = False
    stored: int = 0
    token: int = 0
    last: int = 0
    unanswered: tuple[int, int] | None = None
    has_ended: bool = False
    outcome: SettleOutcome | None = None
    of_loop: Call | None = None
    of_thread: Call | None = None
    late: frozenset[Call] = frozenset()
    losses: int = 0
    is_over: bool = False


class BrokenError(Exception):
    """A promise does not hold in some state."""


def following(state: State, rules: Rules) -> Iterator[State]:
    if state.is_over:
        return
    yield state._replace(is_blocked=not state.is_blocked)
    is_free = state.of_thread is None or not rules.has_lock
    if not state.is_blocked:
        if not state.has_ended:
            yield state._replace(has_ended=True)
        if state.of_loop is None and is_free:
            yield from of_loop(state, rules)
        if state.of_loop is not None and state.of_loop.answer is not None and is_free:
            yield after(state, state.of_loop, rules)._replace(of_loop=None)
    if state.of_thread is None:
        for call, chosen in choices(state, rules):
            yield chosen._replace(of_thread=call)
    elif state.of_thread.answer is not None:
        yield after(state, state.of_thread, rules)._replace(of_thread=None)
    yield from of_store(state)


def choices(state: State, rules: Rules) -> Iterator[tuple[Call, State]]:
    """Choose the next call of the book. Either side may make it."""
    if state.unanswered is not None and rules.repeats:
        yield Call(*state.unanswered), state
    elif not state.has_ended:
        if state.last < LAST_TOKEN:
            renewal = state.token, state.last + 1
            yield Call(*renewal), state._replace(last=state.last + 1, unanswered=renewal)
    elif state.outcome is None:
        yield Call(state.token, None), state


def of_loop(state: State, rules: Rules) -> Iterator[State]:
    for call, chosen in choices(state, rules):
        yield chosen._replace(of_loop=call)
    if state.has_ended and state.outcome is not None:
        if state.stored != SETTLED:
            raise BrokenError("the book drops a claim that the store holds")
        if state.outcome is SettleOutcome.GONE and not state.losses:
            raise BrokenError("the book takes its own settlement for a lost lease")
        yield state._replace(is_over=True)


def after(state: State, call: Call, rules: Rules) -> State:
    """Return the state after an answer was noted."""
    if call.to is None:
        assert isinstance(call.answer, SettleOutcome)
        return state._replace(outcome=rules.better(state.outcome, call.answer))
    renewal = call.token, call.to
    unanswered = None if state.unanswered == renewal else state.unanswered
    if call.answer is RenewOutcome.LOST:
        if rules.is_lost(state.token, call.token):
            raise BrokenError("the book takes a claim for lost that nobody else has")
        return state._replace(unanswered=unanswered)
    return state._replace(unanswered=unanswered, token=rules.noted(state.token, renewal))


def of_store(state: State) -> Iterator[State]:
    for stored, losses, late, call in after_call(state, state.of_loop):
        yield state._replace(stored=stored, losses=losses, late=late, of_loop=call)
    for stored, losses, late, call in after_call(state, state.of_thread):
        yield state._replace(stored=stored, losses=losses, late=late, of_thread=call)
    for call in state.late:
        stored, _ = carried_out(state.stored, call)
        yield state._replace(stored=stored, late=state.late - {call})


def after_call(state: State, call: Call | None) -> Iterator[tuple[int, int, frozenset[Call], Call | None]]:
    """Carry a call out, or lose its answer: yield the store's token, the losses, the late calls, and the call."""
    if call is None:
        return
    if call.answer is None:
        stored, answer = carried_out(state.stored, call)
        yield stored, state.losses, state.late, call._replace(answer=answer)
    if state.losses < MOST_LOST:
        late = state.late if call.answer is not None else state.late | {call}
        yield state.stored, state.losses + 1, late, None


def carried_out(stored: int, call: Call) -> tuple[int, RenewOutcome | SettleOutcome]:
    """Return the token in the store after a call, and the answer."""
    if call.to is None:
        return (SETTLED, SettleOutcome.SETTLED) if stored == call.token else (stored, SettleOutcome.GONE)
    return (call.to, RenewOutcome.RENEWED) if stored in (call.token, call.to) else (stored, RenewOutcome.LOST)


def explore(rules: Rules) -> set[State]:
    """Visit every state once, breadth first."""
    seen, waiting = {State()}, deque([State()])
    while waiting:
        for each in following(waiting.popleft(), rules):
            if each not in seen:
                seen.add(each)
                waiting.append(each)
    return seen


def test_l1_b1_whoever_makes_the_calls_the_claim_is_kept_and_settled_once() -> None:
    states = explore(Rules())
    assert any(state.is_over and state.outcome is SettleOutcome.SETTLED for state in states)
    assert any(state.token == LAST_TOKEN for state in states), "nothing was renewed often"


CONTROLS = {
    "a renewal without an answer is not repeated": (Rules(repeats=False), "takes a claim for lost|drops a claim"),
    "the last answer counts": (Rules(noted=lambda _, renewal: renewal[1]), "takes a claim for lost|drops a claim"),
    "an old answer may say that a claim is lost": (Rules(is_lost=lambda *_: True), "takes a claim for lost"),
    "the last outcome counts": (Rules(better=lambda _, answer: answer), "its own settlement"),
    "the loop does not wait for the thread": (Rules(has_lock=False), "takes a claim|its own settlement|drops a claim"),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_the_model_notices_a_missing_rule(control: str) -> None:
    rules, promise = CONTROLS[control]
    with pytest.raises(BrokenError, match=promise):
        explore(rules)

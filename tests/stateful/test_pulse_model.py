"""All interleavings of a worker, an observer and their store, with the rules of `core/pulse.py`.

A *tick* is a second. A worker claims messages, begins their runs, stands still and goes on, or ends. An observer reads
the worker's number and declares the worker dead. The store stands still and goes on. A call is sent, carried out and
answered in three steps, between which anything may happen. Each control takes one rule away, and a promise must break.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import pytest
from msgspec import structs

from aiodelay.core import pulse

TICK_MS = 1_000
LAST_TICK, NIGHTLY_LAST_TICK = 4, 5
"""The gate's ways are long enough to find each control. The nightly run visits more than twice as many states."""
MOST_STATES = 2_000_000
WORKER = "w"
MISSING = -2
"""The answer to a question if the store has no number."""


class Rules(NamedTuple):
    """The rules under test, and the length of a way in ticks; a control replaces one of the rules."""

    may_begin: Callable[[pulse.Life, int], bool] = pulse.may_begin
    lives: Callable[[int | None, int], bool] = pulse.lives
    answered: Callable[[pulse.Watch, Mapping[str, int], int, int], pulse.Watch] = pulse.answered
    registered: Callable[[pulse.Life, int, int], pulse.Life] = pulse.registered
    dies_with: Callable[[int, int], bool] = lambda stored, seen: stored == seen
    waits_for_calls: bool = True
    last_tick: int = LAST_TICK


class Call(NamedTuple):
    """A call on its way.

    Attributes:
        sent_ms: When it was sent.
        is_registered: Of a claim: the worker knows that the store holds its number.
        number: Of a pulse: the last number that the worker knows.
        answer: The number in the answer; None until the store has carried the call out.
        takes: Of a claim: it has taken the message.
        is_late: The worker has a new incarnation since it sent the call.
    """

    sent_ms: int
    is_registered: bool = False
    number: int = 0
    answer: int | None = None
    takes: bool = False
    is_late: bool = False


class State(NamedTuple):
    """A state of the worker, the observer and the store, which holds one message.

    Attributes:
        worker: `up`, `stopped` or `ended`.
        is_stalled: Whether the store stands still.
        life: The worker's `pulse.Life`, as a tuple.
        has: Whether the worker knows that it has claimed the message.
        message: `free`; `held` by the worker's claim; or `returned` by the death of its incarnation.
        stored: The worker's number in the store.
        has_ghost: Whether a copy of the first claim is still on its way: the worker has sent it twice.
        watch: The observer's `pulse.Watch`, as a tuple.
        still_ms: The time since the number last changed.
        has_claimed: Whether the worker has sent its claim.
        trouble: The one fault that has happened: `stop` of the worker, `stall` of the store, or `pause`, which stops
            worker and observer.
    """

    tick: int = 0
    worker: str = "up"
    is_stalled: bool = False
    life: tuple[bool, int, float] = (False, 0, pulse.ALWAYS)
    has: bool = False
    message: str = "free"
    stored: int | None = None
    claim: Call | None = None
    has_ghost: bool = False
    beat: Call | None = None
    question: Call | None = None
    watch: tuple[float, int, tuple[tuple[int, int], ...]] = (pulse.NEVER, 0, ())
    still_ms: int = 0
    has_claimed: bool = False
    trouble: str = ""

    @property
    def now_ms(self) -> int:
        return self.tick * TICK_MS


class BrokenError(Exception):
    """A promise does not hold in some state."""


def watch_of(state: State) -> pulse.Watch:
    asked_ms, answered_ms, seen = state.watch
    return pulse.Watch(asked_ms, answered_ms, {WORKER: pulse.Sighting(*seen[0])} if seen else {})


def with_life(state: State, life: pulse.Life) -> State:
    return state._replace(life=(life.is_registered, life.number, life.begin_until_ms))


# --- the steps --------------------------------------------------------------------------------------------


def following(state: State, rules: Rules) -> Iterator[State]:
    if state.worker == "ended" and state.message != "held":
        return  # nothing more can go wrong
    if state.tick < rules.last_tick and not is_owed(state, rules):
        yield later(state, 1)
    if state.tick + 3 <= rules.last_tick and not state.trouble:
        yield later(state, 3)._replace(trouble="pause")
    if state.worker == "up":
        yield from of_worker(state, rules)
        if not state.trouble:
            yield state._replace(worker="ended")
            yield state._replace(worker="stopped", trouble="stop")
    elif state.worker == "stopped":
        yield state._replace(worker="up")
    if state.is_stalled:
        yield state._replace(is_stalled=False)
    else:
        yield from of_store(state, rules)
        if not state.trouble:
            yield state._replace(is_stalled=True, trouble="stall")
    yield from of_observer(state, rules)


def later(state: State, ticks: int) -> State:
    return state._replace(tick=state.tick + ticks, still_ms=state.still_ms + ticks * TICK_MS)


def is_owed(state: State, rules: Rules) -> bool:
    """Return whether something must happen before the tick ends: the threads are punctual, and so is the store."""
    if not state.has_claimed:
        return True
    if state.is_stalled:
        return False
    if state.worker == "up" and state.still_ms and (state.life[0] or state.claim is not None):
        return True
    if state.stored is None:
        return False
    is_asked = state.question is not None and state.question.sent_ms == state.now_ms
    is_answered = state.watch[0] == state.now_ms
    is_observed = is_answered or (is_asked and state.worker != "ended")
    return not is_observed or bool(deaths(state, rules))


def of_worker(state: State, rules: Rules) -> Iterator[State]:
    life, now_ms = pulse.Life(*state.life), state.now_ms
    if life.begin_until_ms == pulse.NEVER and not (rules.waits_for_calls and state.claim is not None):
        claim = None if state.claim is None else state.claim._replace(is_late=True)
        message = "free" if state.has and state.message == "held" else state.message
        yield with_life(state, pulse.Life())._replace(has=False, message=message, claim=claim, beat=None)
    if state.has and state.message != "held" and rules.may_begin(life, now_ms):
        raise BrokenError("the worker begins a run of a message that its death has returned")
    if not state.has_claimed and rules.may_begin(life, now_ms):
        yield state._replace(claim=Call(now_ms, is_registered=life.is_registered), has_claimed=True)
    if life.is_registered and state.beat is None and life.begin_until_ms < now_ms + pulse.BEGIN_MS:
        yield state._replace(beat=Call(now_ms, number=life.number))
    yield from answers(state, rules)


def answers(state: State, rules: Rules) -> Iterator[State]:
    """Let the worker read an answer."""
    life, claim, beat = pulse.Life(*state.life), state.claim, state.beat
    if claim is not None and claim.answer is not None:
        known = state if claim.is_late else with_life(state, after_answer(life, claim, rules))
        yield known._replace(claim=None, has=state.has or claim.takes)
    if beat is not None and beat.answer is not None:
        yield with_life(state, after_answer(life, beat, rules))._replace(beat=None)


def after_answer(life: pulse.Life, call: Call, rules: Rules) -> pulse.Life:
    assert call.answer is not None
    if call.answer == pulse.DEAD:
        return pulse.refused(life)
    is_news = call.answer and life.begin_until_ms != pulse.NEVER
    return rules.registered(life, call.answer, call.sent_ms) if is_news else life


def of_store(state: State, rules: Rules) -> Iterator[State]:
    """Carry out a call that has arrived. The scripts `claim.lua` and `pulse.lua` do the same."""
    claim, beat = state.claim, state.beat
    if claim is not None and claim.answer is None and not claim.is_late:
        is_open = not claim.is_registered if state.stored is None else state.stored > pulse.DEAD
        if not is_open:
            yield state._replace(claim=claim._replace(answer=pulse.DEAD))
        elif state.message != "free":
            yield state._replace(claim=claim._replace(answer=0))
        elif claim.is_registered:
            yield state._replace(claim=claim._replace(answer=0, takes=True), message="held")
        else:
            number = increased(state)
            answered = claim._replace(answer=number, takes=True)
            yield state._replace(claim=answered, stored=number, message="held", still_ms=0, has_ghost=True)
    if state.has_ghost:
        yield state._replace(stored=increased(state), has_ghost=False, still_ms=0)
    if beat is not None and beat.answer is None:
        if rules.lives(state.stored, beat.number):
            number = increased(state)
            yield state._replace(beat=beat._replace(answer=number), stored=number, still_ms=0)
        else:
            yield state._replace(beat=beat._replace(answer=pulse.DEAD))
    if state.question is not None and state.question.answer is None:
        answer = MISSING if state.stored is None else state.stored
        yield state._replace(question=state.question._replace(answer=answer))


def increased(state: State) -> int:
    """Return the next number. A new number is the store's time."""
    return (state.now_ms if state.stored is None else state.stored) + 1


def of_observer(state: State, rules: Rules) -> Iterator[State]:
    question, now_ms = state.question, state.now_ms
    if question is None and state.watch[0] != now_ms and state.stored is not None:
        yield state._replace(question=Call(now_ms))
    if question is not None and question.answer is not None:
        numbers = {} if question.answer == MISSING else {WORKER: question.answer}
        after = rules.answered(watch_of(state), numbers, question.sent_ms, now_ms)
        seen = tuple((each.number, each.since_ms) for each in after.seen.values())
        yield state._replace(question=None, watch=(after.asked_ms, after.answered_ms, seen))
    if deaths(state, rules):
        if state.worker == "up" and state.trouble != "stop" and state.message != "returned":
            raise BrokenError("a worker that never stood still is declared dead")
        is_first = state.message != "returned"
        if is_first and state.worker == "up" and state.still_ms < pulse.DEATH_MS - TICK_MS:
            raise BrokenError("a worker whose number has just changed is declared dead")
        message = "returned" if state.message == "held" else state.message
        yield state._replace(stored=None, message=message)


def deaths(state: State, rules: Rules) -> list[int]:
    """Return the numbers with which the observer now declares the worker dead, and the store agrees."""
    if state.is_stalled or state.stored is None:
        return []
    stopped = watch_of(state).stopped()
    return [number for _, number in stopped if rules.dies_with(state.stored, number)]


def check(state: State) -> None:
    if state.worker == "ended" and not state.trouble and state.message == "held" and state.still_ms > 4 * TICK_MS:
        raise BrokenError("the message of a worker that has ended was not returned")


def explore(rules: Rules, take: Callable[[deque[State]], State] = deque.popleft) -> set[State]:
    """Visit every state once, for a worker without and with a number. A broken promise names its way.

    Args:
        take: Takes the next state. Breadth first finds the shortest way to a broken promise, depth first a way soon.
    """
    firsts = State(), State(life=(True, 1, pulse.BEGIN_MS), stored=1)
    came_from: dict[State, State | None] = dict.fromkeys(firsts)
    waiting = deque(firsts)
    while waiting:
        state = take(waiting)
        try:
            check(state)
            after = list(following(state, rules))
        except BrokenError as error:
            way: list[State] = []
            at: State | None = state
            while at is not None:
                way.append(at)
                at = came_from[at]
            error.add_note("\n".join(map(str, reversed(way))))
            raise
        for each in after:
            if each not in came_from:
                came_from[each] = state
                waiting.append(each)
        assert len(came_from) < MOST_STATES
    return set(came_from)


# --- the rules and the controls ---------------------------------------------------------------------------


@pytest.mark.parametrize("ticks", [LAST_TICK, pytest.param(NIGHTLY_LAST_TICK, marks=pytest.mark.nightly)])
def test_b1_b2_no_run_begins_after_a_death_and_only_who_stood_still_is_declared_dead(ticks: int) -> None:
    states = explore(Rules(last_tick=ticks))
    assert any(state.message == "returned" for state in states), "nobody died"
    assert any(state.has for state in states), "nothing was claimed"


def since_the_question(watch: pulse.Watch, numbers: Mapping[str, int], asked_ms: int, answered_ms: int) -> pulse.Watch:
    """Begin a time when the question was sent."""
    after = pulse.answered(watch, numbers, asked_ms, answered_ms)
    begun = {name: each.since_ms == answered_ms for name, each in after.seen.items()}
    seen = {
        name: structs.replace(each, since_ms=asked_ms) if begun[name] else each for name, each in after.seen.items()
    }
    return structs.replace(after, seen=seen)


def over_gaps(watch: pulse.Watch, numbers: Mapping[str, int], asked_ms: int, answered_ms: int) -> pulse.Watch:
    """Go on with all times after a gap."""
    return pulse.answered(structs.replace(watch, asked_ms=asked_ms), numbers, asked_ms, answered_ms)


BEGINS = "begins a run"
CONTROLS = {
    "a run may always begin": (Rules(may_begin=lambda life, _: life.begin_until_ms != pulse.NEVER), BEGINS),
    "a run may begin for longer than it takes to be declared dead": (
        Rules(registered=lambda life, number, sent_ms: pulse.registered(life, number, sent_ms + 2 * TICK_MS)),
        BEGINS,
    ),
    "a time begins with the question": (Rules(answered=since_the_question), f"{BEGINS}|never stood still"),
    "times go on over gaps": (Rules(answered=over_gaps), "never stood still"),
    "death does not compare the number": (Rules(dies_with=lambda *_: True), "has just changed|never stood still"),
    "a new number revives an old incarnation": (Rules(lives=lambda stored, _: stored is not None), BEGINS),
    "a new incarnation does not wait for the claim on its way": (Rules(waits_for_calls=False), BEGINS),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_the_model_notices_a_missing_rule(control: str) -> None:
    rules, promise = CONTROLS[control]
    with pytest.raises(BrokenError, match=promise):
        explore(rules, take=deque.pop)

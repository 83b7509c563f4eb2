"""Vectors: the answer of the rulebook to every step in every state of one message.

`states` finds the states by breadth-first search, with one short way (a list of steps) into each. A case is such a way,
then any one step, then one more step. `vector_store.py` plays many cases on a store at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aiodelay.core.values import Lane
from tests.support.vector_rulebook import Action, Play, Seen
from tests.support.vector_steps import LEAPS, PAUSED, STEPS, UNTIDIED

__all__ = ["Case", "case_of", "cases_of", "states"]

ASKED_AFTER = (
    *("claim", "repeat the last command", "cancel", "put newer, low"),
    *("first done", "done", "put", "renew"),
)
"""The last steps of cases. Their answers reveal most of the state that cannot be read."""
RARE = ("put back the occurrence", "put back, low", "put series newer, low")
ON_THE_WAY = tuple(name for name in STEPS if name not in RARE)
"""The steps that lead into states. With the other steps, there would be three times as many states."""
DEEP = (
    ("put series", "claim", "again, then", "fire", "claim", "cancel the occurrence", "leases end"),
    ("put series", "claim", "again, then", "claim", "cancel", "put far"),
    ("put series", "claim", "dead", "redrive", "put far"),
    ("put series", "put back the occurrence"),
    ("put newer, high", "cancel", "leases end", "leases end"),
    ("put", "claim", "put", "leases end"),
    ("put", "claim", "put", "cancel", "done"),
    ("append", "claim", "append", "append far, until there are two"),
    ("append", "claim", "cancel", "append"),
    ("append", "claim", "append", "leases end", "claim"),
    ("append", "leases end", "claim", "leases end", "claim", "leases end", "claim", "append"),
)
"""Ways into important states that the search misses: they are too long, or too similar to others."""


@dataclass(frozen=True)
class Case:
    """A way into a state, one step, and one more step.

    Attributes:
        id: The id of the message. Retries of a series have other ids.
        lanes: The lanes of the case.
        actions: One action for each step.
        seen: The readable state after the last step but one, and after the last step.
        is_paused: Whether the address `PARKED` is paused.
        has_lapses: Whether a claim must end lapsed leases, because no worker has tidied before.
        shape: Cases with the same shape can be played at once: their leases end at the same steps, counted from the
            last step.
    """

    id: str
    lanes: tuple[Lane, Lane]
    actions: tuple[Action, ...]
    seen: tuple[Seen, Seen]
    is_paused: bool
    has_lapses: bool
    shape: tuple[object, ...]

    @property
    def steps(self) -> tuple[str, ...]:
        """The names of the steps."""
        return tuple(action.step for action in self.actions)

    def __str__(self) -> str:
        return ", ".join(f"'{step}'" for step in self.steps)


def played(
    steps: Iterable[str], number: int = 1, lanes: tuple[Lane, Lane] = ("a", "b"), *, has_journal: bool = False
) -> Play:
    """Play steps on a new rulebook."""
    play = Play(number, lanes, has_journal=has_journal)
    play.hold()
    for name in steps:
        play.step(name, STEPS[name])
    return play


def states(*, depth: int, detailed: int) -> list[tuple[str, ...]]:
    """Return the shortest way into each state that can be reached.

    Args:
        depth: The most steps of a way.
        detailed: For this number of steps, states are compared in detail; after that, roughly.
    """
    ways: dict[object, tuple[str, ...]] = {played(()).state(): ()}
    outlines = {played(()).outline()}
    left = deque(ways.values())
    while left:
        before = left.popleft()
        if len(before) == depth:
            continue
        for name in ON_THE_WAY:
            way = (*before, name)
            play = played(way)
            state, outline = play.state(), play.outline()
            if outline not in outlines or (len(way) <= detailed and state not in ways):
                ways[state] = way
                left.append(way)
            outlines.add(outline)
    return list(dict.fromkeys([*ways.values(), *DEEP]))


def cases_of(ways: Sequence[tuple[str, ...]], *, has_journal: bool = False, every: int = 1) -> list[Case]:
    """Return a case for each step in each state.

    Args:
        ways: The ways into the states.
        has_journal: Whether the cases keep journals.
        every: Return only every n-th case.
    """
    numbers = range(0, len(ways) * len(STEPS), every)
    names = list(STEPS)
    cases: list[Case] = []
    for number in numbers:
        of_state, of_step = divmod(number, len(names))
        last = ASKED_AFTER[(of_state + of_step) % len(ASKED_AFTER)]
        cases.append(case_of((*ways[of_state], names[of_step], last), number + 1, has_journal=has_journal))
    return cases


def case_of(steps: tuple[str, ...], number: int = 1, *, has_journal: bool = False) -> Case:
    """Return the case of these steps.

    Args:
        steps: The names of the steps, at least one.
        number: The number of the case, which is part of its message id.
        has_journal: Whether the case keeps a journal.
    """
    named = list(zip(range(len(steps), 0, -1), steps, strict=True))
    claims = tuple(at for at, name in named if name == "claim")
    leaps = tuple((at, name) for at, name in named if name in LEAPS)
    pattern = ".".join(map(str, claims))
    lanes = (f"usual {pattern}", f"other {pattern}")
    play = played(steps[:-1], number, lanes, has_journal=has_journal)
    before = play.seen()
    play.step(steps[-1], STEPS[steps[-1]])
    first_untidied = max((at for at, name in leaps if name == UNTIDIED), default=0)
    has_lapses = any(at < first_untidied for at in claims)
    is_paused = PAUSED in steps
    shape = (leaps, claims if has_lapses else (), is_paused, number if play.has_suspects else 0)
    return Case(play.id, lanes, tuple(play.actions), (before, play.seen()), is_paused, has_lapses, shape)

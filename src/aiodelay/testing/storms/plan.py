"""`Plan`: the faults of one seed. At each place of a test, it says whether a fault strikes there, and which fault."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

from aiodelay.core.durations import format_duration

__all__ = ["ORDER", "CommandStep", "Fault", "Kind", "Place", "Plan", "Step"]

CommandStep: TypeAlias = Literal["schedule", "cancel", "reschedule", "fire"]
"""A command, whose request or reply can be lost."""

Step: TypeAlias = Literal["claim", "run", "settle", CommandStep, "order"]
"""A step of a message at which a fault can strike."""

Kind: TypeAlias = Literal["late", "clock_back", "clock_forward", "cut", "crash", "repeat", "request_lost", "reply_lost"]

_KINDS: Mapping[Step, tuple[Kind, ...]] = {
    "claim": ("late", "clock_back", "clock_forward"),
    "run": ("cut",),
    "settle": ("crash", "repeat"),
    **dict.fromkeys(get_args(CommandStep), ("request_lost", "reply_lost")),
}
_NUMBERED: Mapping[Step, str] = {"claim": "delivery", "settle": "run"}
_TEXTS: Mapping[Kind, str] = {
    "late": "{place}: it comes {ms} late",
    "clock_back": "{place}: before it, the clock is set back by {ms}",
    "clock_forward": "{place}: before it, the clock is set forward by {ms}",
    "cut": "{place}: the process ends while the handler waits at its await number {awaits}",
    "crash": "{place}: the process ends after the handler, before the settlement is stored",
    "repeat": "{place}: the same delivery is repeated {ms} later",
    "request_lost": "{place}: the store does not get the request, and the caller cannot know this",
    "reply_lost": "{place}: the store carries out the request, but its reply is lost",
}
_ENABLED = 0.6
"""The probability that a seed uses a kind of fault: a storm of few kinds finds what a storm of all kinds hides."""
_PROBABILITIES = (0.05, 0.2, 0.5)
_SHUFFLED = 0.75
_LEAST_MS = 10


class Place(NamedTuple):
    """A place of a test at which a fault can strike: a step, a message, and how often the message came to the step."""

    step: Step
    message: str
    n: int

    def __str__(self) -> str:
        if self.step == "order":
            return "the tasks that are ready run in another order"
        return f"{_NUMBERED.get(self.step, self.step)} {self.n} of {self.message}"


ORDER = Place("order", "", 0)
"""The place of the order of the tasks, the only fault without a message."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that strikes at a place.

    Attributes:
        place: The place.
        kind: The kind of the fault.
        ms: The delay, or the step of the clock, in milliseconds.
        awaits: The number of awaits that the handler gets over before it is cut.
    """

    place: Place
    kind: Kind
    ms: int
    awaits: int

    def __str__(self) -> str:
        return _TEXTS[self.kind].format(place=self.place, ms=format_duration(self.ms), awaits=self.awaits + 1)


class Plan:
    """The faults of one seed.

    The fault at a place depends only on the seed and the place. So a run with fewer faults has no others.

    Args:
        seed: Chooses the faults, and the order of the tasks.
        lasting_ms: The longest delay, and the largest step of the clock.
        only: The places at which faults may strike; None = all places.
    """

    def __init__(self, seed: int, lasting_ms: int, only: Collection[Place] | None = None) -> None:
        self._seed, self._lasting_ms, self._only = seed, lasting_ms, only
        chance = random.Random(seed)
        self._kinds = {kind for kind in get_args(Kind) if chance.random() < _ENABLED}
        self._probability = chance.choice(_PROBABILITIES)
        shuffles = chance.random() < _SHUFFLED
        self.order_seed: int | None = seed if shuffles and self._may_strike(ORDER) else None

    def _may_strike(self, place: Place) -> bool:
        return self._only is None or place in self._only

    def fault(self, place: Place) -> Fault | None:
        """Return the fault that strikes at a place, or None."""
        if not self._may_strike(place):
            return None
        chance = random.Random(f"{self._seed} {' '.join(map(str, place[::2]))} {place.message}")
        kinds = [kind for kind in _KINDS[place.step] if kind in self._kinds]
        if not kinds or chance.random() >= self._probability:
            return None
        ms = round(_LEAST_MS * (self._lasting_ms / _LEAST_MS) ** chance.random())
        return Fault(place, chance.choice(kinds), ms, int(chance.expovariate(0.7)))

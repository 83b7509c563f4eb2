"""The rules by which other processes notice that a process has ended. Pure: a model test plays all interleavings.

A process that holds claims has a *pulse*: a number in the store that a thread of the process increases about once a
second. The number belongs to an *incarnation* of the process. If the number stands still, another process declares the
incarnation dead, and the store returns its claimed messages before their leases end.

A process that only stood still may go on after that. The rules make sure of two things: a process whose store answers
is not declared dead while its thread runs, and after its death a process begins no run of a message that it had
claimed before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

__all__ = [
    "AGAIN_MS",
    "ALWAYS",
    "ANSWER_MS",
    "BEGIN_MS",
    "DEAD",
    "DEATH_MS",
    "GAP_MS",
    "MOST_UNANSWERED",
    "NEVER",
    "PULSE_MS",
    "QUIET_MS",
    "Life",
    "Sighting",
    "Watch",
    "answered",
    "lives",
    "may_begin",
    "refused",
    "registered",
]

PULSE_MS = 750
"""The interval at which a process increases its number and reads the numbers of others."""
QUIET_MS = 30_000
"""The interval while a process holds no claims, and knows of no other process that does. A claim ends the wait."""
DEATH_MS = 3_000
"""A process whose number has not changed for this time is declared dead."""
BEGIN_MS = DEATH_MS - 50
"""A run may begin until this time after the process sent its last number that was answered. Clocks differ a little."""
ANSWER_MS = 1_000
"""Longest wait for an answer."""
AGAIN_MS = 250
"""The wait after a question that was not answered in time."""
GAP_MS = 1_500
"""Longest time from a question to the answer of the next question. After a longer gap, all times begin again."""
NEVER: float = -math.inf
ALWAYS: float = math.inf
MOST_UNANSWERED = 1_000
"""A process may miss fewer answers than this in a row, each of which has increased its number."""
DEAD = -1
"""The number of an incarnation that was declared dead, while the store still returns its messages."""


# --- what a process knows of others -----------------------------------------------------------------------


class Sighting(Struct, frozen=True):
    """The number of an incarnation, and when this process first read that number, in its monotonic time."""

    number: int
    since_ms: int


class Watch(Struct, frozen=True):
    """The numbers that a process has read.

    Attributes:
        asked_ms: When this process sent the last question that was answered. `NEVER`: all times begin again.
        answered_ms: When the answer arrived.
        seen: The sightings by incarnation.
    """

    asked_ms: float = NEVER
    answered_ms: int = 0
    seen: Mapping[str, Sighting] = {}

    def stopped(self) -> list[tuple[str, int]]:
        """Return the incarnations to declare dead, each with the number that has stood still.

        The time until the last answer counts, and not the time since then, in which this process may have stood still.
        """
        return [
            (name, each.number)
            for name, each in self.seen.items()
            if each.number == DEAD or self.answered_ms - each.since_ms >= DEATH_MS
        ]

    def wait_ms(self, now_ms: int) -> int:
        """Return how long to wait with the next question, at most until an incarnation may be declared dead."""
        ends = [each.since_ms + DEATH_MS - now_ms for each in self.seen.values()]
        return min([PULSE_MS, *(each for each in ends if each > 0)])


def answered(watch: Watch, numbers: Mapping[str, int], asked_ms: int, answered_ms: int) -> Watch:
    """Return what a process knows after an answer of the store.

    A time begins when the answer arrives, not when the question was sent: the process to judge may have sent its last
    number between the two. All times begin again if the answer came long after the previous question: the store or this
    process may have stood still, and the other process with it.

    Args:
        watch: What the process knew before.
        numbers: The numbers by incarnation, without this process's own.
        asked_ms: When the process sent the question, in its monotonic time.
        answered_ms: When the answer arrived.
    """
    is_continued = answered_ms - watch.asked_ms <= GAP_MS
    seen: dict[str, Sighting] = {}
    for name, number in numbers.items():
        before = watch.seen.get(name) if is_continued else None
        seen[name] = before if before is not None and before.number == number else Sighting(number, answered_ms)
    return Watch(asked_ms, answered_ms, seen)


# --- what a process knows of itself -----------------------------------------------------------------------


class Life(Struct, frozen=True):
    """What a process knows of its present incarnation.

    Attributes:
        is_registered: Whether the store holds a number for it. If not, nobody can declare it dead.
        number: The last number that the store has answered.
        begin_until_ms: No run may begin after this monotonic time. `NEVER`: the store has refused it.
    """

    is_registered: bool = False
    number: int = 0
    begin_until_ms: float = ALWAYS


def registered(life: Life, number: int, sent_ms: int) -> Life:
    """Return the state after the store has increased the number to `number` for a call that was sent at `sent_ms`.

    Another process sees this number after `sent_ms`, and must then wait for `DEATH_MS` before it declares death.
    """
    return Life(is_registered=True, number=max(number, life.number), begin_until_ms=sent_ms + BEGIN_MS)


def refused(life: Life) -> Life:
    """Return the state after the store has refused the incarnation. The process needs a new one."""
    return replace(life, begin_until_ms=NEVER)


def may_begin(life: Life, now_ms: int) -> bool:
    """Return whether a run may begin: nobody can have declared the incarnation dead yet."""
    return now_ms < life.begin_until_ms


def lives(stored: int | None, acknowledged: int) -> bool:
    """Return whether the store accepts an incarnation whose process knows the number `acknowledged`.

    The store refuses it if its number is missing, or is `DEAD`. It also refuses it if its number is too far from
    `acknowledged`: then the number was missing in between, and a late copy of a claim has written a new number. A new
    number is the store's time in ms, so it is far from the old number.
    """
    return stored is not None and 0 <= stored - acknowledged < MOST_UNANSWERED

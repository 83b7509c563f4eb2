"""Draw a random schedule of faults from a seed. The same seed draws the same schedule."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

__all__ = ["Fault", "Kind", "draw", "moments", "write"]

PAUSE_S = (0.2, 1.6)
"""The time between the beginnings of two faults."""
REST_S = 1.0
"""The time between two faults of one target, in which it works."""


class Kind(msgspec.Struct, frozen=True):
    """A kind of fault.

    Attributes:
        name: The name of the fault in schedules and tables.
        of: The kind of its targets, such as `service`. Two faults of one target never overlap.
        lasts_s: The shortest and the longest time until the fault ends.
        value: The range of the number that the fault needs, if it needs one.
    """

    name: str
    of: str
    lasts_s: tuple[float, float] = (0.0, 0.0)
    value: tuple[float, float] = (0.0, 0.0)


class Fault(msgspec.Struct, frozen=True):
    """A fault of a schedule.

    Attributes:
        at_s: The time from the beginning of the run until the fault begins.
        kind: The name of its kind.
        target: The number of its target among the targets of that kind.
        lasts_s: The time until the fault ends.
        value: The number that the fault needs, such as the offset of a clock in seconds; 0 if it needs none.
    """

    at_s: float
    kind: str
    target: int
    lasts_s: float
    value: float

    def __str__(self) -> str:
        value = f", {self.value:+.2f}" if self.value else ""
        return f"{self.at_s:7.2f} s: {self.kind} {self.target}{value}, for {self.lasts_s:.2f} s"


def draw(
    seed: int,
    seconds: float,
    kinds: Sequence[Kind],
    targets: Mapping[str, int],
    pause_s: tuple[float, float] = PAUSE_S,
) -> list[Fault]:
    """Return a schedule. All kinds take turns, in a new random order each time, so that a short run has most of them.

    Args:
        seed: The seed of the schedule.
        seconds: The length of the run. No fault begins later.
        kinds: The kinds of faults.
        targets: The number of targets of each kind of target.
        pause_s: The shortest and the longest time between the beginnings of two faults.
    """
    rng = random.Random(seed)
    free_s: dict[tuple[str, int], float] = {}
    waiting: deque[Kind] = deque()
    faults: list[Fault] = []
    at_s = rng.uniform(*pause_s)
    while at_s < seconds:
        if len(waiting) <= len(kinds) // 2:
            waiting.extend(rng.sample(kinds, len(kinds)))
        for _ in range(len(waiting)):
            kind = waiting.popleft()
            target = rng.randrange(targets[kind.of])
            if free_s.get((kind.of, target), 0.0) <= at_s:
                fault = Fault(at_s, kind.name, target, rng.uniform(*kind.lasts_s), rng.uniform(*kind.value))
                faults.append(fault)
                free_s[kind.of, target] = at_s + fault.lasts_s + REST_S
                break
            waiting.append(kind)  # its target has another fault: later
        at_s += rng.uniform(*pause_s)
    return faults


def moments(faults: Sequence[Fault]) -> Iterator[tuple[float, bool, Fault]]:
    """Yield the beginning and the end of each fault, in the order of time, as (time, is it the end?, fault)."""
    ends = [(fault.at_s + fault.lasts_s, True, fault) for fault in faults]
    begins = [(fault.at_s, False, fault) for fault in faults]
    yield from sorted(begins + ends, key=lambda moment: moment[:2])


def write(path: Path, faults: Sequence[Fault]) -> None:
    """Write a schedule to a file, one fault as JSON in each line."""
    path.write_bytes(b"".join(msgspec.json.encode(fault) + b"\n" for fault in faults))

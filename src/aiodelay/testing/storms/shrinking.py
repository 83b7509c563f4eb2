"""`shortest`: find the shortest list of faults that still changes an outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from math import comb

from .plan import Place

__all__ = ["shortest"]

MOST_RUNS = 100
"""The most runs of the search through all shorter lists."""


def shortest(places: Sequence[Place], still_differs: Callable[[Sequence[Place]], bool]) -> Sequence[Place]:
    """Return the shortest list of places whose faults still change the outcome.

    First remove faults until none can be removed. Then try all shorter lists, the shortest first, while `MOST_RUNS`
    allows it: fewer faults may lead the test to the same end in another way.

    Args:
        places: The places of all faults of the run.
        still_differs: Repeats the run with faults only at these places, and returns whether its outcome differs.
    """
    found = list(places)
    for place in places:
        fewer = [each for each in found if each != place]
        if len(fewer) < len(found) and still_differs(fewer):
            found = fewer
    runs = 0
    for size in range(len(found)):
        runs += comb(len(places), size)
        if runs > MOST_RUNS:
            break
        for fewer_places in combinations(places, size):
            if still_differs(fewer_places):
                return fewer_places
    return found

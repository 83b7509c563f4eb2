"""L5, B2: the bounds of docs/decisions/0015-trials.md, simulated on the memory store."""

from __future__ import annotations

import math
from itertools import product

import pytest

from aiodelay.core.transitions import KILLS_TO_DEATH, TRIAL_MS
from tests.support.trials import Cost, Play, cost_of

pytestmark = pytest.mark.slow


def most_deaths(play: Play) -> int:
    """Return how many processes may end.

    A killer is missed while trials are too short for it; then it is narrowed down, and charged.
    """
    narrowed = math.ceil(math.log2(play.suspects)) + KILLS_TO_DEATH
    missed = math.ceil(math.log2(max(play.kills_after_ms / TRIAL_MS, 1)))
    return play.killers * (narrowed + missed)


def judged(play: Play) -> Cost:
    """Simulate a play, and compare with the bounds that hold for all."""
    cost = cost_of(play)
    assert cost.wrongly == 0
    assert cost.late_ms <= TRIAL_MS
    if not play.late_killers:
        assert cost.blamed == 0
        assert cost.deaths <= most_deaths(play)
        assert cost.runs <= cost.deaths + 1
    return cost


@pytest.mark.parametrize(
    ("suspects", "killers", "processes"), [(24, 0, 1), (24, 1, 1), (24, 3, 4), (500, 1, 2), (1, 1, 1)]
)
def test_l5_trials_find_the_killers_within_their_bound_and_no_others(
    suspects: int, killers: int, processes: int
) -> None:
    judged(Play(suspects=suspects, killers=killers, processes=processes))


@pytest.mark.parametrize("suspects", [24, 500])
def test_l5_slow_innocents_keep_others_waiting_for_a_second(suspects: int) -> None:
    cost = judged(Play(suspects=suspects))
    assert (cost.deaths, cost.late_ms, cost.delivered_ms) == (0, 1_000, 20_000)


@pytest.mark.parametrize(("seconds", "neighbour_ms"), [(5, 100), (20, 20_000), (50, 20_000)])
def test_l5_a_killer_that_takes_its_time_is_found_and_others_wait_for_a_second(seconds: int, neighbour_ms: int) -> None:
    play = Play(suspects=24, killers=1, kills_after_ms=1_000 * seconds, neighbour_ms=neighbour_ms)
    assert judged(play).over_ms > 0


@pytest.mark.parametrize(("run_ms", "late_every_ms"), [(55_000, 20_000), (55_000, 40_000)])
def test_l5_killers_that_come_beside_an_innocent_suspect_are_found_in_its_place(
    run_ms: int, late_every_ms: int
) -> None:
    play = Play(suspects=1, lapses=8, run_ms=run_ms, neighbours_per_s=0, late_killers=12, late_every_ms=late_every_ms)
    cost = judged(play)
    assert cost.delivered_ms > 0
    assert cost.over_ms > 0


@pytest.mark.nightly  # a sample: above
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("suspects", "killers", "processes", "seconds"), [*product((24, 500), (1, 2, 3), (1, 2, 4), (0.01, 5, 20, 50))]
)
def test_l5_trials_keep_to_their_bounds_whatever_the_killers_and_the_processes(
    suspects: int, killers: int, processes: int, seconds: float
) -> None:
    after_ms = round(1_000 * seconds)
    judged(Play(suspects=suspects, killers=killers, processes=processes, kills_after_ms=after_ms, neighbour_ms=20_000))

"""L5: the bounds of docs/decisions/0015-trials.md, simulated on the memory store."""

from __future__ import annotations

import math

import pytest

from aiodelay.transitions import KILLS_TO_DEATH
from tests.support.trials import Play, cost_of


@pytest.mark.parametrize(
    ("suspects", "killers", "processes"), [(24, 0, 1), (24, 1, 1), (24, 3, 4), (500, 1, 2), (1, 1, 1)]
)
def test_l5_trials_find_the_killers_within_their_bound_and_no_others(
    suspects: int, killers: int, processes: int
) -> None:
    cost = cost_of(Play(suspects=suspects, killers=killers, processes=processes))
    assert cost.wrongly == 0
    assert cost.deaths <= killers * (math.ceil(math.log2(suspects)) + KILLS_TO_DEATH)
    assert cost.runs <= cost.deaths + 1
    assert cost.withheld_ms <= 1_000 * (1 + 2 * cost.deaths)


def test_l5_slow_innocents_keep_their_process_from_others_for_a_second() -> None:
    cost = cost_of(Play(suspects=24, killers=0, processes=1))
    assert (cost.deaths, cost.withheld_ms, cost.delivered_ms) == (0, 1_000, 20_000)


def test_l5_a_killer_that_takes_its_time_is_found_by_trials_that_last_longer() -> None:
    cost = cost_of(Play(suspects=24, killers=1, processes=1, kills_after_ms=5_000))
    assert cost.wrongly == 0
    assert cost.over_ms > 0
    assert cost.deaths <= 3 + math.ceil(math.log2(24)) + KILLS_TO_DEATH

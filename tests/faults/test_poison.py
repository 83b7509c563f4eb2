"""L5: one message among 500 kills its process each time; all others are delivered, it ends as a dead letter."""

from __future__ import annotations

from tests.faults.programs.worker import Burst
from tests.faults.scene import Scene
from tests.support.checker import Limits

DEATHS = 5
"""Two among others, three alone (transitions.SUSPECT_LAPSES, KILLS_TO_DEATH)."""


def test_l5_a_message_that_kills_its_process_stops_nobody(any_scene: Scene) -> None:
    burst = Burst(messages=500, spread_ms=0, special={250: b"die"})
    any_scene.start("producer", burst=burst, until="produced").ended_well()
    deaths = 0
    while (code := any_scene.start(f"w{deaths}", serve=("work",)).wait()) == -9:
        deaths += 1
        assert deaths <= DEATHS
    assert (code, deaths) == (0, DEATHS)
    any_scene.judge(Limits(poison={"m-250": "killed_worker"}))

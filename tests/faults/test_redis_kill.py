"""F1, F2, F9 on Redis: clients killed at failure points, a server killed under load. Histories are checked."""

from __future__ import annotations

import time

import pytest

from aiodelay.testing.history import Limits
from tests.faults.programs.worker import Burst, Stream
from tests.faults.scene import TAKEOVER_MS, RedisScene
from tests.faults.test_kill import kill_and_inherit, pulled, storm
from tests.support.observed import FailurePoint

BUSY = Burst(messages=60, spread_ms=600, special=dict.fromkeys(range(1, 60, 12), b"fail:1"), changes=True)
POINTS = [
    FailurePoint("apply", "before", 2),
    FailurePoint("apply", "after", 3),
    FailurePoint("claim", "after", 3),
    FailurePoint("tidy", "after", 1),
    FailurePoint("handler", "before", 20),
    FailurePoint("handler", "after", 20),
    FailurePoint("settle", "before", 3),
    FailurePoint("settle", "after", 3),
]


ENDLESS_MS = 600_000


@pytest.fixture
def scene(redis_scene: RedisScene) -> RedisScene:
    return redis_scene


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_f1_f2_a_kill_loses_nothing_and_repeats_only_what_was_in_flight(scene: RedisScene, point: FailurePoint) -> None:
    kill_and_inherit(scene, point=point, serve=("work",), burst=BUSY, run_ms=20)


@pytest.mark.parametrize("point", pulled(POINTS), ids=str)
def test_f1_f2_a_kill_of_who_takes_messages_without_a_handler(scene: RedisScene, point: FailurePoint) -> None:
    kill_and_inherit(scene, point=point, serve=("work",), pulls=True, burst=BUSY, run_ms=20)


@pytest.mark.parametrize("point", [FailurePoint("renew", "before", 2), FailurePoint("renew", "after", 2)], ids=str)
def test_f2_a_kill_around_a_renewal_ends_the_lease_all_the_same(scene: RedisScene, point: FailurePoint) -> None:
    kill_and_inherit(scene, point=point, serve=("work",), burst=Burst(messages=4, spread_ms=0), run_ms=ENDLESS_MS)


@pytest.mark.parametrize("point", [FailurePoint("send", "before", 2), FailurePoint("send", "after", 2)], ids=str)
def test_f1_a_kill_after_a_sink_has_taken_a_batch_repeats_no_more_than_it(
    scene: RedisScene, point: FailurePoint
) -> None:
    kill_and_inherit(scene, point=point, sink=True, burst=Burst(messages=60, spread_ms=400, to="sink:a"))


def test_f9_a_server_killed_under_load_comes_back_and_nothing_is_lost(scene: RedisScene) -> None:
    flows = [Stream(seconds=4, rate=60, ids=200, seed=i, until_told=True) for i in range(2)]
    workers = [scene.start(f"w{i}", serve=("work",), run_ms=5, stream=flow) for i, flow in enumerate(flows)]
    for worker in workers:
        worker.line("run 40")
    scene.server.kill()
    time.sleep(0.5)  # commands and claims must meet a server that is away
    scene.server.start()
    for worker in workers:
        worker.terminate()  # it gives commands for 4 s at least, and until now
    for worker in workers:
        worker.ended_well()
    assert scene.judge(Limits(takeover_ms=TAKEOVER_MS)).delivered > 60


@pytest.mark.nightly  # in the gate, tests/faults/test_nemesis.py kills services
def test_f1_a_storm_of_kills(scene: RedisScene) -> None:
    storm(scene, 6, seed=1)

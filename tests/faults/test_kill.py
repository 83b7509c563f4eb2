"""F1, F2: kill -9 at every failure point. Another process finishes the work, and the history is checked."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import msgspec
import pytest

from aiodelay.testing import history as h
from aiodelay.testing.history import Limits, check
from tests.faults.programs.worker import Burst, Stream
from tests.faults.scene import TAKEOVER_MS, Scene
from tests.support.observed import FailurePoint
from tests.support.processes import PATIENCE_S, Worker
from tests.support.waiting import until_sync

BUSY = Burst(messages=60, spread_ms=600, special=dict.fromkeys(range(1, 60, 12), b"fail:1"), changes=True)
ENDLESS_MS = 600_000
POINTS = [
    # F2: before anything was sent
    FailurePoint("apply", "before", 2),
    FailurePoint("apply", "after", 1),
    FailurePoint("apply", "after", 3),
    FailurePoint("apply statement", "before", 3),
    FailurePoint("apply commit", "before", 2),
    FailurePoint("apply commit", "after", 2),
    FailurePoint("claim", "after", 3),
    FailurePoint("claim begin", "after", 12),
    FailurePoint("claim statement", "before", 60),
    FailurePoint("tidy", "before", 1),
    FailurePoint("tidy", "after", 1),
    # F1: after
    FailurePoint("handler", "before", 20),
    FailurePoint("handler", "after", 20),
    FailurePoint("settle", "before", 3),
    FailurePoint("settle", "after", 3),
    FailurePoint("settle statement", "before", 9),
    FailurePoint("settle commit", "before", 3),
    FailurePoint("settle commit", "after", 3),
]


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_f1_f2_a_kill_loses_nothing_and_repeats_only_what_was_in_flight(scene: Scene, point: FailurePoint) -> None:
    kill_and_inherit(scene, point=point, serve=("work",), burst=BUSY, run_ms=20)


def pulled(points: list[FailurePoint]) -> list[Any]:
    """Return the points of who takes messages without a handler; the gate tests those around the run of one."""
    return [
        pytest.param(point, marks=() if point.name == "handler" else pytest.mark.nightly)
        for point in points
        if point.name in ("claim", "handler", "settle")
    ]


@pytest.mark.parametrize("point", pulled(POINTS), ids=str)
def test_f1_f2_a_kill_of_who_takes_messages_without_a_handler(scene: Scene, point: FailurePoint) -> None:
    kill_and_inherit(scene, point=point, serve=("work",), pulls=True, burst=BUSY, run_ms=20)


@pytest.mark.parametrize("point", [FailurePoint("renew", "before", 2), FailurePoint("renew", "after", 2)], ids=str)
def test_f2_a_kill_around_a_renewal_ends_the_lease_all_the_same(scene: Scene, point: FailurePoint) -> None:
    burst = Burst(messages=4, spread_ms=0)
    kill_and_inherit(scene, point=point, serve=("work",), burst=burst, run_ms=ENDLESS_MS)


@pytest.mark.parametrize("point", [FailurePoint("send", "before", 2), FailurePoint("send", "after", 2)], ids=str)
def test_f1_a_kill_after_a_sink_has_taken_a_batch_repeats_no_more_than_it(scene: Scene, point: FailurePoint) -> None:
    burst = Burst(messages=60, spread_ms=400, to="sink:a")
    kill_and_inherit(scene, point=point, sink=True, burst=burst)


def kill_and_inherit(scene: Scene, **settings: Any) -> None:  # noqa: ANN401 - the fields of a plan
    """Run one process to its failure point, then another one until nothing is left, and check the history."""
    victim = scene.start("victim", **settings)
    lanes = {name: settings[name] for name in ("serve", "sink", "pulls") if name in settings}
    heir = scene.start("heir", waits=True, **lanes)
    assert victim.wait() == -9, f"the failure point was not reached: {victim.errors[-2000:]}"
    heir.tell("go")
    heir.ended_well()
    scene.judge(Limits(takeover_ms=TAKEOVER_MS))


@pytest.mark.parametrize(
    ("bug", "point", "rule"),
    [
        ("SettlesFirst", FailurePoint("handler", "before", 20), "S2"),
        ("AcknowledgesEarly", FailurePoint("apply", "after", 2), "S2"),
    ],
)
def test_a_store_that_breaks_a_promise_is_found_out(scene: Scene, bug: str, point: FailurePoint, rule: str) -> None:
    """Negative control: the same scenario, the same check."""
    busy = msgspec.structs.replace(BUSY, spread_ms=5_000)
    victim = scene.start("victim", serve=("work",), burst=busy, bug=bug, point=point)
    assert victim.wait() == -9, victim.errors[-2000:]
    with pytest.raises(AssertionError, match=f"{rule}: "):
        scene.judge()


@pytest.mark.parametrize(("bug", "rule"), [("IgnoresCancels", "S5"), ("DeliversEarly", "S1")])
def test_a_store_that_breaks_a_promise_while_it_works_is_found_out(scene: Scene, bug: str, rule: str) -> None:
    """Negative control: messages come due for a minute, and until the promise is broken."""
    busy = msgspec.structs.replace(BUSY, spread_ms=60_000)
    victim = scene.start("victim", serve=("work",), burst=busy, bug=bug)

    def is_broken() -> bool:
        return rule in {each.rule for each in check(h.read(scene.crew.history_path)).violations}

    until_sync(is_broken, "the promise is broken", PATIENCE_S)
    victim.kill()
    with pytest.raises(AssertionError, match=f"{rule}: "):
        scene.judge()


def storm(scene: Scene, seconds: float, seed: int) -> None:
    """Three processes schedule, cancel, replace and deliver; about every second one is killed and comes back."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    ends = time.monotonic() + seconds
    numbers = itertools.count(1)

    def start() -> Worker:
        name = f"w{next(numbers)}"
        flow = Stream(seconds=max(ends - time.monotonic(), 0.1), rate=60, ids=200, seed=seed)
        return scene.start(name, serve=("work",), run_ms=20, stream=flow)

    workers = [start() for _ in range(3)]
    while time.monotonic() < ends:
        victim = rng.randrange(3)
        workers[victim].line("ready")
        time.sleep(rng.uniform(0, 1))  # a storm's pause: it works meanwhile
        workers[victim].kill()
        workers[victim] = start()
    for worker in workers:
        worker.ended_well()
    report = scene.judge()
    assert report.delivered > 2 * seconds, "they did next to nothing between their deaths"
    final = scene.story().final
    assert final is not None
    assert final.dead == [], "nobody was alone at three deaths in a row"


@pytest.mark.nightly  # in the gate, tests/faults/test_nemesis.py kills services
def test_f1_f2_a_storm_of_kills(scene: Scene) -> None:
    storm(scene, seconds=8, seed=20)


@pytest.mark.storm
def test_f1_f2_a_long_storm_of_kills(scene: Scene) -> None:
    storm(scene, seconds=60, seed=random.randrange(1 << 30))

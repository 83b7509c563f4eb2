"""L5: a message that kills its process each time becomes a dead letter, and all others are delivered."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from aiodelay import Reject, Retry, Scheduler
from aiodelay.core.transitions import KILLS_TO_DEATH, SUSPECT_LAPSES
from aiodelay.core.values import LEASE_MS
from aiodelay.testing.history import Limits
from tests.faults.programs.worker import Burst
from tests.faults.scene import RedisScene, Scene


def most_deaths(suspects: int, killers: int = 1) -> int:
    """Return how many processes may end: two until there are suspects, then as docs/decisions/0015-trials.md says."""
    return SUSPECT_LAPSES + killers * (math.ceil(math.log2(suspects)) + KILLS_TO_DEATH)


def deaths_until_idle(scene: Scene, most: int) -> int:
    """Start one process after another until one ends well; return how many did not."""
    for deaths in range(most + 1):
        code = scene.start(f"w{deaths}", serve=("work",), concurrency=500).wait()
        if code != -9:
            assert code == 0
            return deaths
    raise AssertionError(f"more than {most} processes have ended")


def claims_of(scene: Scene, message_id: str) -> int:
    """Return how many claims there were of a message. Also a process that stood still may have let one lapse."""
    return sum(lease.note.id == message_id for lease in scene.story().leases)


def test_l5_a_message_among_500_that_kills_its_process_stops_nobody(any_scene: Scene) -> None:
    burst = Burst(messages=500, spread_ms=0, special={430: b"die"})
    any_scene.start("producer", burst=burst, until="produced").ended_well()
    deaths_until_idle(any_scene, most_deaths(500))
    assert claims_of(any_scene, "m-430") >= SUSPECT_LAPSES + KILLS_TO_DEATH
    any_scene.judge(Limits(poison={"m-430": "killed_worker"}))


def neighbours_of_suspects(scene: Scene) -> None:
    """24 slow messages and a killer have ended two processes when 60 others come; these wait for no slow one.

    The slow ones run until all others have begun, or for much longer than these need.
    """
    begun_folder = scene.crew.folder / "begun"
    begun_folder.mkdir()
    slow = dict.fromkeys(range(25), f"await:60:{begun_folder}".encode()) | {12: b"die"}
    producer = scene.start("producer", burst=Burst(messages=25, spread_ms=0, special=slow), until="produced")
    producer.ended_well()
    for name in ("first", "second"):
        assert scene.start(name, serve=("work",), concurrency=500).wait() == -9
    note = {"do": f"note:{begun_folder}".encode()}
    healthy = Burst(messages=60, spread_ms=0, prefix="healthy", headers=note)
    scene.start("another producer", burst=healthy, until="produced").ended_well()
    deaths_until_idle(scene, most_deaths(25))
    scene.judge(Limits(poison={"m-12": "killed_worker"}))
    attempts = scene.story().attempts
    slow_ended = [each.ended_ns for each in attempts if each.start.id.startswith("m-") and each.result == "ok"]
    begun: dict[str, int] = {}  # the first run of each: a process that dies has its messages run again
    for each in sorted(attempts, key=lambda attempt: attempt.start.at_ns):
        if each.start.id.startswith("healthy-"):
            begun.setdefault(each.start.id, each.start.at_ns)
    assert len(begun) == 60
    assert max(begun.values()) < min(slow_ended)


def test_l5_suspects_keep_their_neighbours_waiting_for_their_trials_alone(scene: Scene) -> None:
    neighbours_of_suspects(scene)


@pytest.mark.nightly  # the rules on each store: conformance
def test_l5_suspects_on_redis_keep_their_neighbours_waiting_for_their_trials_alone(redis_scene: RedisScene) -> None:
    neighbours_of_suspects(redis_scene)


@pytest.mark.nightly  # the rules, in virtual time: tests/unit/test_dispatcher.py
def test_l5_others_run_beside_a_killer_that_takes_longer_than_a_second(any_scene: Scene) -> None:
    killer = Burst(messages=1, spread_ms=0, special={0: b"die:1500"})
    healthy = Burst(messages=900, spread_ms=90_000, prefix="healthy")
    for name, burst in {"one": killer, "other": healthy}.items():
        any_scene.start(name, burst=burst, until="produced").ended_well()
    deaths_until_idle(any_scene, most_deaths(1) + 2)
    assert claims_of(any_scene, "m-0") >= SUSPECT_LAPSES + KILLS_TO_DEATH
    any_scene.judge(Limits(poison={"m-0": "killed_worker"}))
    attempts = any_scene.story().attempts
    trials = [each for each in attempts if each.start.id == "m-0"][-KILLS_TO_DEATH:]
    for trial in trials:
        beside = [each for each in attempts if each.start.process == trial.start.process and each is not trial]
        assert any(each.start.at_ns > trial.start.at_ns for each in beside), "others waited for the end of the trial"


@pytest.mark.nightly  # with short leases: above
@pytest.mark.timeout(600)
def test_l5_three_killers_are_found_with_the_leases_that_a_program_has(any_scene: Scene) -> None:
    killers = {3: b"die", 11: b"die", 19: b"die"}
    burst = Burst(messages=24, spread_ms=0, special=killers)
    any_scene.start("producer", burst=burst, until="produced").ended_well()
    deaths, most = 0, most_deaths(24, killers=3)
    while any_scene.start(f"w{deaths}", serve=("work",), concurrency=500, lease_ms=LEASE_MS).wait() == -9:
        deaths += 1
        assert deaths <= most
    any_scene.judge(Limits(poison={f"m-{i}": "killed_worker" for i in killers}))


class UnspeakableError(Exception):
    """Raises when it is shown."""

    def __str__(self) -> str:
        raise KeyError("no text")


@pytest.mark.parametrize(
    ("what", "last_error"),
    [
        (UnspeakableError(), "UnspeakableError: its text cannot be read"),
        (FileNotFoundError("r\udce9sum\udce9"), "FileNotFoundError: r\\udce9sum\\udce9"),
        (Reject("r\udce9sum\udce9"), "r\\udce9sum\\udce9"),
    ],
    ids=["no text", "no UTF-8", "rejected, no UTF-8"],
)
@pytest.mark.asyncio
async def test_l5_an_error_that_cannot_be_written_down_stops_nobody(
    tmp_path: Path, what: Exception | Reject, last_error: str
) -> None:
    scheduler = Scheduler(f"sqlite:///{tmp_path}/delay.db")
    delivered: list[bytes] = []

    @scheduler.handler(name="work", retry=Retry(attempts=2, first="1ms"))
    async def work(event: bytes) -> Reject | None:
        if event == b"poison":
            if isinstance(what, Reject):
                return what
            raise what
        delivered.append(event)
        return None

    async with scheduler:
        for each in (b"a", b"poison", b"b"):
            await scheduler.schedule(each, to="handler:work", delay="1ms")
        await scheduler.run_until_idle()
        letters = [letter async for letter in scheduler.dead_letters()]
    assert [letter.record.last_error for letter in letters] == [last_error]
    assert sorted(delivered) == [b"a", b"b"]

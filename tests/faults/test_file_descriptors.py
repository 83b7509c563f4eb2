"""F39: without file descriptors there is a clear error, and recovery when descriptors are available again."""

from __future__ import annotations

from aiodelay.testing.history import Limits
from tests.faults.scene import RedisScene, Scene
from tests.support.processes import Worker


def hoarder(scene: Scene) -> Worker:
    return scene.crew.start("no_files", scene.plan("hoarder", serve=("work",), lease_ms=15_000), name="hoarder")


def test_f39_without_file_descriptors_errors_are_clear_and_nothing_is_lost(scene: Scene) -> None:
    process = hoarder(scene)
    error = process.line("error")
    assert error.startswith("StoreUnavailableError")
    assert "delay.db" in error
    assert "cannot be opened" in error
    process.line("hoards")
    process.tell("go")
    assert process.line("meanwhile").startswith("StoreUnavailableError")
    process.ended_well()
    report = scene.judge(Limits(spare=1))
    assert report.delivered == 60
    assert report.duplicates == 0


def test_f39_a_client_of_redis_that_can_open_no_connection_goes_on_once_it_can(redis_scene: RedisScene) -> None:
    process = hoarder(redis_scene)
    assert "Too many open files" in process.line("error StoreUnavailableError")
    process.line("hoards")
    redis_scene.server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    process.tell("go")
    assert "Too many open files" in process.line("meanwhile StoreUnavailableError")
    process.ended_well()
    report = redis_scene.judge(Limits(spare=1))
    assert report.operations["ok"] >= 40
    assert report.operations["ok"] < 60, "no descriptor was missing"
    assert report.delivered >= 40

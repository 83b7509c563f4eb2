"""F39: without file descriptors there is a clear error, and recovery when descriptors are available again."""

from __future__ import annotations

from aiodelay.testing.history import Limits
from tests.faults.scene import Scene


def test_f39_without_file_descriptors_errors_are_clear_and_nothing_is_lost(scene: Scene) -> None:
    process = scene.crew.start("no_files", scene.plan("hoarder", serve=("work",), lease_ms=15_000), name="hoarder")
    error = process.line("error")
    assert error.startswith("StoreUnavailableError")
    assert "delay.db" in error
    assert "cannot be opened" in error
    assert process.line("meanwhile").startswith("StoreUnavailableError")
    process.ended_well()
    report = scene.judge(Limits(spare=1))
    assert report.delivered == 40
    assert report.duplicates == 0

"""F37: a full disk gives a clear error, loses or damages nothing acknowledged, and later recovers by itself."""

from __future__ import annotations

from tests.faults.scene import Scene


def test_f37_a_full_disk_refuses_clearly_and_loses_nothing(scene: Scene) -> None:
    process = scene.crew.start("disk_full", scene.plan("filler", serve=("work",), lease_ms=15_000), name="filler")
    stored = int(process.line("full"))
    assert stored > 20
    error = process.line("error")
    assert "is full" in error
    assert "'refused'" in error
    process.line("roomy")
    process.ended_well()
    report = scene.judge()
    assert report.operations["fail"] == 1
    assert report.operations["info"] == 0
    assert report.delivered == stored // 2 + 1
    assert report.duplicates == 0

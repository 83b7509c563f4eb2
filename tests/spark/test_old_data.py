"""An old archive is read as before, and continues from the position of its checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from aiodelay.spark.jobs import archive, compact, report
from aiodelay.testing.clock import VirtualClock
from tests.support.journals import note
from tests.support.old_data.answers import FIXTURES, answered
from tests.support.old_data.archive import events_of, restore
from tests.support.old_data.sqlite import OldSqlite

ARCHIVE = FIXTURES / "archive"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the old archive."""
    restore(ARCHIVE / "events", tmp_path / "events")
    return tmp_path / "events"


def test_an_old_archive_is_read_as_before(spark: SparkSession, folder: Path) -> None:
    assert events_of(spark, folder) == answered(ARCHIVE, "events")


def test_an_old_archive_is_reported_on_as_before(spark: SparkSession, folder: Path) -> None:
    assert report.run(spark, archive=f"{folder}").rows == answered(ARCHIVE, "report")["rows"]


def test_an_old_archive_goes_on_and_is_merged(spark: SparkSession, folder: Path, tmp_path: Path) -> None:
    old = OldSqlite(FIXTURES / "sqlite", tmp_path)
    asyncio.run(old.restore())
    url = f"{old.url}?journal=500"
    assert archive.run(spark, store=url, to=f"{folder}").rows == 0
    asyncio.run(note(url, 1, 3, clock=VirtualClock()))
    assert archive.run(spark, store=url, to=f"{folder}").rows == 3
    assert compact.run(spark, archive=f"{folder}", before="2030-01-02").facts["days"] == ["2030-01-01"]
    before = answered(ARCHIVE, "events")["events"]
    assert events_of(spark, folder)["events"][: len(before)] == before

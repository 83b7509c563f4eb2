"""An old archive: Parquet by day, Spark's log of the files that count, and how far the store was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

from pyspark.sql import SparkSession

from aiodelay.spark.archived import LOG
from aiodelay.spark.jobs import archive
from aiodelay.spark.jobs.report import read_events

__all__ = ["events_of", "restore", "write"]

PLACE = "file:///old-data"
"""What stands in the log in the place of the archive's folder: Spark writes whole paths."""


def write(spark: SparkSession, store: str, here: Path, fixture: Path) -> None:
    """Archive a store's events in a folder, and copy that, without checksums, which the copy's log would not match."""
    archive.run(spark, store=store, to=f"{here}", max_rows_per_batch=100)
    copytree(here, fixture, ignore=lambda folder, names: [each for each in names if each.endswith(".crc")])
    _place(fixture, here.as_uri(), PLACE)


def restore(fixture: Path, here: Path) -> None:
    """Copy an old archive into a folder that is not there yet."""
    copytree(fixture, here)
    _place(here, PLACE, here.as_uri())


def _place(folder: Path, before: str, after: str) -> None:
    for log in (folder / LOG).iterdir():
        log.write_text(log.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")


def events_of(spark: SparkSession, folder: Path) -> Mapping[str, Sequence[Any]]:
    """Return all events of an archive, as the jobs that read archives read it, and their columns."""
    events = read_events(spark, f"{folder}")
    rows = events.orderBy("number").collect()
    return {"columns": events.columns, "events": [[f"{value}" for value in row] for row in rows]}

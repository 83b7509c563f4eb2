"""An old archive: Parquet files by day, Spark's log of the valid files, and the position up to which it was read."""

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
"""The text that replaces the folder of the archive in the log, where Spark writes whole paths."""


def write(spark: SparkSession, store: str, here: Path, fixture: Path) -> None:
    """Archive the events of a store, and copy the archive without checksums, because the copied log differs."""
    archive.run(spark, store=store, to=f"{here}", max_rows_per_batch=100)
    copytree(here, fixture, ignore=lambda folder, names: [each for each in names if each.endswith(".crc")])
    _place(fixture, here.as_uri(), PLACE)


def restore(fixture: Path, here: Path) -> None:
    """Copy an old archive into a folder that does not exist yet."""
    copytree(fixture, here)
    _place(here, PLACE, here.as_uri())


def _place(folder: Path, before: str, after: str) -> None:
    for log in (folder / LOG).iterdir():
        log.write_text(log.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")


def events_of(spark: SparkSession, folder: Path) -> Mapping[str, Sequence[Any]]:
    """Return all events of an archive and their columns, read in the same way as the jobs read archives."""
    events = read_events(spark, f"{folder}")
    rows = events.orderBy("number").collect()
    return {"columns": events.columns, "events": [[f"{value}" for value in row] for row in rows]}

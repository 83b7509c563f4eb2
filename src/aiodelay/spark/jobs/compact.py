"""`aiodelay spark compact`: merge the small files of an archive's days. Concurrent readers see each event once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Final
from uuid import uuid4

from msgspec import structs
from pyspark.sql import SparkSession

from aiodelay.core.durations import from_epoch_ms, parse_duration
from aiodelay.errors import AiodelayError, ConfigurationError, shortened
from aiodelay.operations.spark_options import CompactOptions
from aiodelay.ports.clock import SystemClock
from aiodelay.spark.archived import Archived, File, Listed
from aiodelay.spark.summary import Summary

from .job import job

__all__ = ["ArchiveDamagedError", "run"]

TARGET_BYTES: Final = 128 << 20
_STAGING: Final = "_compacting"


class ArchiveDamagedError(AiodelayError):
    """The merged files of a day do not have as many events as the files from which they were merged.

    Attributes:
        day: The day, `YYYY-MM-DD`.
        wanted: The number of events before the merge.
        found: The number of events after the merge.
    """

    day: str
    wanted: int
    found: int

    def __init__(self, day: str, wanted: int, found: int) -> None:
        super().__init__(day, wanted, found)
        self.day, self.wanted, self.found = day, wanted, found

    def __str__(self) -> str:
        return f"day {self.day} has {self.wanted} events, but {self.found} after merging; the archive was not changed"


@job("compact", CompactOptions)
def run(spark: SparkSession, options: CompactOptions) -> Summary:
    """Merge the files of each day that is over.

    In one step, the new files become valid and the old files invalid. Old files stay for a time, because readers may
    have begun to read them; a later run removes them. You can kill a run and run it again. If an archive job commits a
    batch at the same moment, the old files stay valid, and the next run merges the days.

    Args:
        spark: The session.
        options: See `CompactOptions`; callers give each option by keyword.

    Returns:
        The number of events in the merged days, and of files before and after; `facts` has the days.

    Raises:
        ConfigurationError: An option is wrong, the folder is on another machine, or `archive` has not written it.
        ArchiveDamagedError: A day could not be merged. The archive was not changed.
    """
    now_ms = SystemClock().now_ms()
    keep_ms = parse_duration(options.keep, field="keep", error=ConfigurationError)
    place = Archived(options.archive)
    end = _day(options.before) if options.before else from_epoch_ms(now_ms).date().isoformat()
    listed = place.listed()
    days = {day: files for day, files in _by_day(listed).items() if day < end and _is_worth_it(files)}
    with _staging(place) as staging:
        merged = {day: _merged(spark, place, staging, day, files) for day, files in sorted(days.items())}
    rest = [file for file in listed.files if file.day not in merged]
    files = [*rest, *(file for _, new in merged.values() for file in new)]
    is_done = not merged or place.relist(structs.replace(listed, files=files))
    removed = _remove(place, now_ms - keep_ms)
    counts = {
        "files_before": sum(map(len, days.values())),
        "files_after": sum(len(new) for _, new in merged.values()),
        "files_removed": removed,
    }
    facts = {"archive": options.archive, "days": sorted(merged) if is_done else [], "overtaken": not is_done}
    rows = sum(n for n, _ in merged.values())
    return Summary(rows=rows, counts=counts, facts=facts)


def _day(text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise ConfigurationError("before", shortened(text), "a day, YYYY-MM-DD") from None


def _by_day(listed: Listed) -> dict[str, list[File]]:
    days: dict[str, list[File]] = {}
    for file in listed.files:
        days.setdefault(file.day, []).append(file)
    days.pop("", None)
    return days


def _is_worth_it(files: Sequence[File]) -> bool:
    return len(files) > _wanted(files)


def _wanted(files: Sequence[File]) -> int:
    return max(1, round(sum(file.size for file in files) / TARGET_BYTES))


@contextmanager
def _staging(place: Archived) -> Iterator[Path]:
    """Yield a folder for temporary files that readers ignore, and remove it after the block."""
    folder = place.folder / _STAGING
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed run
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _merged(
    spark: SparkSession, place: Archived, staging: Path, day: str, files: Sequence[File]
) -> tuple[int, list[File]]:
    """Merge a day's events into new files, which are not valid yet. Return the number of events, and the files."""
    folder = staging / day
    old = spark.read.parquet(*(file.path for file in files))
    old.coalesce(_wanted(files)).sortWithinPartitions("partition", "number").write.parquet(folder.as_uri())
    wanted, found = old.count(), spark.read.schema(old.schema).parquet(folder.as_uri()).count()
    if wanted != found:
        raise ArchiveDamagedError(day, wanted, found)
    name = uuid4().hex
    new = []
    for n, written in enumerate(sorted(folder.glob("*.parquet"))):
        target = place.folder / f"day={day}" / f"merged-{name}-{n}.parquet"
        written.replace(target)
        new.append(_file(files[0], target))
    return found, new


def _file(like: File, target: Path) -> File:
    found = target.stat()
    path = f"{like.path.rpartition('/')[0]}/{target.name}"
    return structs.replace(like, path=path, size=found.st_size, modificationTime=int(found.st_mtime * 1000))


def _remove(place: Archived, before_ms: int) -> int:
    """Remove invalid files of days that have not changed since `before_ms`. Return the number of removed files."""
    listed = place.listed()
    newest = {day: max(file.modificationTime for file in files) for day, files in _by_day(listed).items()}
    removed = 0
    for day, places in place.unlisted(listed).items():
        for each in places:
            if max(newest.get(day, 0), int(each.stat().st_mtime * 1000)) <= before_ms:
                each.unlink(missing_ok=True)
                each.with_name(f".{each.name}.crc").unlink(missing_ok=True)
                removed += 1
    return removed

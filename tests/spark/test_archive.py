"""The archive: every event once, in the folder of its day, for every reader, also while files are merged."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from aiodelay.errors import ConfigurationError
from aiodelay.spark.archived import Archived
from aiodelay.spark.jobs import archive, compact
from aiodelay.testing import VirtualClock
from tests.support.journals import note

PAGE = Path(__file__).parents[2] / "docs" / "spark" / "archive.md"
DAYS = [datetime(2026, 3, day, 23, 59, 59, tzinfo=UTC) for day in (1, 2, 3)]


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of a store that has noted 40 events on each of three days."""
    url = f"sqlite:///{tmp_path / 'delay.db'}?journal=10000"
    for n, at in enumerate(DAYS):
        asyncio.run(note(url, 1 + 40 * n, 40, clock=VirtualClock(start=at)))
    return url


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return f"{tmp_path / 'archive'}"


def numbers(spark: SparkSession, folder: str) -> list[int]:
    return sorted(row.number for row in spark.read.parquet(folder).select("number").collect())


def files(folder: str) -> list[str]:
    return sorted(each.path for each in Archived(folder).listed().files)


def test_every_event_is_written_once_to_its_day_and_a_second_run_adds_nothing(
    spark: SparkSession, url: str, folder: str
) -> None:
    spark.conf.set("spark.sql.session.timeZone", "Pacific/Auckland")
    try:
        summary = archive.run(spark, store=url, to=folder, max_rows_per_batch=50)
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert (summary.rows, summary.counts["batches"]) == (120, 3)
    assert summary.facts["days"] == ["2026-03-01", "2026-03-02", "2026-03-03"]
    rows = spark.read.parquet(folder).select("number", "day").collect()
    assert Counter(row.day for row in rows) == {date(2026, 3, day): 40 for day in (1, 2, 3)}
    assert sorted(row.number for row in rows) == [*range(1, 121)]
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block.replace('"events").where', f"{folder!r}).where"), {"spark": spark})
    again = archive.run(spark, store=url, to=folder)
    assert (again.rows, again.counts["batches"], again.facts["days"]) == (0, 0, [])
    assert numbers(spark, folder) == [*range(1, 121)]


def test_what_was_cut_off_between_any_two_steps_of_a_batch_is_done_again_and_counts_once(
    spark: SparkSession, url: str, folder: str
) -> None:
    """The states on disk that a kill leaves, one after the other: each is what the steps before it have written."""
    archive.run(spark, store=url, to=folder, max_rows_per_batch=50)
    log, checkpoint = Path(folder, "_spark_metadata"), Path(folder, "_checkpoint")
    last = max(int(each.name) for each in (checkpoint / "commits").iterdir() if each.name.isdigit())
    committed, listed, planned = (
        checkpoint / "commits" / f"{last}",
        log / f"{last}.compact",
        checkpoint / "offsets" / f"{last}",
    )
    for steps in [(committed,), (committed, listed), (committed, listed, planned)]:
        for step in steps:
            step.unlink()
            step.with_name(f".{step.name}.crc").unlink(missing_ok=True)
        assert len(numbers(spark, folder)) == (120 if len(steps) == 1 else 100)
        archive.run(spark, store=url, to=folder, max_rows_per_batch=50)
        assert numbers(spark, folder) == [*range(1, 121)]


def test_files_of_days_are_merged_in_one_step_under_readers_and_the_archive_goes_on(
    spark: SparkSession, url: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.run(spark, store=url, to=folder, max_rows_per_batch=20)
    before, slow = files(folder), spark.read.parquet(folder)
    assert len(before) >= 6
    seen = list[int]()
    relist = Archived.relist

    def looked(self: Archived, *arguments: object) -> bool:
        seen.extend(numbers(spark, folder))
        return relist(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Archived, "relist", looked)
    summary = compact.run(spark, archive=folder, before="2026-03-03")
    assert seen == [*range(1, 121)]  # new files are in place, and count for nobody yet
    assert numbers(spark, folder) == [*range(1, 121)]
    assert sorted(row.number for row in slow.select("number").collect()) == [*range(1, 121)]  # with the old files
    after = files(folder)
    assert (summary.rows, summary.facts["days"]) == (80, ["2026-03-01", "2026-03-02"])
    assert summary.counts["files_before"] - summary.counts["files_after"] == len(before) - len(after)
    assert Counter(path.rpartition("/")[0][-10:] for path in after)["2026-03-01"] == 1
    asyncio.run(note(url, 121, 5, clock=VirtualClock(start=DAYS[2])))
    assert archive.run(spark, store=url, to=folder).rows == 5
    again = compact.run(spark, archive=folder, before="2026-03-04", keep="0s")
    assert again.facts["days"] == ["2026-03-03"]
    assert again.counts["files_removed"] == summary.counts["files_before"]  # not yet what it has merged itself
    last = compact.run(spark, archive=folder, keep="0s")
    assert last.counts == {"files_before": 0, "files_after": 0, "files_removed": again.counts["files_before"]}
    assert len(list(Path(folder).glob("day=*/*.parquet"))) == 3
    assert numbers(spark, folder) == [*range(1, 126)]


def test_an_archive_job_that_commits_meanwhile_wins_and_nothing_is_lost(
    spark: SparkSession, url: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.run(spark, store=url, to=folder, max_rows_per_batch=30)
    asyncio.run(note(url, 121, 5, clock=VirtualClock(start=DAYS[2])))
    relist = Archived.relist

    def overtaken(self: Archived, *arguments: object) -> bool:
        monkeypatch.undo()
        archive.run(spark, store=url, to=folder)
        return relist(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Archived, "relist", overtaken)
    summary = compact.run(spark, archive=folder)
    assert (summary.facts["overtaken"], summary.facts["days"]) == (True, [])
    assert numbers(spark, folder) == [*range(1, 126)]


def test_what_was_trimmed_unread_ends_the_job_unless_it_may_go_on_without(
    spark: SparkSession, folder: str, tmp_path: Path
) -> None:
    shop: dict[str, Any] = {"store": f"sqlite:///{tmp_path / 'delay.db'}?journal=50", "namespace": "shop", "to": folder}
    asyncio.run(note(shop["store"], 1, 10, namespace="shop"))
    assert archive.run(spark, **shop).rows == 10
    asyncio.run(note(shop["store"], 11, 200, namespace="shop"))
    with pytest.raises(StreamingQueryException, match="EventsLostError: events 11 to "):
        archive.run(spark, **shop)
    rest = archive.run(spark, fail_on_data_loss=False, **shop).rows
    assert 0 < rest < 200
    assert numbers(spark, folder) == [*range(1, 11), *range(211 - rest, 211)]


def test_folders_and_checkpoints_that_do_not_belong_together_are_refused(
    spark: SparkSession, url: str, folder: str, tmp_path: Path
) -> None:
    asyncio.run(note(url, 1, 1))
    archive.run(spark, store=url, to=folder)
    with pytest.raises(ConfigurationError, match=r"checkpoint is .*; allowed: the checkpoint with which"):
        archive.run(spark, store=url, to=folder, checkpoint=f"{tmp_path / 'other'}")
    fuller, its = f"{tmp_path / 'fuller'}", f"{tmp_path / 'its'}"
    archive.run(spark, store=url, to=fuller, checkpoint=its, max_rows_per_batch=50)
    for place, other in [(fuller, f"{folder}/_checkpoint"), (folder, its), (f"{tmp_path / 'new'}", its)]:
        with pytest.raises(ConfigurationError, match=r"checkpoint is .*; allowed: the checkpoint with which"):
            archive.run(spark, store=url, to=place, checkpoint=other)  # Spark would pass over what it reads, or lack it
    with pytest.raises(ConfigurationError, match=r"to is .*, which has other files"):
        archive.run(spark, store=url, to=f"{tmp_path}")
    with pytest.raises(ConfigurationError, match="to is blank"):
        archive.run(spark, store=url, to=" ")
    with pytest.raises(ConfigurationError, match="every is "):
        archive.run(spark, store=url, to=folder, every="10ms")
    for place, told in [
        (f"{tmp_path / 'no'}", "a folder that `archive` has written"),
        ("s3a://b/c", "a folder on this"),
    ]:
        with pytest.raises(ConfigurationError, match=f"archive is .*; allowed: {told}"):
            compact.run(spark, archive=place)
    with pytest.raises(ConfigurationError, match="before is 'May'; allowed: a day, YYYY-MM-DD"):
        compact.run(spark, archive=folder, before="May")
    Path(folder, "_spark_metadata", "99").write_text("v1\n")
    with pytest.raises(ConfigurationError, match="into which only `aiodelay spark archive` has written"):
        compact.run(spark, archive=folder)

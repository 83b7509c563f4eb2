"""`aiodelay spark report`: write lateness, failures and retries as Parquet, CSV and an HTML page."""

from __future__ import annotations

import csv as csv_format
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it

from aiodelay.core.durations import from_epoch_ms
from aiodelay.errors import ConfigurationError, InputError, shortened
from aiodelay.operations.spark_options import By, ReportOptions
from aiodelay.spark.report_page import ReportPage, render
from aiodelay.spark.report_plots import SLOTS_S, Figures
from aiodelay.spark.schemas import EVENTS
from aiodelay.spark.summary import Summary

from .job import job
from .outcomes import levels_of, report
from .settings_origin import replacing, writing_anew

__all__ = ["MOST_ROWS", "By", "read_events", "report", "run"]

MOST_ROWS: Final = 2_000
"""The most rows that a page shows, and that the driver holds, for each grouping, such as by lane or by hour."""


def read_events(spark: SparkSession, archive: str) -> DataFrame:
    """Return the events of an archive; an archive without events gives an empty frame.

    Args:
        spark: A session, classic or Connect.
        archive: The folder that `archive` has written.

    Raises:
        InputError: The folder does not exist.
    """
    try:
        events = spark.read.parquet(archive)
        events.schema  # noqa: B018 - a Connect session reads the files only now
    except AnalysisException as error:
        if error.getCondition() == "UNABLE_TO_INFER_SCHEMA":
            return spark.createDataFrame([], EVENTS)
        if error.getCondition() == "PATH_NOT_FOUND":
            raise InputError(
                "archive", shortened(archive), "a folder that `aiodelay spark archive` has written"
            ) from None
        raise
    return events


@job("report", ReportOptions)
def run(spark: SparkSession, options: ReportOptions) -> Summary:
    """Write a report on the events of an archive, and return its totals.

    Spark aggregates the figures once. The driver holds at most `MOST_ROWS` rows of each grouping for the page, and one
    row of the CSV at a time. So its memory does not grow with the number of events.

    Args:
        spark: A session, classic or Connect.
        options: See `ReportOptions`; callers give each option by keyword.

    Returns:
        The totals; `rows` is the number of counted outcomes.

    Raises:
        InputError: The archive does not exist or has other data, or `where` is not a valid condition.
        ConfigurationError: An option is wrong, or an output already exists.
    """
    _check_free(options)
    by, events = options.by, read_events(spark, options.archive)
    within = {"start": options.start, "end": options.end}
    figures = report(events, by=by, where=options.where, totals=True, **within).persist()
    try:
        if options.parquet is not None:
            _write_parquet(_rows_of(figures, by), by, options.parquet, overwrite=options.overwrite)
        if options.csv is not None:
            _write_csv(_rows_of(figures, by).orderBy(*by), options.csv)
        shown = _page_of(figures, options)
        if options.html is not None:
            with replacing(options.html) as file:
                file.write(render(shown))
    finally:
        figures.unpersist()
    return _summary_of(shown, options)


def _check_free(options: ReportOptions) -> None:
    parquet, archive = (f"{(each or '').rstrip('/')}/" for each in (options.parquet, options.archive))
    if options.parquet is not None and parquet.startswith(archive):
        raise ConfigurationError("parquet", shortened(options.parquet), "a folder outside the archive")
    for name, path in (("csv", options.csv), ("html", options.html)):
        if path is not None and path.exists() and not options.overwrite:
            raise ConfigurationError(name, shortened(f"{path}"), "a name that is free, or the option overwrite")
        if path is not None and not path.parent.is_dir():
            raise ConfigurationError(name, shortened(f"{path}"), "a name in an existing folder")


def _rows_of(figures: DataFrame, by: Sequence[By]) -> DataFrame:
    """Return the rows that are not totals."""
    for name in by:
        figures = figures.where(F.col(name).isNotNull())
    return figures


def _write_parquet(rows: DataFrame, by: Sequence[By], path: str, *, overwrite: bool) -> None:
    with writing_anew("parquet", path, "a name that is free, or the option overwrite"):
        rows.coalesce(1).sortWithinPartitions(*by).write.mode("overwrite" if overwrite else "error").parquet(path)


def _write_csv(rows: DataFrame, path: Path) -> None:
    with replacing(path) as file:
        writer = csv_format.writer(file)
        writer.writerow(rows.columns)
        for row in _in_plain_types(rows).toLocalIterator():
            writer.writerow([_iso_text(name, value) for name, value in row.asDict().items()])


def _iso_text(name: str, value: Any) -> Any:  # noqa: ANN401 - any value of a cell
    return f"{from_epoch_ms(value * 1000):%Y-%m-%dT%H:%M:%SZ}" if name == "hour" else value


def _in_plain_types(rows: DataFrame) -> DataFrame:
    """Return hours as seconds since 1970, because Spark returns timestamps in this machine's time zone."""
    return rows.withColumn("hour", F.unix_seconds("hour")) if "hour" in rows.columns else rows


def _page_of(figures: DataFrame, options: ReportOptions) -> ReportPage:
    by = options.by
    unit = tuple(name for name in by if name in SLOTS_S)
    found = _collected(figures, by)
    nothing = {name: None if name.endswith("_ms") else 0 for name in figures.columns}
    return ReportPage(
        source=options.archive,
        within=_range_text(options.start, options.end),
        where=options.where,
        by=by,
        total=next(iter(found[()] or ()), nothing),
        lanes=found[("lane",)] if "lane" in by else (),
        times=found[unit] if unit else (),
        rows=found[tuple(by)],
        most_rows=MOST_ROWS,
    )


def _collected(figures: DataFrame, by: Sequence[By]) -> dict[tuple[By, ...], list[Figures] | None]:
    """Return the rows of each grouping, in order. If a grouping has more than `MOST_ROWS` rows, its rows are None."""
    level = Window.partitionBy(F.array(*(F.col(name).isNotNull() for name in by))).orderBy(*by)
    nth = F.row_number().over(level)
    some = figures.withColumn("nth", nth).where(F.col("nth") <= MOST_ROWS + 1).drop("nth")
    found: dict[tuple[By, ...], list[Figures]] = {each: [] for each in levels_of(by)}
    for row in _in_plain_types(some).collect():
        figures_of_row = _read(row.asDict())
        found[tuple(name for name in by if figures_of_row[name] is not None)].append(figures_of_row)
    return {each: _in_order(rows, each) if len(rows) <= MOST_ROWS else None for each, rows in found.items()}


def _in_order(rows: list[Figures], names: Sequence[By]) -> list[Figures]:
    return sorted(rows, key=lambda row: [row[name] for name in names])


def _read(row: dict[str, Any]) -> Figures:
    return row | {"hour": from_epoch_ms(row["hour"] * 1000)} if row.get("hour") is not None else row


def _range_text(start: datetime | None, end: datetime | None) -> str:
    if start is None and end is None:
        return "all of them"
    texts = [f"{name} {at.astimezone(UTC):%Y-%m-%d %H:%M:%S}" for name, at in (("from", start), ("before", end)) if at]
    return " ".join(texts)


def _summary_of(shown: ReportPage, options: ReportOptions) -> Summary:
    total = shown.total
    outcomes = ("delivered", "repeated", "again", "dropped", "skipped", "dead")
    counts = {name: total[name] for name in (*outcomes, "early", "unclaimed")}
    lateness = {name: total[name] for name in ("p50_ms", "p95_ms", "p99_ms", "max_ms", "min_ms")}
    files = {"parquet": options.parquet, "csv": options.csv, "html": options.html}
    written = {name: f"{path}" for name, path in files.items() if path is not None}
    rows = sum(counts[name] for name in outcomes)
    facts = {"within": shown.within, "time_zone": "UTC", "lateness": lateness, "written": written}
    return Summary(rows=rows, counts=counts, facts=facts)

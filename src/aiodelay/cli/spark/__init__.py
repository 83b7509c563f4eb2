"""`aiodelay spark`: what there is to do for Spark, one command a job; each is imported when it is asked for."""

from __future__ import annotations

from cyclopts import App

from aiodelay.cli.commands import name_of

__all__ = ["JOBS", "spark"]

JOBS: tuple[tuple[str, str], ...] = (
    ("archive:archive", "Write what became of messages to Parquet, by day, each event once."),
    ("backfill:backfill", "Store the rows of files or of a database as messages."),
    ("cold:cold", "Keep far schedules in files, or cancel them there."),
    ("compact:compact", "Merge the small files of an archive's days."),
    ("engine:engine", "Deliver from Kafka to Kafka with Spark alone (experimental)."),
    ("migrate:migrate", "Move what is due from a time on to another store, while both are in use."),
    ("promote:promote", "Move what comes due soon from a cold tier into a store."),
    ("reconcile:reconcile", "Compare a truth with what is pending in a store."),
    ("repair:repair", "Mend what a reconcile has found, where it is still so."),
    ("replay:replay", "Store a part of what was kept of messages again."),
    ("report:report", "Tell how late messages were delivered, and what failed, from archived events."),
    ("simulate:simulate", "Tell what lateness and backlog what is pending will bring, at some rates."),
    ("snapshot:snapshot", "Write what a store holds to Parquet."),
)
"""Place in this package, and what it does, for each job."""

spark: App = App(name="spark", help="Load, check, archive, replay and report with Apache Spark.")

for _place, _line in JOBS:
    spark.command(f"{__package__}.{_place}", name=name_of(_place), help=_line)

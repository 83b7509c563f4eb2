"""`aiodelay spark`: one command for each job.

Begin with `common`, which reads the options that jobs share.
"""

from __future__ import annotations

from typing import NamedTuple

from cyclopts import App

from aiodelay.operations.spark_options import (
    ArchiveOptions,
    BackfillOptions,
    ColdCancelOptions,
    ColdPutOptions,
    CompactOptions,
    EngineOptions,
    MigrateOptions,
    PromoteOptions,
    ReconcileOptions,
    RepairOptions,
    ReplayOptions,
    ReportOptions,
    SimulateOptions,
    SnapshotOptions,
)

from .command import Source, command
from .sources import Asked, Differences, Kept, Messages, Moved, Rows, Told, Truth

__all__ = ["JOBS", "spark"]


class Job(NamedTuple):
    """What a command does, the options of the job, and what else the command takes."""

    help: str
    options: type
    source: type[Source] = Source


JOBS: dict[str, Job] = {
    "archive": Job("Write the events of messages to Parquet, by day, each event once.", ArchiveOptions),
    "backfill": Job("Store the rows of files or of a database as messages.", BackfillOptions, Rows),
    "cold put": Job(
        "Keep the rows of files or of a database in a cold tier, until `promote` moves them into a store.\n\n"
        "It may be repeated: the tier keeps the first version of an id, or the highest one with --conflict newer.",
        ColdPutOptions,
        Rows,
    ),
    "cold cancel": Job(
        "Cancel messages in a cold tier, and in the store if they have gone there.\n\n"
        "It may be repeated. Without --store it rejects messages that are not in the tier, or have gone into a store.",
        ColdCancelOptions,
        Asked,
    ),
    "compact": Job("Merge the small files of an archive's days.", CompactOptions),
    "engine": Job("Deliver from Kafka to Kafka with Spark alone (experimental).", EngineOptions, Told),
    "migrate": Job(
        "Move messages that are due from a time on to another store, while both are in use.", MigrateOptions, Moved
    ),
    "promote": Job("Move messages that come due soon from a cold tier into a store.", PromoteOptions),
    "reconcile": Job("Compare a truth with the pending messages of a store.", ReconcileOptions, Truth),
    "repair": Job(
        "Repair the differences that a reconcile has found, as far as they still exist.", RepairOptions, Differences
    ),
    "replay": Job("Store messages of a snapshot or of a backfill again.", ReplayOptions, Kept),
    "report": Job("Report how late messages were delivered, and which failed, from archived events.", ReportOptions),
    "simulate": Job(
        "Forecast the lateness and the backlog of pending messages, at some rates.", SimulateOptions, Messages
    ),
    "snapshot": Job("Write what a store holds to Parquet.", SnapshotOptions),
}
"""Each command by its words."""

spark: App = App(name="spark", help="Load, check, archive, replay and report with Apache Spark.")
_cold = App(name="cold", help="Keep far schedules in files, or cancel them there.")
spark.command(_cold)

for _name, _job in JOBS.items():
    _words = _name.rpartition(" ")  # "cold put" is a command of the group "cold"
    (_cold if _words[0] else spark).command(
        command(_name.replace(" ", "_"), _job.options, _job.source), name=_words[2], help=_job.help
    )

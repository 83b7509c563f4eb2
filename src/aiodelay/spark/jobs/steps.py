"""The work folder of a migration: a table for each step, with a part for each pass.

A run writes `found` before it copies, and `both` before it removes. So the next run can finish an interrupted pass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, Literal, TypeAlias

import msgspec
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it

from aiodelay.core.durations import from_epoch_ms
from aiodelay.errors import ConfigurationError
from aiodelay.spark.moving import Place
from aiodelay.spark.options import checked_folder
from aiodelay.spark.schemas import Table

from .sources import stored

__all__ = ["Step", "Steps", "messages_of"]

Step: TypeAlias = Literal["found", "both", "taken", "ended"]
"""The steps of a pass.

`found`: the messages to copy. `both`: the messages that are unchanged in the source and have their copy in the target.
`taken`: the outcome of the removal of each message of `both`. `ended`: the pass has ended.
"""

_NOT_THERE: Final = ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA")


class Steps:
    """The tables in the work folder of a migration.

    Args:
        spark: The session.
        folder: The work folder.
        about: The names of source and target, which identify the migration.

    Raises:
        ConfigurationError: The folder belongs to another migration, or its name is blank or a pattern.
    """

    def __init__(self, spark: SparkSession, folder: str, about: Mapping[str, str]) -> None:
        self._spark, self._folder = spark, checked_folder("work", folder)
        known = self._parquet(f"{self._folder}/about")
        if known is None:
            values = [F.lit(text).alias(name) for name, text in about.items()]
            spark.range(1).select(*values).write.mode("overwrite").parquet(f"{self._folder}/about")
            return
        rows = known.collect()
        if rows and rows[0].asDict() != dict(about):
            told = ", ".join(f"{name} {text}" for name, text in rows[0].asDict().items())
            raise ConfigurationError(
                "work", f"the folder of another migration: {told}", "a folder for this migration only"
            )

    def table(self, step: Step) -> DataFrame | None:
        """Return the rows of a step in all passes, with a column `pass`; None before the first pass."""
        return self._parquet(f"{self._folder}/{step}")

    def read(self, step: Step, number: int) -> DataFrame | None:
        """Return the rows of a step in one pass; None if the pass has not written the step."""
        return self._parquet(self._path(step, number))

    def has(self, step: Step, number: int) -> bool:
        """Return whether a pass has written a step."""
        return self.read(step, number) is not None

    def last(self, step: Step) -> int:
        """Return the number of the last pass that has written a step; 0 if no pass has written the step."""
        table = self.table(step)
        row = None if table is None else table.agg(F.max("pass").alias("last")).first()
        return 0 if row is None else row["last"] or 0

    def write(self, step: Step, number: int, frame: DataFrame) -> DataFrame:
        """Write the table of a step. Return the written table, so that Spark does not evaluate the frame again."""
        path = self._path(step, number)
        frame.write.mode("overwrite").parquet(path)
        return self._spark.read.schema(frame.schema).parquet(path)

    def _path(self, step: Step, number: int) -> str:
        return f"{self._folder}/{step}/pass={number}"

    def _parquet(self, path: str) -> DataFrame | None:
        try:
            found = self._spark.read.parquet(path)
            found.schema  # noqa: B018 - a Connect session reads the files only now
        except AnalysisException as error:
            if error.getCondition() in _NOT_THERE:
                return None
            raise
        return found


def messages_of(
    spark: SparkSession,
    place: Place,
    *columns: str,
    table: Table = "messages",
    ids: Collection[str] | None = None,
    from_ms: int | None = None,
) -> DataFrame:
    """Return rows of a table of a store.

    Args:
        spark: The session.
        place: The store and the namespace.
        columns: The columns to read; default: all columns.
        table: The table to read.
        ids: Read only the rows with these ids; None = all rows.
        from_ms: Read only messages that are due at this time or later, in epoch ms; None = all messages.
    """
    options = {"store": place.url, "namespace": place.namespace, "table": table}
    if ids is not None:
        options["ids"] = msgspec.json.encode(list(ids)).decode()
    if from_ms is not None:
        options["dueFrom"] = from_epoch_ms(from_ms).isoformat()
    return stored(spark, *columns, **options)

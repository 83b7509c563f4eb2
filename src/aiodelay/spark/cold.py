"""The folder of a cold tier: facts as Parquet by due day, and a log of valid loads and promoted days.

A *fact* is a row of one of three kinds: a message that was put into the tier, a message that went straight into the
store, or a tombstone, which ends a message. The facts of one job are a *load*, in `facts/load=<name>/due_day=<day>/`. A
load is valid when an entry of the log (`log/<kind>-<name>/`) names the load. Jobs only add loads and entries, each in a
folder of its own. So jobs that write at the same time do not disturb each other, and a reader sees a whole load or
nothing of it. The file system must show a file only when the file is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from typing import Any, Final, Literal
from uuid import uuid4

from msgspec import Struct
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it

from aiodelay.core.durations import from_epoch_ms

from .options import checked_folder

__all__ = [
    "END",
    "MESSAGE",
    "PUT",
    "STORED",
    "WAS_DUE_AT",
    "Load",
    "Standing",
    "Tier",
    "day_of",
    "due_day",
    "ends",
    "live",
    "standing_of",
]

PUT: Final = "put"
STORED: Final = "stored"
"""A message that went straight into the store because it was due too soon for the tier. It is never promoted."""
END: Final = "end"
"""A tombstone. Messages with the id and the day of this fact, and with this or an older version, are not delivered."""

MESSAGE: Final[Mapping[str, str]] = {
    "id": "STRING",
    "due_at": "TIMESTAMP",
    "payload": "BINARY",
    "to": "STRING",
    "type": "STRING",
    "encoding": "STRING",
    "key": "BINARY",
    "headers": "MAP<STRING, BINARY>",
    "version": "BIGINT",
}
"""The columns that a promotion writes to a store, with their types."""
_FACT: Final = {"kind": "STRING", **MESSAGE, "at": "TIMESTAMP", "due_day": "DATE"}
WAS_DUE_AT: Final = "was_due_at"
"""An optional column of a job's rows: the earlier due time of a message, that is, of its older version in the tier."""
_ENTRY: Final = "kind STRING, name STRING, at STRING, days ARRAY<STRING>, through STRING, store STRING"
_DAY_MS: Final = 86_400_000
_EPOCH: Final = date(1970, 1, 1)


class Load(Struct, frozen=True):
    """The facts that one job has added.

    Attributes:
        name: The name of the load in its folder.
        days: The due days of its facts.
        counts: The numbers of messages that were put, and of tombstones.
    """

    name: str
    days: frozenset[date]
    counts: Mapping[str, int]


class Standing(Struct, frozen=True):
    """The state of the tier according to its log.

    Attributes:
        loads: The due days of each valid load, by its name.
        claimed: All messages due before this day have been promoted, or are being promoted; at first 1970-01-01.
        promoted: All messages due before this day have been promoted.
        store: The store of the last promotion; None if there was none.
    """

    loads: Mapping[str, frozenset[date]]
    claimed: date
    promoted: date
    store: str | None = None

    def days(self, is_wanted: Callable[[date], bool]) -> set[date]:
        """Return the wanted days that have facts."""
        return {day for days in self.loads.values() for day in days if is_wanted(day)}

    @property
    def claimed_ms(self) -> int:
        """The beginning of the day `claimed`, in epoch ms; 0 before the first claim."""
        return (self.claimed - _EPOCH).days * _DAY_MS

    def since(self, before: Standing, own: str | None) -> Standing:
        """Return this state without some loads: those of the state `before`, and the caller's own load."""
        loads = {name: days for name, days in self.loads.items() if name not in before.loads and name != own}
        return Standing(loads, self.claimed, self.promoted, self.store)


class Tier:
    """The folder of one cold tier: adds facts, reads facts, and reads and writes the log.

    Args:
        spark: The session that reads and writes the tier.
        folder: A folder that Spark's executors can read and write.

    Raises:
        ConfigurationError: The name of the folder is blank, or has a character that Spark reads as a pattern.
    """

    def __init__(self, spark: SparkSession, folder: str) -> None:
        self._spark, self._folder = spark, checked_folder("tier", folder)

    def standing(self) -> Standing:
        """Read the log and return the state of the tier; a missing tier has an empty state."""
        log = self._spark.read.schema(_ENTRY).options(mode="FAILFAST", recursiveFileLookup="true")
        try:
            entries = log.json(f"{self._folder}/log").collect()
        except AnalysisException as error:
            if error.getCondition() != "PATH_NOT_FOUND":
                raise
            entries = []
        return standing_of(tuple(row) for row in entries)

    def facts(self, standing: Standing, is_wanted: Callable[[date], bool]) -> DataFrame | None:
        """Return the facts of the wanted days; None if they have no facts.

        Spark neither lists nor reads the files of other days.
        """
        places = self.places(standing, is_wanted)
        if not places:
            return None
        return self._spark.read.schema(_ddl(_FACT)).option("basePath", f"{self._folder}/facts").parquet(*places)

    def places(self, standing: Standing, is_wanted: Callable[[date], bool]) -> list[str]:
        """Return the folders that hold the facts of the wanted days."""
        places: list[str] = []
        for name, days in sorted(standing.loads.items()):
            wanted = {day for day in days if is_wanted(day)}
            load = f"{self._folder}/facts/load={name}"
            places += [load] if wanted == days else [f"{load}/due_day={day}" for day in sorted(wanted)]
        return places

    def known(self, standing: Standing, rows: DataFrame, *, now_ms: int) -> DataFrame | None:
        """Return the versions in the tier of some ids, on days that are not over or not promoted.

        Args:
            standing: The state whose loads are read.
            rows: The ids, in a column `id`. If there is a column `was_due_at`, and each row has a value in it or in
                `due_day`, only the days of these values are read. Otherwise all days are read.
            now_ms: The current time, in epoch ms.

        Returns:
            A row for each `id` and `due_day`: the highest `version` that was put or stored, the highest version that
            was `stored`, and the highest version that has `ended`. None if the read days have no facts.
        """
        since = min(standing.promoted, day_of(now_ms))
        named = _named_days(rows) if WAS_DUE_AT in rows.columns else None
        facts = self.facts(standing, lambda day: day >= since and (named is None or day in named))
        if facts is None:
            return None
        of_ids = facts.join(rows.select("id"), "id", "left_semi")
        highest = {"version": (PUT, STORED), "stored": (STORED,), "ended": (END,)}
        versions = (
            F.max(F.when(F.col("kind").isin(*kinds), F.col("version"))).alias(name) for name, kinds in highest.items()
        )
        return of_ids.groupBy("id", "due_day").agg(*versions).where("version IS NOT NULL")

    def add(self, facts: DataFrame, *, now_ms: int) -> Load | None:
        """Add facts as one load. Either all facts become valid at one moment, or none.

        Args:
            facts: Columns `kind`, `id`, `version` and `due_day`. For messages that are put, also the other columns of a
                message.
            now_ms: The time of the facts, in epoch ms.

        Returns:
            The load; None if there are no facts.
        """
        name = uuid4().hex
        place = f"{self._folder}/facts/load={name}"
        rows = _completed(facts, now_ms).hint("rebalance", F.col("due_day")).sortWithinPartitions("due_day", "id")
        rows.write.partitionBy("due_day").parquet(place)
        written = self._spark.read.schema("kind STRING, due_day DATE").parquet(place)
        found = written.groupBy("kind", "due_day").count().collect()
        if not found:
            return None
        counts = {kind: sum(row["count"] for row in found if row["kind"] == kind) for kind in (PUT, END)}
        load = Load(name, frozenset(row["due_day"] for row in found), counts)
        self._enter("load", name, now_ms, days=sorted(load.days))
        return load

    def claim(self, through: date, *, store: str, now_ms: int) -> None:
        """Record that messages due before a day are being promoted.

        A job that adds facts reads this claim afterwards. So the job knows that the promotion may miss the new facts.
        """
        self._enter("claim", uuid4().hex, now_ms, through=through, store=store)

    def promoted(self, through: date, *, store: str, now_ms: int) -> None:
        """Record that all messages due before a day are in the store, or were in the store and have ended."""
        self._enter("promoted", uuid4().hex, now_ms, through=through, store=store)

    def _enter(
        self,
        kind: Literal["load", "claim", "promoted"],
        name: str,
        now_ms: int,
        *,
        days: Sequence[date] = (),
        through: date | None = None,
        store: str | None = None,
    ) -> None:
        values = {
            "kind": F.lit(kind),
            "name": F.lit(name),
            "at": F.lit(from_epoch_ms(now_ms).isoformat(timespec="milliseconds")),
            "days": F.split(F.lit(",".join(f"{day}" for day in days)), ","),
            "through": F.lit(None if through is None else f"{through}"),
            "store": F.lit(store),
        }
        entry = self._spark.range(0, 1, 1, 1).select(*(value.alias(name) for name, value in values.items()))
        entry.write.json(f"{self._folder}/log/{kind}-{name}")


def standing_of(entries: Iterable[Sequence[Any]]) -> Standing:
    """Return the state of a tier from the entries of its log, in any order."""
    loads: dict[str, frozenset[date]] = {}
    through = {"claim": _EPOCH, "promoted": _EPOCH}
    stores: list[tuple[str, str]] = []
    for kind, name, at, days, day, store in entries:
        if kind == "load":
            loads[name] = frozenset(map(date.fromisoformat, days))
        else:
            through[kind] = max(through[kind], date.fromisoformat(day))
            stores.append((at, store))
    return Standing(loads, max(through.values()), through["promoted"], max(stores)[1] if stores else None)


def day_of(ms: int) -> date:
    """Return the day, in UTC, of an instant in epoch ms."""
    return from_epoch_ms(ms).date()


def due_day(due_at: Column) -> Column:
    """Return the UTC day of a timestamp. The time zone of the session has no effect."""
    return F.date_from_unix_date(F.floor(F.unix_millis(due_at) / F.lit(_DAY_MS)).cast("int"))


def live(facts: DataFrame) -> DataFrame:
    """Return the highest version of each id and day, if it was put into the tier and no tombstone ends it."""
    newest = Window.partitionBy("due_day", "id").orderBy(F.col("version").desc(), "kind", "at", "due_at")
    return (
        facts.withColumn("_place", F.row_number().over(newest)).where(f"_place = 1 AND kind = '{PUT}'").drop("_place")
    )


def ends(by_day: DataFrame) -> DataFrame:
    """Return tombstones for the versions in `by_day` that have no tombstone yet."""
    lacking = by_day.where("ended IS NULL OR ended < version")
    return lacking.select(F.lit(END).alias("kind"), "id", "version", "due_day")


def _named_days(rows: DataFrame) -> set[date] | None:
    """Return the days that the rows name. If a row names no day, any day is possible: return None."""
    was_due = due_day(F.col(WAS_DUE_AT))
    named = [was_due, F.col("due_day")] if "due_day" in rows.columns else [was_due]
    days = rows.select(F.array_compact(F.array(*named)).alias("days")).select(F.explode_outer("days").alias("day"))
    found = {row["day"] for row in days.where("day IS NULL OR day <= DATE'9999-12-31'").distinct().collect()}
    return None if None in found else found


def _ddl(types: Mapping[str, str]) -> str:
    return ", ".join(f"`{name}` {kind}" for name, kind in types.items())


def _completed(facts: DataFrame, now_ms: int) -> DataFrame:
    given = {name: F.col(name) for name in facts.columns} | {"at": F.timestamp_millis(F.lit(now_ms))}
    return facts.select(*(given.get(name, F.lit(None)).cast(kind).alias(name) for name, kind in _FACT.items()))

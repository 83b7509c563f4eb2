"""A cold tier's folder: facts as Parquet by due day, and a log that says which of them count and what was promoted.

`facts/load=<name>/due_day=<day>/` holds what one job added; it counts once the log names the load. `log/<name>/` is one
entry. Both are only ever added to, each in a folder of its own: jobs that write at the same time do not meet, and a
reader sees a load as a whole or not at all, on every file system that shows a file only when it is complete.
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
"""What went straight into the store, being due too soon for the tier: known like what was promoted, never promoted."""
END: Final = "end"
"""A tombstone: of its id and day, what has this version or an older one is delivered no more."""

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
"""A message's columns, as they are written to a store, with their types."""
_FACT: Final = {"kind": "STRING", **MESSAGE, "at": "TIMESTAMP", "due_day": "DATE"}
WAS_DUE_AT: Final = "was_due_at"
"""Beside a message's columns: when it was due before, which tells where to look for it."""
_ENTRY: Final = "kind STRING, name STRING, at STRING, days ARRAY<STRING>, through STRING, store STRING"
_DAY_MS: Final = 86_400_000
_EPOCH: Final = date(1970, 1, 1)


class Load(Struct, frozen=True):
    """What one job has added.

    Attributes:
        name: Of its folder.
        days: The due days that it has facts of.
        counts: How many, by kind.
    """

    name: str
    days: frozenset[date]
    counts: Mapping[str, int]


class Standing(Struct, frozen=True):
    """What the log says.

    Attributes:
        loads: The days of each load that counts, by its name.
        claimed: Everything due before this day has been promoted, or is being promoted; at first 1970-01-01.
        promoted: Everything due before this day has been promoted.
        store: Into which store, the last time; None: into none yet.
    """

    loads: Mapping[str, frozenset[date]]
    claimed: date
    promoted: date
    store: str | None = None

    def days(self, is_wanted: Callable[[date], bool]) -> set[date]:
        """Return the days that have facts, of those that are wanted."""
        return {day for days in self.loads.values() for day in days if is_wanted(day)}

    @property
    def claimed_ms(self) -> int:
        """The beginning of the day `claimed`, in epoch ms; 0 as long as there is none."""
        return (self.claimed - _EPOCH).days * _DAY_MS

    def since(self, before: Standing, own: str | None) -> Standing:
        """Return this without the loads that an earlier look had found, and without one's own."""
        loads = {name: days for name, days in self.loads.items() if name not in before.loads and name != own}
        return Standing(loads, self.claimed, self.promoted, self.store)


class Tier:
    """A cold tier.

    Args:
        spark: Reads and writes it.
        folder: Anywhere that Spark's executors can read and write.

    Raises:
        ConfigurationError: The folder is no name of one.
    """

    def __init__(self, spark: SparkSession, folder: str) -> None:
        self._spark, self._folder = spark, checked_folder("tier", folder)

    def standing(self) -> Standing:
        """Return what the log says now; of a tier that is not there yet, nothing."""
        log = self._spark.read.schema(_ENTRY).options(mode="FAILFAST", recursiveFileLookup="true")
        try:
            entries = log.json(f"{self._folder}/log").collect()
        except AnalysisException as error:
            if error.getCondition() != "PATH_NOT_FOUND":
                raise
            entries = []
        return standing_of(tuple(row) for row in entries)

    def facts(self, standing: Standing, is_wanted: Callable[[date], bool]) -> DataFrame | None:
        """Return the facts of some days; None if there are none. No other day's files are listed or read."""
        places = self.places(standing, is_wanted)
        if not places:
            return None
        return self._spark.read.schema(_ddl(_FACT)).option("basePath", f"{self._folder}/facts").parquet(*places)

    def places(self, standing: Standing, is_wanted: Callable[[date], bool]) -> list[str]:
        """Return the folders that hold the facts of some days."""
        places: list[str] = []
        for name, days in sorted(standing.loads.items()):
            wanted = {day for day in days if is_wanted(day)}
            load = f"{self._folder}/facts/load={name}"
            places += [load] if wanted == days else [f"{load}/due_day={day}" for day in sorted(wanted)]
        return places

    def known(self, standing: Standing, rows: DataFrame, *, now_ms: int) -> DataFrame | None:
        """Return what there is of some ids on days that are not over; None if nothing has to be read for it.

        By `id` and `due_day` the highest `version` that was put or stored, the highest that was `stored`, and that has
        `ended`.

        Args:
            standing: Which loads are looked at.
            rows: With `id`. With `was_due_at` too, only the days it names are read, and those of `due_day`; if a row
                has neither, all days.
            now_ms: The time, in epoch ms.
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
        """Add facts: all of them count from one moment on, or none do; return None if there is none.

        Args:
            facts: With `kind`, `id`, `version` and `due_day`, and of what is put a message's columns.
            now_ms: When they came to be, in epoch ms.
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
        """Say that what is due before a day is being promoted; whoever adds to these days from now on must look."""
        self._enter("claim", uuid4().hex, now_ms, through=through, store=store)

    def promoted(self, through: date, *, store: str, now_ms: int) -> None:
        """Say that all that is due before a day is in the store, or has been."""
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
    """Return what a log says: the values of its entries, in any order."""
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
    """Return the day of a timestamp in UTC, whatever the session's zone."""
    return F.date_from_unix_date(F.floor(F.unix_millis(due_at) / F.lit(_DAY_MS)).cast("int"))


def live(facts: DataFrame) -> DataFrame:
    """Return of each id and day the put with the highest version, unless a tombstone has it or a higher one."""
    newest = Window.partitionBy("due_day", "id").orderBy(F.col("version").desc(), "kind", "at", "due_at")
    return (
        facts.withColumn("_place", F.row_number().over(newest)).where(f"_place = 1 AND kind = '{PUT}'").drop("_place")
    )


def ends(by_day: DataFrame) -> DataFrame:
    """Return the tombstones that `by_day` lacks: those that stand already are left out."""
    lacking = by_day.where("ended IS NULL OR ended < version")
    return lacking.select(F.lit(END).alias("kind"), "id", "version", "due_day")


def _named_days(rows: DataFrame) -> set[date] | None:
    """Return the days that rows name, None if one of them may be of any day."""
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

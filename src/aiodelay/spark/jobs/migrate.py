"""`aiodelay spark migrate`: what is due from a time on moves from one store to another, while both are in use."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Final

from msgspec import Struct
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it

from aiodelay.core.durations import format_duration, from_epoch_ms, parse_duration, to_epoch_ms
from aiodelay.core.validation import check_count
from aiodelay.errors import ConfigurationError, masked_url
from aiodelay.operations.spark_options import MigrateOptions
from aiodelay.ports.clock import SystemClock
from aiodelay.spark.moving import COPIED, MOVED, OUTCOMES, TAKEN_BACK, WHAT, Copier, Place, Taker, Withdrawer
from aiodelay.spark.options import store_url
from aiodelay.spark.summary import Summary
from aiodelay.spark.writing import cores_of

from .job import job
from .settings_origin import run_coroutine
from .steps import Steps, messages_of

__all__ = ["LEAD", "MARGIN", "run"]

LEAD: Final = MigrateOptions.lead
MARGIN: Final = MigrateOptions.margin
_FEW, _ONE_TASK = 500, 10_000


class _Plan(Struct, frozen=True, kw_only=True):
    source: Place
    target: Place
    cutover_ms: int
    lead_ms: int
    margin_ms: int
    passes: int
    rate: int
    tasks: int
    patience_ms: int
    verify: bool

    @property
    def task_rate(self) -> float:
        return self.rate / self.tasks


@job("migrate", MigrateOptions)
def run(spark: SparkSession, options: MigrateOptions) -> Summary:
    """Move messages that are due at `cutover` or later, in passes, until one finds nothing to move.

    A pass copies what it finds, looks at both stores again, takes out of the source what stands in both as it was
    copied, and takes back all other copies. What it does is written into `work` first: after a crash the next run ends
    the pass that was left. Each message is at any time in one of the stores, or in both until the pass has ended.

    Args:
        spark: A session, classic or Connect.
        options: See `MigrateOptions`; callers give each by keyword.

    Returns:
        `rows`: what passes have found. `rejected`: what is left in the source, and copies that differ. `counts` as
        docs/spark/migrate.md has them.

    Raises:
        ConfigurationError: An option is wrong, or the cut-over is too near; nothing was moved.
        UnsupportedByStoreError: A store cannot be read whole.
        StoreUnavailableError: A store did not answer for too long; run it again.
    """
    clock = SystemClock()
    duration = partial(parse_duration, error=ConfigurationError)
    tasks = cores_of(spark) if options.concurrency is None else options.concurrency
    plan = _Plan(
        source=Place(options.source, options.namespace),
        target=Place(options.target, options.to_namespace),
        cutover_ms=to_epoch_ms(options.cutover, field="cutover"),
        lead_ms=duration(options.lead, field="lead"),
        margin_ms=duration(options.margin, field="margin"),
        passes=check_count(options.passes, "passes", 0, 1_000_000),
        rate=check_count(options.rate, "rate", 0, 100_000_000),
        tasks=check_count(tasks, "concurrency", 1, 100_000),
        patience_ms=duration(options.timeout, field="timeout"),
        verify=options.verify,
    )
    _check(plan)
    steps = Steps(spark, options.work, {"source": _told(plan.source), "target": _told(plan.target)})
    migration = _Migration(spark, plan, steps, clock)
    resumed = migration.resume()
    wait_ms = plan.cutover_ms - clock.now_ms()
    if not resumed and 0 < wait_ms < plan.lead_ms:
        found = f"in {format_duration(wait_ms)}"
        raise ConfigurationError("cutover", found, f"at least lead={format_duration(plan.lead_ms)} ahead, or past")
    if wait_ms >= plan.lead_ms or wait_ms <= 0:
        migration.move()
    counts = dict(migration.counts) | {"left": migration.left()}
    return Summary(
        rows=migration.rows,
        rejected=counts["left"] + counts.get("drift", 0),
        counts=counts,
        facts={
            "cutover": from_epoch_ms(plan.cutover_ms).isoformat(),
            "passes": migration.passes,
            "resumed": resumed,
            "verified": options.verify,
            "work": options.work,
        },
    )


def _told(place: Place) -> str:
    return f"{masked_url(place.url)} {place.namespace}"


def _check(plan: _Plan) -> None:
    if plan.margin_ms >= plan.lead_ms:
        found = f"{format_duration(plan.margin_ms)}, with lead={format_duration(plan.lead_ms)}"
        raise ConfigurationError("margin", found, "less than lead")
    places = [(store_url(each.url), each.namespace) for each in (plan.source, plan.target)]
    if places[0] == places[1]:
        raise ConfigurationError("to", masked_url(plan.target.url), "another store, or another namespace")
    for each in (plan.source, plan.target):
        each.scannable()
    run_coroutine(_opened_once(plan.target))


async def _opened_once(place: Place) -> None:
    """Open a store that messages move to: one that is not there yet is made, and one that cannot be used is told."""
    async with place.store():
        pass


class _Migration:
    def __init__(self, spark: SparkSession, plan: _Plan, steps: Steps, clock: SystemClock) -> None:
        self._spark, self._plan, self._steps, self._clock = spark, plan, steps, clock
        self._origin = plan.source.origin
        self.rows = self.passes = 0
        self.counts = Counter(dict.fromkeys(_COUNTS + (("same", "drift") if plan.verify else ()), 0))
        past = clock.now_ms() >= plan.cutover_ms
        self._from_ms = clock.now_ms() + plan.lead_ms if past else plan.cutover_ms

    @property
    def _is_late(self) -> bool:
        """Whether nothing is moved any more."""
        return self._clock.now_ms() >= self._from_ms - self._plan.margin_ms

    def resume(self) -> bool:
        """End the pass that a run before this one has left; say whether there was one."""
        number = self._steps.last("found")
        if number == 0 or self._steps.has("ended", number):
            return False
        self._end(number)
        return True

    def move(self) -> None:
        """Make passes until one finds nothing, there have been enough of them, or it is too late."""
        found = 1
        while found and not self._is_late and self.passes != (self._plan.passes or None):
            found = self._pass()
            self.passes += 1

    def left(self) -> int:
        """Return how many messages that were to be moved stand in the source."""
        return self._source("id").count()

    # --- one pass -----------------------------------------------------------------------------------------

    def _pass(self) -> int:
        """Return how many messages it has moved or taken back."""
        plan, number = self._plan, self._steps.last("found") + 1
        outdated = self._take_back(self._outdated())
        rows = self._source().where("state != 'held'").withColumn("due_ms", F.unix_millis("due_at"))
        found = self._steps.write("found", number, rows)
        ids: list[str] | None = [each["id"] for each in found.select("id").limit(_FEW + 1).collect()]
        if not ids:
            return outdated
        n = len(ids)
        if n > _FEW:
            ids, n = None, found.count()
        self.rows += n
        copier = Copier(
            plan.target, self._origin, tuple(found.columns), number, plan.margin_ms, plan.task_rate, plan.patience_ms
        )
        copied = self._spread(self._movable(found)).mapInArrow(copier, COPIED)
        sums = copied.agg(*(F.sum(name).alias(name) for name in ("copied", "late", "refused"))).first()
        assert sums is not None
        self.counts.update({name: sums[name] or 0 for name in ("copied", "late")})
        self.counts["refused"] = sums["refused"] or 0  # each pass finds the same ones
        both = self._in_both(found, ids)
        self._steps.write("both", number, self._same(found, both, ids) if plan.verify else both)
        return outdated + self._end(number)

    def _movable(self, found: DataFrame) -> DataFrame:
        """Leave out series of which an occurrence is retried: to take one out would end that too.

        Occurrences are read after the series: a series of which one begins to be retried since is due at another time,
        and is not taken out.
        """
        if found.where("rule IS NOT NULL").isEmpty():
            return found
        retried = messages_of(self._spark, self._plan.source, "id").where(F.col("id").rlike(_OCCURRENCE))
        return found.join(retried.select(F.regexp_replace("id", _OCCURRENCE, "").alias("id")), "id", "left_anti")

    def _outdated(self) -> DataFrame:
        """Return of what copies are of which the source has another version: one that has been put there since."""
        stands = messages_of(self._spark, self._plan.source, "id", "revision", "due_at")
        marked = stands.select("id", self._mark(_due_ms()).alias("now"))
        return self._copies().join(marked, "id").where("mark != now").selectExpr(*_NAMED)

    def _in_both(self, found: DataFrame, ids: list[str] | None) -> DataFrame:
        """Return what stands in the source as it was found, and in the target as a copy of just that."""
        there = self._source("id", "revision", "due_at", ids=ids).select("id", "revision", _due_ms().alias("due_ms"))
        marked = found.select(*WHAT, self._mark(F.col("due_ms")).alias("mark"))
        return marked.join(there, [*WHAT]).join(self._copies(ids), ["id", "mark"]).select(*WHAT)

    def _copies(self, ids: list[str] | None = None) -> DataFrame:
        """Return the copies that migrations of the same source have made; what others have brought is the target's."""
        copies = messages_of(self._spark, self._plan.target, "id", "trace", ids=ids)
        marked = copies.select("id", F.element_at("trace", MOVED).alias("mark"))
        return marked.where(F.col("mark").startswith(f"{self._origin}/"))

    def _mark(self, due_ms: Column) -> Column:
        """Return what a copy of a message is marked with."""
        return F.concat_ws("/", F.lit(self._origin), "revision", due_ms)

    def _same(self, found: DataFrame, both: DataFrame, ids: list[str] | None) -> DataFrame:
        """Return of what is in both stores that which is the same in all its parts; count that, and the rest."""
        copies = messages_of(self._spark, self._plan.target, "id", *_PARTS, ids=ids)
        wanted, had = (frame.select("id", _hash().alias(name)) for frame, name in ((found, "wanted"), (copies, "had")))
        judged = both.join(wanted, "id").join(had, "id").select(*WHAT, (F.col("wanted") == F.col("had")).alias("same"))
        judged = judged.localCheckpoint(eager=True)
        counts = {each["same"]: each["count"] for each in judged.groupBy("same").count().collect()}
        self.counts.update({"same": counts.get(True, 0), "drift": counts.get(False, 0)})
        return judged.where("same").drop("same")

    def _end(self, number: int) -> int:
        """Take out what is in both stores, take back what else was copied; return how many were moved."""
        found, both = self._steps.read("found", number), self._steps.read("both", number)
        assert found is not None
        moved, back = 0, found.select(*WHAT)
        if both is not None:
            taken = self._taken(number, both)
            outcomes = {each["outcome"]: each["count"] for each in taken.groupBy("outcome").count().collect()}
            self.counts.update({_COUNTED[outcome]: n for outcome, n in outcomes.items()})
            back = back.join(taken.where(_MOVED), [*WHAT], "left_anti")
            moved = outcomes.get("removed", 0) + outcomes.get("gone", 0)
        taken_back = self._take_back(back)
        self._steps.write("ended", number, self._spark.range(1))
        return moved + taken_back

    def _take_back(self, copies: DataFrame) -> int:
        """Take back the copies of what is named; return how many there were."""
        copies = copies.localCheckpoint(eager=True)
        n = copies.count()
        if n == 0:
            return 0
        withdrawer = Withdrawer(self._plan.target, self._origin, self._plan.patience_ms)
        rows = copies.repartition(1 if n <= _ONE_TASK else self._plan.tasks).mapInArrow(withdrawer, TAKEN_BACK)
        taken: int = sum(each["taken_back"] for each in rows.collect())
        self.counts["taken_back"] += taken
        return taken

    def _taken(self, number: int, both: DataFrame) -> DataFrame:
        """Take out of the source what is in both stores."""
        plan, taken = self._plan, self._steps.read("taken", number)
        if taken is None or taken.count() < both.count():
            taker = Taker(plan.source, plan.margin_ms, plan.task_rate, plan.patience_ms)
            taken = self._steps.write("taken", number, self._spread(both).mapInArrow(taker, OUTCOMES))
        return taken

    def _source(self, *columns: str, ids: list[str] | None = None) -> DataFrame:
        """Return what stands in the source and is to be moved."""
        return messages_of(self._spark, self._plan.source, *columns, ids=ids, from_ms=self._from_ms)

    def _spread(self, frame: DataFrame) -> DataFrame:
        return frame.repartition(self._plan.tasks)


_COUNTS: Final = ("copied", "refused", "moved", "gone", "changed", "late", "taken_back")
_COUNTED: Final = {"removed": "moved", "gone": "gone", "changed": "changed", "left": "late"}
_MOVED: Final = "outcome IN ('removed', 'gone')"
"""What was taken out, also by a try before, or was cancelled after it stood in both: copies of that stay."""


_OCCURRENCE: Final = r"~[0-9]{10,}\z"
_PARTS: Final = (
    *("due_at", "to", "type", "encoding", "payload", "key", "headers"),
    *("version", "expires_at", "late", "rule"),
)
_NAMED: Final = (
    "id",
    "CAST(split_part(mark, '/', 2) AS BIGINT) AS revision",
    "CAST(split_part(mark, '/', 3) AS BIGINT) AS due_ms",
)


def _due_ms() -> Column:
    return F.unix_millis("due_at")


def _hash() -> Column:
    """Return a hash of all that a message is made of."""
    parts = [F.array_sort(F.map_entries("headers")) if name == "headers" else F.col(name) for name in _PARTS]
    return F.xxhash64(*(column for part in parts for column in (part, part.isNull())))

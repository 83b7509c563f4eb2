"""`aiodelay spark migrate`: move messages due at a cut-over or later to another store, while both are in use."""

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
    """Move messages that are due at `cutover` or later, in passes, until a pass finds nothing to move.

    A pass copies messages and reads both stores again. It removes messages from the source if they are unchanged and
    their copy is in the target, and it withdraws all other copies. A pass records each step in `work` before it acts.
    So after a crash the next run finishes the interrupted pass. Each message is always in one of the stores, or in both
    until the pass has ended.

    Args:
        spark: A session, classic or Connect.
        options: See `MigrateOptions`; callers give each option by keyword.

    Returns:
        `rows`: the messages that the passes have found. `rejected`: messages left in the source, and copies that
        differ. docs/spark/migrate.md explains `counts`.

    Raises:
        ConfigurationError: An option is wrong, or the cut-over is too near. Nothing was moved.
        UnsupportedByStoreError: A store cannot be read in parts.
        StoreUnavailableError: A store did not answer for too long. Run the job again.
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
        raise ConfigurationError(
            "cutover", found, f"at least lead={format_duration(plan.lead_ms)} ahead, or in the past"
        )
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
    """Open the target once. This creates a missing store, and reports a store that cannot be used."""
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
        """Whether it is too late to move messages."""
        return self._clock.now_ms() >= self._from_ms - self._plan.margin_ms

    def resume(self) -> bool:
        """Finish the pass that an earlier run has left unfinished. Return whether there was such a pass."""
        number = self._steps.last("found")
        if number == 0 or self._steps.has("ended", number):
            return False
        self._end(number)
        return True

    def move(self) -> None:
        """Run passes until a pass finds nothing, the number of passes is reached, or it is too late."""
        found = 1
        while found and not self._is_late and self.passes != (self._plan.passes or None):
            found = self._pass()
            self.passes += 1

    def left(self) -> int:
        """Return the number of messages that are still to be moved."""
        return self._source("id").count()

    # --- one pass -----------------------------------------------------------------------------------------

    def _pass(self) -> int:
        """Run one pass. Return the number of messages that it has moved or withdrawn."""
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
        self.counts["refused"] = sums["refused"] or 0  # each pass finds the same refused messages again
        both = self._in_both(found, ids)
        self._steps.write("both", number, self._same(found, both, ids) if plan.verify else both)
        return outdated + self._end(number)

    def _movable(self, found: DataFrame) -> DataFrame:
        """Return the messages that may be moved. Leave out each series of which an occurrence is being retried.

        The removal of such a series would also end the retry. Race: this function reads the occurrences after the
        series. If a retry begins in between, the series has another due time now, so the removal by due time skips it.
        """
        if found.where("rule IS NOT NULL").isEmpty():
            return found
        retried = messages_of(self._spark, self._plan.source, "id").where(F.col("id").rlike(_OCCURRENCE))
        return found.join(retried.select(F.regexp_replace("id", _OCCURRENCE, "").alias("id")), "id", "left_anti")

    def _outdated(self) -> DataFrame:
        """Return the versions of which the target has an outdated copy.

        A copy is outdated if the revision or the due time of the message has changed in the source.
        """
        stands = messages_of(self._spark, self._plan.source, "id", "revision", "due_at")
        marked = stands.select("id", self._mark(_due_ms()).alias("now"))
        return self._copies().join(marked, "id").where("mark != now").selectExpr(*_NAMED)

    def _in_both(self, found: DataFrame, ids: list[str] | None) -> DataFrame:
        """Return the messages that are unchanged in the source, and whose copy of this version is in the target."""
        there = self._source("id", "revision", "due_at", ids=ids).select("id", "revision", _due_ms().alias("due_ms"))
        marked = found.select(*WHAT, self._mark(F.col("due_ms")).alias("mark"))
        return marked.join(there, [*WHAT]).join(self._copies(ids), ["id", "mark"]).select(*WHAT)

    def _copies(self, ids: list[str] | None = None) -> DataFrame:
        """Return the copies that the target has from this source. Copies from another source are not copies here."""
        copies = messages_of(self._spark, self._plan.target, "id", "trace", ids=ids)
        marked = copies.select("id", F.element_at("trace", MOVED).alias("mark"))
        return marked.where(F.col("mark").startswith(f"{self._origin}/"))

    def _mark(self, due_ms: Column) -> Column:
        """Return the mark that the copy of a message has; see `aiodelay.spark.moving`."""
        return F.concat_ws("/", F.lit(self._origin), "revision", due_ms)

    def _same(self, found: DataFrame, both: DataFrame, ids: list[str] | None) -> DataFrame:
        """Return the messages whose copy is equal in all parts. Count equal and different copies."""
        copies = messages_of(self._spark, self._plan.target, "id", *_PARTS, ids=ids)
        wanted, had = (frame.select("id", _hash().alias(name)) for frame, name in ((found, "wanted"), (copies, "had")))
        judged = both.join(wanted, "id").join(had, "id").select(*WHAT, (F.col("wanted") == F.col("had")).alias("same"))
        judged = judged.localCheckpoint(eager=True)
        counts = {each["same"]: each["count"] for each in judged.groupBy("same").count().collect()}
        self.counts.update({"same": counts.get(True, 0), "drift": counts.get(False, 0)})
        return judged.where("same").drop("same")

    def _end(self, number: int) -> int:
        """Remove messages that are in both stores, and withdraw other copies. Return the number moved or withdrawn."""
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
        """Withdraw the copies of the named messages. Return the number of copies."""
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
        """Remove from the source the messages that are in both stores. Return the outcomes."""
        plan, taken = self._plan, self._steps.read("taken", number)
        if taken is None or taken.count() < both.count():
            taker = Taker(plan.source, plan.margin_ms, plan.task_rate, plan.patience_ms)
            taken = self._steps.write("taken", number, self._spread(both).mapInArrow(taker, OUTCOMES))
        return taken

    def _source(self, *columns: str, ids: list[str] | None = None) -> DataFrame:
        """Return the messages of the source that are to be moved.

        They are due at the cut-over or later. If the cut-over is past, they are due at least `lead` after the start of
        the run.
        """
        return messages_of(self._spark, self._plan.source, *columns, ids=ids, from_ms=self._from_ms)

    def _spread(self, frame: DataFrame) -> DataFrame:
        return frame.repartition(self._plan.tasks)


_COUNTS: Final = ("copied", "refused", "moved", "gone", "changed", "late", "taken_back")
_COUNTED: Final = {"removed": "moved", "gone": "gone", "changed": "changed", "left": "late"}
_MOVED: Final = "outcome IN ('removed', 'gone')"
"""Outcomes after which the copy stays: this task or an earlier try removed the original, or a program cancelled it."""


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
    """Return a hash of all parts of a message."""
    parts = [F.array_sort(F.map_entries("headers")) if name == "headers" else F.col(name) for name in _PARTS]
    return F.xxhash64(*(column for part in parts for column in (part, part.isNull())))

"""`aiodelay spark backfill`: store each good row of a frame as a message, and reject each wrong row with a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, get_args

from msgspec import structs
from pyspark.sql import DataFrame

from aiodelay.core.durations import format_duration, parse_duration
from aiodelay.core.validation import HANDLER_TARGET, check_count, check_type_name, split_target
from aiodelay.core.values import TOMBSTONE_WINDOW_MS
from aiodelay.errors import ConfigurationError, InputError, shortened
from aiodelay.operations.spark_options import BackfillOptions, OnConflict, PastDue
from aiodelay.ports.clock import SystemClock
from aiodelay.scheduler import MOST_PAYLOAD
from aiodelay.spark.summary import Summary
from aiodelay.spark.write_settings import NO_COLUMNS, read_settings, write_options
from aiodelay.spark.writing import write_frame

from .checking import DROPPED, Rules, accepted, judged, rejected
from .job import job
from .mapping import MAPPED, given
from .settings_origin import one_of, writing_anew

__all__ = ["Found", "OnConflict", "PastDue", "checked_destination", "given_whole", "run", "sorted_out"]


@dataclass(frozen=True, kw_only=True)
class _Options(BackfillOptions):
    now_ms: int | None = None


@job("backfill", _Options)
def run(frame: DataFrame, options: _Options) -> Summary:
    """Store a message for each row that can be a message.

    The job may be repeated. If a row has the id of a message that is pending, or that ended within the tombstone
    window, `conflict` decides: with `insert`, the first version of the id stays; with `newer`, the highest version
    stays. All rows are checked once, before the first row is stored.

    Args:
        frame: Any rows.
        options: See `BackfillOptions`; callers give each option by keyword. Python callers may also give `now_ms`: the
            current time for the checks, in epoch ms. None = the clock of this machine.

    Returns:
        Counts of accepted, repeated and superseded rows, and of stored, replaced and known messages. `facts` has the
        reasons of rejected rows.

    Raises:
        ConfigurationError: An option is wrong, or a column has a wrong name or type. Nothing was stored.
        StoreUnavailableError: The store did not answer for too long. Running the job again is safe.
    """
    rules = Rules(
        now_ms=SystemClock().now_ms() if options.now_ms is None else options.now_ms,
        min_lead_ms=parse_duration(options.min_lead, field="min_lead", error=ConfigurationError),
        past_due=one_of("past_due", options.past_due, get_args(PastDue)),
        max_payload=check_count(options.max_payload, "max_payload", 1, MOST_PAYLOAD),
        conflict=one_of("conflict", options.conflict, get_args(OnConflict)),
        timezone=options.timezone,
    )
    writing = write_options(options, conflict=rules.conflict, max_payload=rules.max_payload)
    rows = judged(given_whole(frame, options.mapping, options.to, rules), rules)
    read_settings(writing, accepted(rows, rules).schema)  # report a wrong option before Spark starts work
    with sorted_out(rows, rules, options.rejects) as (good, found):
        written = {} if options.dry_run else structs.asdict(write_frame(good, writing))
    return Summary(
        rows=found.rows,
        rejected=sum(found.reasons.values()),
        counts={"accepted": found.accepted, **found.dropped, **written},
        facts={
            "dry_run": options.dry_run,
            "reasons": found.reasons,
            "tombstone_window": format_duration(TOMBSTONE_WINDOW_MS),
        },
    )


def given_whole(
    frame: DataFrame,
    mapping: Mapping[str, str] | None,
    to: str | None,
    rules: Rules,
    names: Collection[str] = MAPPED,
) -> DataFrame:
    """Return the message columns of a frame (see `mapping.given`), and check that no required column is missing.

    Raises:
        ConfigurationError: A required column is missing, or a column gives what no column of a message can give.
    """
    for name in NO_COLUMNS:
        if name in (frame.columns if mapping is None else mapping):
            raise ConfigurationError("column", shortened(name), f"{NO_COLUMNS[name]}; or a map without this column")
    found = given(frame, mapping, to=checked_destination(to), names=names)
    needed = ["payload", "to", *(["version"] if rules.conflict == "newer" else [])]
    for name in needed:
        if name not in found.columns:
            raise ConfigurationError("map", f"missing {name!r}", _MISSING[name])
    return found


_MISSING = {
    "payload": "payload=COLUMN, such as payload=struct(*)",
    "to": "to=COLUMN, or the option `to` for all rows: SINK:ADDRESS or handler:TYPE",
    "version": "version=COLUMN, which conflict=newer compares",
}


def checked_destination(to: str | None) -> str | None:
    """Check the destination for all rows, and return it. If `to` is None, return None.

    Raises:
        ConfigurationError: The text is not a destination.
    """
    try:
        if to is not None and (parts := split_target(to))[0] == HANDLER_TARGET:
            check_type_name(parts[1], "to")
    except InputError as error:
        raise ConfigurationError(error.field, error.value, f"{error.allowed}, or handler:TYPE") from None
    return to


class Found(NamedTuple):
    """The numbers of checked rows.

    Attributes:
        rows: The number of all rows.
        accepted: The number of rows that can be messages.
        dropped: The numbers of repeated and of superseded rows. Such rows are not mistakes.
        reasons: The numbers of rejected rows, by `field.reason`.
    """

    rows: int
    accepted: int
    dropped: dict[str, int]
    reasons: dict[str, int]


@contextmanager
def sorted_out(rows: DataFrame, rules: Rules, rejects: str | None = None) -> Iterator[tuple[DataFrame, Found]]:
    """Evaluate checked rows once, and yield the accepted rows and the counts.

    If `rejects` names a folder, this function creates the folder with the rejected rows.

    Raises:
        ConfigurationError: The folder already exists.
    """
    rows = rows.persist()
    try:
        groups = rows.groupBy("field", "reason").count().collect()
        counts = Counter({(row["field"], row["reason"]): row["count"] for row in groups})
        if rejects is not None:
            with writing_anew("rejects", rejects, "a folder that does not exist yet"):
                rejected(rows).write.parquet(rejects)
        dropped = {reason: sum(n for (_, why), n in counts.items() if why == reason) for reason in DROPPED}
        wrong = {f"{at}.{why}": n for (at, why), n in sorted(counts.items(), key=str) if why and why not in DROPPED}
        yield accepted(rows, rules), Found(counts.total(), counts[None, None], dropped, wrong)
    finally:
        rows.unpersist()

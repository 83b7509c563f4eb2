"""`aiodelay spark simulate`: forecast the lateness and the backlog of pending messages at given dispatch rates."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
from msgspec import structs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it

from aiodelay.core.durations import Duration, format_duration, parse_duration, to_epoch_ms
from aiodelay.errors import ConfigurationError, InputError, shortened
from aiodelay.operations.json_shapes import time_shape
from aiodelay.operations.spark_options import Overdue, SimulateOptions
from aiodelay.ports.clock import SystemClock
from aiodelay.spark.forecast import HOUR_MS, MESSAGE, Arrivals, Forecast, Hour, Span, forecast
from aiodelay.spark.session import register
from aiodelay.spark.simulate_page import SimulationPage, render
from aiodelay.spark.summary import Summary

from .job import job
from .mapping import converted, given
from .settings_origin import one_of, problem_of_condition, replacing
from .sources import stored

__all__ = ["MOST_RATES", "Overdue", "pending", "read_rates", "run", "slots", "span_of"]

MOST_RATES: Final = 6
MOST_DAYS: Final = 92
MOST_SLOTS: Final = 1_000_000
"""The default slot is long enough that there are at most this many slots."""
MOST_SLOTS_ASKED: Final = 10_000_000
"""The most slots that a caller may ask for. A slot takes up to 200 bytes of the driver's memory during a simulation."""

_DAY_MS: Final = 86_400_000
_WEEK_MS: Final = 7 * _DAY_MS
_SLOTS_MS: Final = (1, 10, 100, 1000, 10_000)
_LEAST_RATE, _MOST_RATE = 0.001, 1_000_000
_LEAST_SCALE, _MOST_SCALE = 0.01, 100
_DUE: Final = ("due_at",)
_FILES: Final = ("simulate.csv", "simulate.html")


def span_of(start: datetime | None = None, end: datetime | None = None) -> Span:
    """Return the time to simulate. By default it begins now and takes 7 days.

    Raises:
        InputError: A time has no offset.
        ConfigurationError: The end is not after the start, or more than 92 days later.
    """
    from_ms = SystemClock().now_ms() if start is None else to_epoch_ms(start, field="from_time")
    to_ms = from_ms + _WEEK_MS if end is None else to_epoch_ms(end, field="to_time")
    if not from_ms < to_ms <= from_ms + MOST_DAYS * _DAY_MS:
        allowed = f"a time after {time_shape(from_ms)}, at most {MOST_DAYS} days later"
        raise ConfigurationError("to_time", time_shape(to_ms), allowed)
    return Span(from_ms, to_ms)


def slots(due: DataFrame, *, span: Span, slot_ms: int) -> DataFrame:
    """Count messages by the slot in which they are due.

    Args:
        due: A column `due_at` of instants.
        span: The simulated time. Messages due before it count as due at its start. Messages due after it are left out.
        slot_ms: Length of a slot. An hour must be a multiple of this length.

    Returns:
        A row for each slot with messages. `at_ms`: the start of the slot in ms after the start of the span; null for
        rows without a due time. `n`: the number of messages. `overdue`: the number of messages due before the span.
    """
    due_ms = F.expr("(unix_micros(due_at) + 999) div 1000")  # rounded up, as in schedulers
    at_ms = F.greatest(due_ms - F.pmod(due_ms, F.lit(slot_ms)) - span.from_ms, F.lit(0))
    within = due.where(due_ms.isNull() | (due_ms < span.to_ms)).select(
        F.when(due_ms.isNotNull(), at_ms).alias("at_ms"), (due_ms < span.from_ms).alias("is_overdue")
    )
    return within.groupBy("at_ms").agg(F.count("*").alias("n"), F.count_if("is_overdue").alias("overdue"))


def read_rates(text: str) -> list[float]:
    """Return the rates of a text such as `500,1000,2000`.

    Raises:
        ConfigurationError: The text is not a list of numbers.
    """
    try:
        return [float(each) for each in text.split(",")]
    except ValueError:
        raise ConfigurationError("rate", shortened(text), "messages a second, such as 500,1000,2000") from None


def pending(
    spark: SparkSession, *, store: str, span: Span, namespace: str = "default", lane: str | None = None
) -> DataFrame:
    """Return the due times of a store's pending messages; payloads are not fetched.

    Args:
        spark: A session, classic or Connect.
        store: The URL of the store, `env:NAME` or `file:PATH`.
        span: The time to simulate. Messages that are due later are not read.
        namespace: The namespace of the messages.
        lane: Read only the messages of this sink or event type.
    """
    register(spark)
    options = {"store": store, "namespace": namespace, "dueTo": time_shape(span.to_ms)}
    options |= {} if lane is None else {"lane": lane}
    return stored(spark, "due_at", **options)


@dataclass(frozen=True, kw_only=True)
class _Options(SimulateOptions):
    rates: Sequence[float]
    span: Span | None = None
    source: str = "a frame"


@job("simulate", _Options)
def run(frame: DataFrame, options: _Options) -> Summary:
    """Simulate dispatch at each rate, and return the figures.

    The model is one queue that serves the message with the earliest due time first, without new messages and retries.
    Lateness is accurate to a slot plus the time of one message (1/rate), rounded up to a ms. The driver gets only the
    number of messages in each slot, so its memory does not grow with the number of messages.

    Args:
        frame: Rows with due times, such as messages.
        options: See `SimulateOptions`; callers give each option by keyword. Python callers also give `rates`: up to six
            numbers of messages a second. They may give `span`, the time to simulate (default: the next 7 days), and
            `source`, the origin of the frame as text for the page.

    Returns:
        The figures: `rows` is the number of counted messages, and `facts` has the totals of each rate.

    Raises:
        ConfigurationError: An option is wrong, or `out` already exists.
        InputError: A due time is missing.
        StoreUnavailableError: The frame reads a store that does not answer.
    """
    span = span_of() if options.span is None else options.span
    units, weight = _units(options.rates), _weight(options.scale)
    slot_ms = _slot_ms(options.slot, span)
    one_of("overdue", options.overdue, get_args(Overdue))
    if options.out is not None:
        _check_free(options.out, overwrite=options.overwrite)
    counted = slots(_due_times(frame, options), span=span, slot_ms=slot_ms)
    arrivals, late = _collected(counted, with_overdue=options.overdue == "backlog")
    forecasts = [forecast(arrivals, rate, span, weight) for rate in units]
    facts = _facts(forecasts, span, slot_ms, options.scale)
    if options.out is not None:
        shown = SimulationPage(
            source=options.source,
            span=span,
            slot_ms=slot_ms,
            overdue=late,
            scale=options.scale,
            forecasts=forecasts,
        )
        facts["written"] = _write(shown, options.out)
    rows = int(arrivals.n.sum())
    return Summary(rows=rows, counts={"messages": rows, "overdue": late}, facts=facts)


def _units(rates: Sequence[float]) -> list[int]:
    """Check rates and return them in millionths of a message a ms."""
    allowed = f"1 to {MOST_RATES} different numbers from {_LEAST_RATE} to {_MOST_RATE:,}, of messages a second"
    if not 1 <= len(rates) <= MOST_RATES or not all(_LEAST_RATE <= rate <= _MOST_RATE for rate in rates):
        raise ConfigurationError("rate", shortened(list(rates)), allowed)
    units = [round(rate * 1000) for rate in rates]
    if len(set(units)) < len(units):
        raise ConfigurationError("rate", shortened(list(rates)), allowed)
    return sorted(units)


def _weight(scale: float) -> int:
    """Return the work of one message after scaling, in millionths of a message.

    It is a multiple of 100, so that each percent of it is an integer.
    """
    if not _LEAST_SCALE <= scale <= _MOST_SCALE:
        raise ConfigurationError("scale", shortened(scale), f"a number from {_LEAST_SCALE} to {_MOST_SCALE}")
    return round(scale * MESSAGE / 100) * 100


def _slot_ms(slot: Duration | None, span: Span) -> int:
    if slot is None:
        return next(each for each in _SLOTS_MS if (span.to_ms - span.from_ms) // each <= MOST_SLOTS)
    slot_ms = parse_duration(slot, field="slot", error=ConfigurationError, least_ms=1)
    if HOUR_MS % slot_ms:
        raise ConfigurationError(
            "slot", format_duration(slot_ms), "a length that divides an hour, such as 100ms, 1s or 1m"
        )
    if (span.to_ms - span.from_ms) // slot_ms > MOST_SLOTS_ASKED:
        allowed = f"a longer slot, or a shorter simulated time: up to {MOST_SLOTS_ASKED:,} slots"
        raise ConfigurationError("slot", format_duration(slot_ms), allowed)
    return slot_ms


def _check_free(out: Path, *, overwrite: bool) -> None:
    if out.exists() and not overwrite:
        raise ConfigurationError("out", shortened(f"{out}"), "a name that is free, or the option overwrite")
    if out.exists() and not out.is_dir():
        raise ConfigurationError("out", shortened(f"{out}"), "a folder")
    if not out.parent.is_dir():
        raise ConfigurationError("out", shortened(f"{out}"), "a name in an existing folder")


def _due_times(frame: DataFrame, options: SimulateOptions) -> DataFrame:
    if (where := options.where) is not None:
        if problem := problem_of_condition(frame, where):
            raise ConfigurationError(
                "where", f"{shortened(where)}{problem}", "an SQL condition on the columns that are read"
            )
        frame = frame.where(where)
    return converted(given(frame, options.mapping, names=_DUE, required=_DUE), timezone=options.timezone)


def _collected(counted: DataFrame, *, with_overdue: bool) -> tuple[Arrivals, int]:
    """Return the slots in order, and the number of overdue messages."""
    table = counted.select(F.coalesce("at_ms", F.lit(-1)).alias("at_ms"), "n", "overdue").toArrow()
    at_ms, n, overdue = (table[name].to_numpy() for name in table.column_names)
    if without := int(n[at_ms < 0].sum()):
        value = f"null, or no instant, in {without:,} of {int(n.sum()):,} rows"
        raise InputError("due_at", value, "a due time in each row")
    if not with_overdue:
        n, overdue = n - overdue, overdue * 0
    order = np.argsort(at_ms)
    order = order[n[order] > 0]
    return Arrivals(at_ms[order], n[order]), int(overdue.sum())


def _facts(forecasts: Sequence[Forecast], span: Span, slot_ms: int, scale: float) -> dict[str, Any]:
    return {
        "from": time_shape(span.from_ms),
        "to": time_shape(span.to_ms),
        "time_zone": "UTC",
        "slot": format_duration(slot_ms),
        "scale": scale,
        "rates": [_fact(each) for each in forecasts],
    }


def _fact(forecast: Forecast) -> dict[str, Any]:
    """Return the figures of a rate, with instants as text."""
    shape = structs.asdict(forecast)
    del shape["hours"]
    for name in ("worst", "drained"):
        at_ms = shape.pop(f"{name}_ms")
        shape[f"{name}_at"] = None if at_ms is None else time_shape(at_ms)
    return shape | {name: round(shape[name], 4) for name in ("utilisation", "load")}


def _write(shown: SimulationPage, out: Path) -> list[str]:
    out.mkdir(exist_ok=True)
    table, page = (out / name for name in _FILES)
    with replacing(table) as file:
        writer = csv.writer(file)
        writer.writerow(["rate", "hour", *Hour.__struct_fields__[1:]])
        for forecast in shown.forecasts:
            for hour in forecast.hours:
                _, *figures_of_hour = structs.astuple(hour)
                writer.writerow([forecast.rate, time_shape(hour.from_ms), *figures_of_hour])
    with replacing(page) as file:
        file.write(render(shown))
    return [f"{table}", f"{page}"]

"""Observed values of a stream's batches, for the jobs `archive` and `engine`, in classic and Connect sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from .interrupts import noted_interrupts

__all__ = ["Batch", "Batches", "followed"]

_OBSERVED: Final = "aiodelay"
_LOOK_S: Final = 1


class Batch(NamedTuple):
    """Observed values of one finished micro-batch.

    Attributes:
        number: The number of the batch in the checkpoint.
        seconds: The duration of the batch.
        observed: The observed values by name.
    """

    number: int
    seconds: float
    observed: Mapping[str, Any]


class Batches:
    """Returns each batch of a query once. Spark remembers only the last 100 batches, so call `since` regularly."""

    def __init__(self) -> None:
        self._last = -1

    @staticmethod
    def observing(frame: DataFrame, *values: Column) -> DataFrame:
        """Return a stream whose batches report these values. Each value is an aggregate with a name."""
        return frame.observe(_OBSERVED, *values)

    def since(self, query: StreamingQuery) -> Iterator[Batch]:
        """Yield the batches that have finished since the last call."""
        for progress in query.recentProgress:
            row = progress["observedMetrics"].get(_OBSERVED)
            if row is None or progress["batchId"] <= self._last:
                continue
            self._last = progress["batchId"]
            yield Batch(self._last, progress["durationMs"]["triggerExecution"] / 1000, _by_name(row.asDict()))


def followed(query: StreamingQuery, note: Callable[[StreamingQuery], object]) -> bool:
    """Call `note` every second until the query ends or Ctrl-C stops it. Return whether Ctrl-C stopped it."""
    try:
        with noted_interrupts() as interrupted:
            while not interrupted.is_set() and not query.awaitTermination(_LOOK_S):
                note(query)
    finally:
        query.stop()
    note(query)
    return interrupted.is_set()


def _by_name(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a row by name. A Connect session of Spark 4.3 returns values and schema separately."""
    if row.keys() != {"values", "schema"}:
        return row
    names = (field["name"] for field in row["schema"]["fields"])
    return dict(zip(names, row["values"], strict=True))

"""What the batches of a stream came to, of a classic session and of a Connect session alike."""

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
    """What one came to.

    Attributes:
        number: Of the checkpoint's.
        seconds: How long it took.
        observed: The values that it was observed for, by name.
    """

    number: int
    seconds: float
    observed: Mapping[str, Any]


class Batches:
    """A query's batches, each told once. Spark tells of the last hundred, so that it has to be asked now and then."""

    def __init__(self) -> None:
        self._last = -1

    @staticmethod
    def observing(frame: DataFrame, *values: Column) -> DataFrame:
        """Return a stream whose batches tell these values, each an aggregate with a name."""
        return frame.observe(_OBSERVED, *values)

    def since(self, query: StreamingQuery) -> Iterator[Batch]:
        """Yield what has come since this was asked last."""
        for progress in query.recentProgress:
            row = progress["observedMetrics"].get(_OBSERVED)
            if row is None or progress["batchId"] <= self._last:
                continue
            self._last = progress["batchId"]
            yield Batch(self._last, progress["durationMs"]["triggerExecution"] / 1000, _by_name(row.asDict()))


def followed(query: StreamingQuery, note: Callable[[StreamingQuery], object]) -> bool:
    """Call `note` every second until the query ends or Ctrl-C stops it; return whether it was Ctrl-C."""
    try:
        with noted_interrupts() as interrupted:
            while not interrupted.is_set() and not query.awaitTermination(_LOOK_S):
                note(query)
    finally:
        query.stop()
    note(query)
    return interrupted.is_set()


def _by_name(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row's values by their names; a Connect session of Spark 4.3 tells values and schema instead."""
    if row.keys() != {"values", "schema"}:
        return row
    names = (field["name"] for field in row["schema"]["fields"])
    return dict(zip(names, row["values"], strict=True))

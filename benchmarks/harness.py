"""Shared code of the benchmarks: the plan of a run, rows of figures, and their goals.

Each benchmark measures two *sides* in turn, in one process. *Our* side is aiodelay. The *bare* side is the bare limit:
the least code that does the same work. A benchmark also checks the results: each message is delivered once, no message
is early, the rows are equal. Other processes slow both sides of a round. So the ratio of a round says more than its
times.
"""

from __future__ import annotations

import asyncio
import gc
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

__all__ = [
    "CERTAIN_ROUNDS",
    "DEFAULT_CONCURRENCY",
    "PAYLOAD_BYTES",
    "Benchmark",
    "Goal",
    "Order",
    "Plan",
    "Row",
    "Stopwatch",
    "Times",
    "WrongResultError",
    "beside_tuned",
    "check",
    "check_once_each",
    "in_turn",
    "median_interval",
    "number_of",
    "order",
    "per_message_us",
    "quantile",
    "ratios",
    "raw_payload",
]

T = TypeVar("T")

PAYLOAD_BYTES = 200
DEFAULT_CONCURRENCY = 16
"""The concurrency of a handler that sets none."""
CERTAIN_ROUNDS = 30
"""With this many rounds, a row is judged by the 95 % interval of its median."""
LONGEST_S = 1800
"""A part of a benchmark that takes longer than this counts as hanging."""


class WrongResultError(Exception):
    """A benchmark did not do the work that it should measure. Its figures would be wrong."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run.

    Attributes:
        directory: Folder for files. It must be on a disk, else its fsync costs nothing.
        runs: Number of rounds; each figure is their median.
        scale: Part of the full size, 0 to 1. Below 1 the figures mean nothing, but the checks must hold.
        nightly: True to run also the parts that take long.
        uvloop: True to run both sides on uvloop.
        redis: URL of a Redis or Valkey server with an empty database, for benchmarks that need one.
        kafka: `host:port` of a broker, for benchmarks that need one.
        spark: True if some of the chosen benchmarks need Spark.
    """

    directory: Path
    runs: int = 5
    scale: float = 1.0
    nightly: bool = False
    uvloop: bool = False
    redis: str = ""
    kafka: str = ""
    spark: bool = False

    def size(self, full: int) -> int:
        """Return the number of items at this scale, instead of `full`."""
        return max(1, round(full * self.scale))

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on a new loop."""
        with asyncio.Runner(loop_factory=self._new_loop) as runner:
            return runner.run(_within(main))

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        if not self.uvloop:
            return asyncio.new_event_loop()
        import uvloop  # noqa: PLC0415 - needed only with --uvloop

        return uvloop.new_event_loop()


async def _within(main: Coroutine[Any, Any, T]) -> T:
    async with asyncio.timeout(LONGEST_S):
        return await main


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal that the median of a row must reach."""

    sense: Literal["at least", "at most"]
    limit: float

    def is_met(self, value: float) -> bool:
        return value >= self.limit if self.sense == "at least" else value <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.sense == 'at least' else '≤'} {self.limit:g}"


_OF_TUNED = Goal("at least", 0.7)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        id: The id of the benchmark.
        what: The measured quantity.
        unit: The unit of the values: the base of a ratio, or `ms`, or `%`.
        values: One value for each round.
        goal: The goal of the figure; None if the figure has no goal.
        beside: The figures of both sides in words, with units.
    """

    id: str
    what: str
    unit: str
    values: tuple[float, ...]
    goal: Goal | None
    beside: str

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest value."""
        return min(self.values), max(self.values)

    @property
    def is_met(self) -> bool | None:
        """Return whether the median reaches the goal; None without a goal.

        From `CERTAIN_ROUNDS` rounds on, the whole 95 % interval of the median must reach the goal.
        """
        if self.goal is None:
            return None
        if len(self.values) < CERTAIN_ROUNDS:
            return self.goal.is_met(self.median)
        return all(map(self.goal.is_met, median_interval(self.values)))


@dataclass(frozen=True, slots=True)
class Benchmark:
    id: str
    title: str
    run: Callable[[Plan], list[Row]]
    needs_redis: bool = False
    needs_kafka: bool = False
    needs_spark: bool = False


class Times(list[float]):
    """The times of one side in seconds, round by round.

    Attributes:
        processor: The processor times of this process in the same rounds: the blocks of all stopwatches of the side.
    """

    def __init__(self) -> None:
        super().__init__()
        self.processor: list[float] = []


def in_turn(plan: Plan, sides: Mapping[str, Callable[[], float]], *, rounds: int | None = None) -> dict[str, Times]:
    """Measure each side once a round, each time another side first. Return the times, round by round.

    Args:
        plan: The plan of the run.
        sides: The sides by name: functions that measure themselves and return seconds.
        rounds: Number of rounds; None = the number of the plan.
    """
    figures = {name: Times() for name in sides}
    names = list(sides)
    for number in range(plan.runs if rounds is None else rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            gc.collect()
            Stopwatch.processor_s.clear()
            figures[name].append(sides[name]())
            if Stopwatch.processor_s:
                figures[name].processor.append(sum(Stopwatch.processor_s))
    return figures


def ratios(bare: Sequence[float], ours: Sequence[float]) -> tuple[float, ...]:
    """Return the speed of our side divided by the speed of the bare side, for each round, from the times."""
    return tuple(b / o for b, o in zip(bare, ours, strict=True))


def beside_tuned(
    id_: str, what: str, concurrency: int, tuned: Sequence[float], default: Sequence[float], *, beside: str
) -> Row:
    """Return the row that compares a handler at its defaults with the same handler at a tuned concurrency.

    Args:
        id_: The id of the benchmark.
        what: The measured quantity, up to the concurrency.
        concurrency: The tuned concurrency.
        tuned: The times of the rounds with it.
        default: The times of the rounds at the defaults.
        beside: The figures in words.
    """
    what = f"{what} {DEFAULT_CONCURRENCY} (default)"
    return Row(id_, what, f"x speed with concurrency {concurrency:,}", ratios(tuned, default), _OF_TUNED, beside)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a 95 % interval of the median, by order statistics. Fewer than 6 values: return the lowest and highest."""
    n, below, rank = len(values), 0.0, 0
    while (below := below + math.comb(n, rank) / 2**n) <= 0.025:
        rank += 1
    ordered, outside = sorted(values), max(rank - 1, 0)
    return ordered[outside], ordered[n - 1 - outside]


def per_message_us(seconds: Sequence[float], n: int) -> str:
    """Return the median time of one message in words, with the processor time if it is known."""
    text = f"{statistics.median(seconds) / n * 1e6:.1f} µs"
    if not isinstance(seconds, Times) or not seconds.processor:
        return text
    return f"{text} (processor {statistics.median(seconds.processor) / n * 1e6:.1f} µs)"


def quantile(values: Iterable[float], part: float) -> float:
    """Return the value below which `part` of the values lie (nearest rank)."""
    ordered = sorted(values)
    if not ordered:
        raise WrongResultError("no values")
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)]


def check(holds: bool, what: str) -> None:  # noqa: FBT001 - like `assert`, which -O removes
    """Raise `WrongResultError` unless a condition holds."""
    if not holds:
        raise WrongResultError(what)


def check_once_each(delivered: Iterable[int], n: int) -> None:
    """Check that each of 0 to n-1 was delivered once."""
    times = Counter(delivered)
    missing = [number for number in range(n) if not times[number]]
    repeated = [number for number, count in times.items() if count > 1]
    strange = [number for number in times if not 0 <= number < n]
    check(
        not missing and not repeated and not strange,
        f"of {n} messages {len(missing)} were not delivered, {len(repeated)} more than once, {len(strange)} unknown",
    )


class Stopwatch:
    """The seconds from the start to the end of a block.

    Attributes:
        seconds: The time that passed.
        processor_s: The processor times of this process in all blocks that have ended.
    """

    seconds: float
    processor_s: ClassVar[list[float]] = []

    def __enter__(self) -> Self:
        self._since, self._processor_since = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.seconds = time.perf_counter() - self._since
        Stopwatch.processor_s.append(time.process_time() - self._processor_since)


# --- the scheduled messages -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Order:
    """An event of 200 bytes as JSON."""

    number: int
    text: str


_AROUND = len('{"number":,"text":""}')


def order(number: int) -> Order:
    """Return the event with a number."""
    return Order(number, "x" * (PAYLOAD_BYTES - _AROUND - len(str(number))))


def raw_payload(number: int) -> bytes:
    """Return 200 bytes that begin with the number."""
    return number.to_bytes(8, sys.byteorder).ljust(PAYLOAD_BYTES, b"x")


def number_of(payload: bytes) -> int:
    """Return the number that `raw_payload` wrote."""
    return int.from_bytes(payload[:8], sys.byteorder)

"""A queue in front of what dispatches at a rate: lateness and backlog of what is due, in all and for every hour.

Messages are served one after the other, first due first. Those of one slot of time count as due at its begin; the rest
is arithmetic on integers, and exact: work and capacity are in millionths of a message, and a rate is how many of these
a ms brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

__all__ = ["HOUR_MS", "MESSAGE", "Arrivals", "Forecast", "Hour", "Integers", "Span", "forecast"]

Integers: TypeAlias = NDArray[np.int64]

HOUR_MS: Final = 3_600_000
MESSAGE: Final = 1_000_000
"""The work of one message."""

_PERCENTS: Final = {"p50_ms": 50, "p95_ms": 95, "p99_ms": 99}
_NOTHING: Final = dict.fromkeys((*_PERCENTS, "max_ms"))


class Span(Struct, frozen=True):
    """The time that is simulated, epoch ms, its end left out."""

    from_ms: int
    to_ms: int

    def hours(self) -> list[Span]:
        """Return its hours, by the clock; the first and the last may be parts of one."""
        first = self.from_ms // HOUR_MS
        last = -(-self.to_ms // HOUR_MS)
        return [
            Span(max(hour * HOUR_MS, self.from_ms), min((hour + 1) * HOUR_MS, self.to_ms))
            for hour in range(first, last)
        ]


class Arrivals(Struct, frozen=True):
    """How many messages are due in each slot in which some are.

    Attributes:
        at_ms: Begin of each slot, counted from that of the span; ascending.
        n: How many.
    """

    at_ms: Integers
    n: Integers


class Hour(Struct, frozen=True, kw_only=True):
    """What one hour brings at a rate.

    Attributes:
        from_ms: Its begin, epoch ms; of the first, that of the time that is simulated.
        messages: How many are due.
        p50_ms: Their lateness, like the next three; None if nothing is due.
        p95_ms: As above.
        p99_ms: As above.
        max_ms: As above.
        backlog: Most messages that are due and not dispatched, at any time of the hour.
        left: Likewise, at its end.
        utilisation: The part of the time in which something is dispatched.
    """

    from_ms: int
    messages: int
    p50_ms: int | None
    p95_ms: int | None
    p99_ms: int | None
    max_ms: int | None
    backlog: int
    left: int
    utilisation: float


class Forecast(Struct, frozen=True, kw_only=True):
    """What the time that is simulated brings at a rate; attributes as of `Hour`, and these.

    Attributes:
        rate: Messages a second.
        worst_ms: When the backlog is longest, epoch ms; None if nothing is due.
        drained_ms: When that one is gone; None if it is not before the end.
        left_ms: How long what is left takes, if nothing else comes.
        load: What is due, as a part of what could be dispatched in the time; above 1 the backlog grows for good.
        hours: Every hour.
    """

    rate: float
    messages: int
    p50_ms: int | None
    p95_ms: int | None
    p99_ms: int | None
    max_ms: int | None
    backlog: int
    worst_ms: int | None
    drained_ms: int | None
    left: int
    left_ms: int
    utilisation: float
    load: float
    hours: Sequence[Hour]


def forecast(arrivals: Arrivals, rate: int, span: Span, weight: int = MESSAGE) -> Forecast:
    """Return what arrivals bring at a rate.

    Percentiles are told within the time of one message, 1/rate, and what else it tells of the slots is exact.

    Args:
        arrivals: What is due within the span.
        rate: Millionths of a message a ms.
        span: The time that is simulated.
        weight: Work of one message; a multiple of 100.
    """
    queue = _Queue(arrivals, rate, weight)
    length_ms = span.to_ms - span.from_ms
    everything = slice(0, len(arrivals.n))
    came, left = queue.work(everything), queue.left(everything.stop, length_ms)
    worst = queue.worst()
    drained_ms = None if worst is None else queue.drained_ms(worst)
    return Forecast(
        rate=rate / 1000,
        messages=_messages(came),
        backlog=_messages(queue.longest(everything)),
        worst_ms=None if worst is None else span.from_ms + int(arrivals.at_ms[worst]),
        drained_ms=None if drained_ms is None or drained_ms > length_ms else span.from_ms + drained_ms,
        left=_messages(left),
        left_ms=-(-left // rate),
        utilisation=(came - left) / (rate * length_ms),
        load=came / (rate * length_ms),
        hours=_hours(queue, span),
        **queue.lateness(everything),
    )


def _hours(queue: _Queue, span: Span) -> list[Hour]:
    """Return every hour; through one in which nothing is due, the queue goes on as the one before has left it."""
    hours, before = list[Hour](), 0
    spans = span.hours()
    ends = np.searchsorted(queue.arrivals.at_ms, [hour.to_ms - span.from_ms for hour in spans]).tolist()
    for hour, first, end in zip(spans, [0, *ends], ends, strict=False):
        some = slice(first, end)
        came, left = queue.work(some), queue.left(end, hour.to_ms - span.from_ms)
        hours.append(
            Hour(
                from_ms=hour.from_ms,
                messages=_messages(came),
                backlog=_messages(max(before, queue.longest(some))),
                left=_messages(left),
                utilisation=(before + came - left) / (queue.rate * (hour.to_ms - hour.from_ms)),
                **queue.lateness(some),
            )
        )
        before = left
    return hours


class _Queue:
    """The queue at each slot.

    With A messages due before a slot that begins at t, the work in front of it is `A * weight - rate * t` plus the
    capacity that was left unused until then, which is the most that `rate * t - A * weight` has been up to now. While
    that stays the same the queue is never empty: a busy period.
    """

    def __init__(self, arrivals: Arrivals, rate: int, weight: int) -> None:
        self.arrivals, self.rate, self._weight = arrivals, rate, weight
        self._upto: Integers = np.cumsum(arrivals.n)
        surplus = rate * arrivals.at_ms - (self._upto - arrivals.n) * weight
        self._unused: Integers = np.maximum.accumulate(surplus)
        self._ahead: Integers = self._unused - surplus
        self._after: Integers = self._ahead + arrivals.n * weight

    def work(self, some: slice) -> int:
        """Return what comes in some slots."""
        return int(self.arrivals.n[some].sum()) * self._weight

    def longest(self, some: slice) -> int:
        """Return the most work in it just after something came."""
        return int(self._after[some].max(initial=0))

    def left(self, end: int, at_ms: int) -> int:
        """Return the work that is left at an instant after the slots before `end`, and before all others."""
        return max(0, self._served_by(end - 1) - self.rate * at_ms) if end else 0

    def worst(self) -> int | None:
        """Return the first slot at which the queue is longest."""
        return int(self._after.argmax()) if len(self._after) else None

    def drained_ms(self, at: int) -> int:
        """Return when the busy period of a slot ends."""
        last = int(np.searchsorted(self._unused, self._unused[at], side="right")) - 1
        return -(-self._served_by(last) // self.rate)

    def _served_by(self, at: int) -> int:
        """Return the capacity that has gone by, used or not, when a slot's last message is served."""
        return int(self._unused[at]) + int(self._upto[at]) * self._weight

    def lateness(self, some: slice) -> dict[str, int | None]:
        """Return the lateness of what is due in some slots, in ms, rounded up."""
        if some.start == some.stop:
            return _NOTHING
        waits = _percentiles(self._ahead[some], self.arrivals.n[some], self._weight)
        waits["max_ms"] = self.longest(some) - self._weight
        return {name: -(-wait // self.rate) for name, wait in waits.items()}


def _percentiles(ahead: Integers, n: Integers, weight: int) -> dict[str, int]:
    """Return percentiles of the work for which messages wait.

    A slot's messages wait one for the other. So they are taken as evenly spread over a range that ends with the wait
    of the last one; a percentile is where the ranges of all slots, laid over each other, have reached its part.
    """
    begins = ahead - weight
    marked = np.concatenate([2 * begins, 2 * (begins + n * weight) + 1])
    marked.sort()  # which is several times as fast as to find out the order
    waits = marked >> 1
    open_ranges = np.cumsum(1 - 2 * (marked & 1))[:-1]
    filled = np.concatenate([[0], np.cumsum(open_ranges * np.diff(waits))])
    found = {}
    for name, percent in _PERCENTS.items():
        wanted = int(filled[-1]) // 100 * percent
        at = int(np.searchsorted(filled, wanted)) - 1
        missing = wanted - int(filled[at])
        found[name] = max(0, int(waits[at]) - -missing // int(open_ranges[at]))
    return found


def _messages(work: int) -> int:
    return -(-work // MESSAGE)

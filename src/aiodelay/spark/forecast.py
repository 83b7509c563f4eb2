"""The arithmetic of `aiodelay spark simulate`: one queue in front of a dispatcher with a fixed rate.

`forecast` returns lateness and backlog, in total and for every hour. The dispatcher serves messages one after the
other, the earliest due time first. Time is divided into *slots* of equal length. All messages that are due in a slot
count as due at its start. Times, work and capacity are integers: work and capacity are in millionths of a message, and
the rate of the dispatcher is in millionths of a message per ms.
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
"""The work of one message, in millionths."""

_PERCENTS: Final = {"p50_ms": 50, "p95_ms": 95, "p99_ms": 99}
_NOTHING: Final = dict.fromkeys((*_PERCENTS, "max_ms"))


class Span(Struct, frozen=True):
    """The simulated time: from `from_ms` (included) to `to_ms` (excluded), in epoch ms."""

    from_ms: int
    to_ms: int

    def hours(self) -> list[Span]:
        """Return the hours by the clock. The first and the last may be shorter than an hour."""
        first = self.from_ms // HOUR_MS
        last = -(-self.to_ms // HOUR_MS)
        return [
            Span(max(hour * HOUR_MS, self.from_ms), min((hour + 1) * HOUR_MS, self.to_ms))
            for hour in range(first, last)
        ]


class Arrivals(Struct, frozen=True):
    """The number of messages that are due in each slot. Slots without messages are left out.

    Attributes:
        at_ms: Start of each slot in ms after the start of the span; ascending.
        n: Number of messages in each slot.
    """

    at_ms: Integers
    n: Integers


class Hour(Struct, frozen=True, kw_only=True):
    """The forecast of one hour at a rate.

    Attributes:
        from_ms: Start of the hour, epoch ms; for the first hour, the start of the simulated time.
        messages: Number of messages that are due in the hour.
        p50_ms: Median of the lateness of these messages; None if no message is due.
        p95_ms: 95th percentile of the lateness; None if no message is due.
        p99_ms: 99th percentile of the lateness; None if no message is due.
        max_ms: Largest lateness; None if no message is due.
        backlog: Most messages that are due and not dispatched, at any instant of the hour.
        left: Messages that are due and not dispatched at the end of the hour.
        utilisation: The part of the hour in which a message is being dispatched.
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
    """The forecast at one rate. Attributes with a name from `Hour` are for the whole simulated time.

    Attributes:
        rate: Messages a second.
        worst_ms: Instant of the longest backlog, epoch ms; None if no message is due.
        drained_ms: Instant at which the queue is empty again after the longest backlog; None if the simulated time
            ends before.
        left_ms: Time to dispatch the messages that are left at the end, if no more messages come.
        load: The number of due messages, divided by the number of messages that the rate can dispatch in the simulated
            time. Above 1, messages are left at the end.
        hours: The forecast of every hour.
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
    """Return the forecast of arrivals at a rate.

    A percentile differs from the exact value by at most the time of one message (1/rate). All other figures are exact,
    except that a slot hides the due times within it.

    Args:
        arrivals: The messages that are due within the span.
        rate: Millionths of a message that are dispatched in a ms.
        span: The simulated time.
        weight: Work of one message in millionths; a multiple of 100.
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
    """Return the forecast of every hour. An hour begins with the queue that the previous hour has left."""
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
    """The queue at the start of each slot.

    Let A messages be due before a slot that begins at t. Then the work in front of the slot is `A * weight - rate * t`
    plus the capacity that was unused until t. The unused capacity is the maximum of `rate * t - A * weight` over all
    slots so far. While the unused capacity does not grow, the queue is never empty. Such a time is a busy period.
    """

    def __init__(self, arrivals: Arrivals, rate: int, weight: int) -> None:
        self.arrivals, self.rate, self._weight = arrivals, rate, weight
        self._upto: Integers = np.cumsum(arrivals.n)
        surplus = rate * arrivals.at_ms - (self._upto - arrivals.n) * weight
        self._unused: Integers = np.maximum.accumulate(surplus)
        self._ahead: Integers = self._unused - surplus
        self._after: Integers = self._ahead + arrivals.n * weight

    def work(self, some: slice) -> int:
        """Return the work that arrives in some slots."""
        return int(self.arrivals.n[some].sum()) * self._weight

    def longest(self, some: slice) -> int:
        """Return the most work in the queue, just after an arrival in some slots."""
        return int(self._after[some].max(initial=0))

    def left(self, end: int, at_ms: int) -> int:
        """Return the work that is left at the instant `at_ms`, which lies between the slots `end - 1` and `end`."""
        return max(0, self._served_by(end - 1) - self.rate * at_ms) if end else 0

    def worst(self) -> int | None:
        """Return the first slot with the longest queue; None if there are no slots."""
        return int(self._after.argmax()) if len(self._after) else None

    def drained_ms(self, at: int) -> int:
        """Return the end of the busy period of a slot, in ms after the start of the span."""
        last = int(np.searchsorted(self._unused, self._unused[at], side="right")) - 1
        return -(-self._served_by(last) // self.rate)

    def _served_by(self, at: int) -> int:
        """Return the capacity, used and unused, from the start of the span until a slot's last message is served."""
        return int(self._unused[at]) + int(self._upto[at]) * self._weight

    def lateness(self, some: slice) -> dict[str, int | None]:
        """Return percentiles and maximum of the lateness of the messages of some slots, in ms, rounded up."""
        if some.start == some.stop:
            return _NOTHING
        waits = _percentiles(self._ahead[some], self.arrivals.n[some], self._weight)
        waits["max_ms"] = self.longest(some) - self._weight
        return {name: -(-wait // self.rate) for name, wait in waits.items()}


def _percentiles(ahead: Integers, n: Integers, weight: int) -> dict[str, int]:
    """Return percentiles of the work for which messages wait.

    The messages of a slot wait for each other. So this function spreads them evenly over a range of waits that ends
    with the wait of the slot's last message. Then it adds up the ranges of all slots. The 95th percentile is the wait
    that 95 percent of the messages in this sum do not exceed.
    """
    begins = ahead - weight
    marked = np.concatenate([2 * begins, 2 * (begins + n * weight) + 1])
    marked.sort()  # several times as fast as argsort
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

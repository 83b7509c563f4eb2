"""The forecast of lateness: when will messages start that come due faster than a lane can start them?

A lane is a queue that starts messages at a fixed rate, the earliest due time first. The stores count the messages that
come due in each *slot*, a span of time. All messages of a slot count as due at its start, as in `aiodelay spark
simulate`, which answers the same question with more detail. So the forecast is never too low, and too high by one slot
at most. `LoadForecast.least_ms` is the lateness if the messages of each slot are due evenly over the slot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from msgspec import Struct

__all__ = ["WINDOWS_MS", "ComingLoad", "LoadForecast", "Spread"]

WINDOWS_MS = (
    *(10_000, 30_000, 60_000, 120_000, 300_000, 600_000, 900_000, 1_800_000),
    *(3_600_000, 7_200_000, 10_800_000, 21_600_000, 43_200_000, 86_400_000),
)
"""The windows that a forecast may suggest as `spread`: 10 s to 1 day."""


class Spread(Struct, frozen=True):
    """The highest lateness if each message moves by its place in a window, in ms."""

    window_ms: int
    late_ms: int


class LoadForecast(Struct, frozen=True):
    """The forecast of one load.

    Attributes:
        late_ms: For each slot with messages, by its start: the lateness of its last message, at most, in ms.
        worst_ms: The start of the slot with the highest lateness, epoch ms; None if no message comes due.
        most_ms: The highest lateness of all slots; 0 if no message comes due.
        least_ms: The highest lateness if the messages of each slot are due evenly over the slot.
        overdue_ms: The time until the last message starts that is overdue now.
        empty_ms: When no message waits any more after the worst slot, epoch ms; None if that is after the end of the
            load, or if no message comes due.
    """

    late_ms: Mapping[int, int]
    worst_ms: int | None
    most_ms: int
    least_ms: int
    overdue_ms: int
    empty_ms: int | None


class ComingLoad(Struct, frozen=True):
    """The messages of a lane that are overdue or come due, and the rate at which the lane starts them.

    Attributes:
        slots: The number of messages of each slot, by its start, epoch ms.
        slot_ms: The length of a slot.
        now_ms: The present time, epoch ms. No slot starts before it.
        to_ms: The end of the last slot, epoch ms.
        overdue: The number of messages that are overdue now.
        per_s: The messages that the lane can start in a second; above 0.
    """

    slots: Mapping[int, int]
    slot_ms: int
    now_ms: int
    to_ms: int
    overdue: int
    per_s: float

    def forecast(self) -> LoadForecast:
        """Return the forecast."""
        waits = [(at_ms, waiting) for at_ms, waiting in self._waiting(0) if at_ms in self.slots]
        late_ms = {at_ms: self._wait_ms(waiting) for at_ms, waiting in waits}
        worst = max(range(len(waits)), key=lambda at: (waits[at][1], -at), default=None)
        return LoadForecast(
            late_ms,
            None if worst is None else waits[worst][0],
            max(late_ms.values(), default=0),
            self.spread(self.slot_ms).late_ms,
            self._wait_ms(self.overdue),
            None if worst is None else self._empty_ms(waits[worst:]),
        )

    def spread(self, window_ms: int) -> Spread:
        """Return the highest lateness if each message moves by its place in a window. Lateness counts from there."""
        most = max((waiting for _, waiting in self._waiting(window_ms)), default=0)
        return Spread(window_ms, self._wait_ms(most))

    def spread_within(self, most_ms: int) -> Spread | None:
        """Return the shortest of `WINDOWS_MS` that keeps the lateness within `most_ms`; None = no window does so."""
        spreads = (self.spread(each) for each in WINDOWS_MS if each >= self.slot_ms)
        return next((each for each in spreads if each.late_ms <= most_ms), None)

    def _waiting(self, window_ms: int) -> Iterator[tuple[int, float]]:
        """Yield the times at which a slot begins or its window ends, and how many messages wait just after it.

        Between two of these times, messages come due at a constant rate. So the highest number of waiting messages is
        at one of these times.
        """
        starts, flows = defaultdict[int, int](int), defaultdict[int, int](int)
        for at_ms, messages in self.slots.items():
            if window_ms:
                flows[at_ms] += messages
                flows[at_ms + window_ms] -= messages
            else:
                starts[at_ms] += messages
        waiting, flowing, last_ms = float(self.overdue), 0, self.now_ms
        for at_ms in sorted({*starts, *flows}):
            per_ms = (flowing / window_ms if flowing else 0) - self.per_s / 1000
            waiting = max(waiting + per_ms * (at_ms - last_ms), 0) + starts.get(at_ms, 0)
            flowing += flows.get(at_ms, 0)
            last_ms = at_ms
            yield at_ms, waiting

    def _wait_ms(self, waiting: float) -> int:
        """Return how long the last of the waiting messages waits: until all messages before it have started."""
        return round(max(waiting - 1, 0) * 1000 / self.per_s)

    def _empty_ms(self, waits: list[tuple[int, float]]) -> int | None:
        """Return when the queue is empty for the first time; `waits` begins with a time at which messages wait."""
        ends_ms = [at_ms for at_ms, _ in waits[1:]]
        for (at_ms, waiting), end_ms in zip(waits, [*ends_ms, self.to_ms], strict=True):
            empty_ms = at_ms + waiting * 1000 / self.per_s
            if empty_ms <= end_ms:
                return round(empty_ms)
        return None

"""`aiodelay load`: prints a bar chart of the messages that come due, and says how late they will be."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from aiodelay import ConfigurationError
from aiodelay.core.durations import parse_duration
from aiodelay.core.values import LoadBucket
from aiodelay.operations.json_shapes import load_shape
from aiodelay.operations.load_forecast import LaneForecast, asked, forecast_shape, forecast_store
from aiodelay.operations.queries import LatenessMeter

from .output import moment, print_json
from .place import Place

__all__ = ["load"]

BLOCKS = " ▏▎▍▌▋▊▉█"
LEAST_WIDTH = 10
MOST_ENTRIES = 50_000
"""The most entries of each part of the journal from which the dispatch rates are measured."""


async def load(
    *,
    bucket: str = "1h",
    buckets: Annotated[int, Parameter(validator=Number(gte=1, lte=10_000))] = 24,
    of: str | None = None,
    rate: str | None = None,
    spread: str | None = None,
    within: str = "10s",
    place: Place = Place(),
) -> None:
    """Show the number of messages that come due in each of the next periods, and how late they will be.

    The bars do not count messages that are already overdue.

    Args:
        bucket: The length of one period.
        buckets: The number of periods.
        of: Only this event type or sink.
        rate: The messages that your processes start in a time, such as 500/s or 90/min, of all lanes together. Without
            it, the rate of each lane is measured from the journal.
        spread: Also say how late messages will be with this spread, such as 5m. Without it, a spread is suggested if
            messages will be late.
        within: The lateness that does not matter.
    """
    given = asked(rate, spread, within)
    bucket_ms = parse_duration(bucket, field="bucket", error=ConfigurationError, least_ms=1)
    async with place.opened() as scheduler:
        found = [each for each in await scheduler.load(bucket=bucket, buckets=buckets) if of in (None, each.lane)]
        now_ms = scheduler.store.now_ms()
        span_ms, meter = bucket_ms * buckets, LatenessMeter()
        _, forecasts = await forecast_store(scheduler, meter, span_ms, given, lane=of, most=MOST_ENTRIES)
    if place.json:
        print_json(*load_shape(found), *({"forecast": forecast_shape(each)} for each in forecasts))
    else:
        print("\n".join([*_bars(found, now_ms, bucket_ms, buckets), *map(_forecast, forecasts)]))


def _forecast(found: LaneForecast) -> str:
    return found.text[:1].upper() + found.text[1:] if found.lane is None else f"{found.lane}: {found.text}"


def _bars(found: Sequence[LoadBucket], now_ms: int, bucket_ms: int, buckets: int) -> list[str]:
    """Return a line for each period. The period with most messages has the longest bar."""
    messages: Counter[int] = Counter()
    for each in found:
        messages[each.from_ms] += each.messages
    most = max(messages.values(), default=0)
    first_ms = min(messages, default=now_ms)
    before = round((first_ms - now_ms) / bucket_ms)  # the store's periods began a little before `now_ms`
    starts = [first_ms + (i - before) * bucket_ms for i in range(buckets)]
    digits = len(f"{most:,}")
    width = max(shutil.get_terminal_size().columns - digits - len(moment(0)) - 4, LEAST_WIDTH)
    lines = [f"{moment(start)}  {messages[start]:>{digits},}  {_bar(messages[start], most, width)}" for start in starts]
    peak = f"; most, {most:,}, from {moment(messages.most_common(1)[0][0])}" if most else ""
    return [line.rstrip() for line in lines] + [f"{messages.total():,} messages{peak}"]


def _bar(n: int, most: int, width: int) -> str:
    """Return a bar, exact to an eighth of a column. A number above 0 always gives a visible bar."""
    eighths = max(n * width * 8 // most, 1) if n else 0
    return BLOCKS[8] * (eighths // 8) + (BLOCKS[eighths % 8] if eighths % 8 else "")

"""`aiodelay bench`: a short measurement of a store on the machine that will use it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from msgspec import Struct, structs

from aiodelay import Context, Message, Scheduler
from aiodelay.errors import masked_url

from .errors import CommandError
from .output import print_json, print_table
from .place import Place

__all__ = ["bench"]

NAMESPACE, NAME, REFERENCE = "aiodelay-bench", "aiodelay.bench", "memory://"
PAYLOAD = b"x" * 200
SINGLE, SPREAD_MS = 50, 1_000


class Figures(Struct, frozen=True):
    """The measurements of one store. Rates are in messages per second."""

    schedule_many_per_s: float
    schedule_p50_ms: float
    schedule_p99_ms: float
    deliver_per_s: float
    lateness_p50_ms: int
    lateness_p99_ms: int


async def bench(
    *,
    messages: Annotated[int, Parameter(validator=Number(gte=100, lte=1_000_000))] = 5_000,
    place: Place = Place(),
) -> None:
    """Measure a store, and compare it with the memory store of this machine.

    One process stores messages of 200 bytes in the namespace aiodelay-bench of the store. It measures four things:
    schedule_many, the delivery to a handler that does nothing, single calls of schedule, and the lateness of messages
    whose due times are spread over a second. The run is short, so other work on the machine changes the figures. The
    ratios change less.

    Args:
        messages: The number of messages to store and deliver at once.
    """
    if place.url.startswith("kafka:"):
        raise CommandError(
            "bench measures only stores with namespaces, which Kafka lacks; docs/performance.md has figures of Kafka"
        )
    reference = await _measure(replace(place, store=REFERENCE, namespace=NAMESPACE), messages)
    figures = await _measure(replace(place, namespace=NAMESPACE), messages)
    ours, theirs = structs.asdict(figures), structs.asdict(reference)
    ratios = {name: round(ours[name] / theirs[name], 3) if theirs[name] else None for name in ours}
    if place.json:
        print_json({"messages": messages, "store": ours, "memory": theirs, "ratio": ratios})
        return
    rows = [
        (name.replace("_per_s", ", a second").replace("_ms", ", ms").replace("_", " "), *map(_number, values))
        for name, *values in zip(ours, ours.values(), theirs.values(), ratios.values(), strict=True)
    ]
    print_table(("", masked_url(place.url), REFERENCE, "ratio"), rows)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


async def _measure(place: Place, n: int) -> Figures:
    loop = asyncio.get_running_loop()
    counter = _Counter()
    scheduler = Scheduler(place.url, namespace=place.namespace, open_timeout="0s")
    scheduler.add_handler(counter.handle, name=NAME, concurrency=500)
    async with scheduler:
        counter.expect(n)
        await scheduler.pause(NAME)
        began = loop.time()
        await scheduler.schedule_many(_message("0s") for _ in range(n))
        stored_s, began = loop.time() - began, loop.time()
        await scheduler.resume(NAME)
        await counter.is_done.wait()
        delivered_s = loop.time() - began
        counter.expect(2 * SINGLE)
        took_ms = []
        for i in range(SINGLE):
            began = loop.time()
            await scheduler.schedule(PAYLOAD, to=f"handler:{NAME}", delay=f"{i * SPREAD_MS // SINGLE}ms")
            took_ms.append((loop.time() - began) * 1000)
        spread = (_message(f"{i * SPREAD_MS // SINGLE}ms") for i in range(SINGLE))
        await scheduler.schedule_many(spread)
        await counter.is_done.wait()
    late = counter.lateness_ms
    return Figures(
        round(n / stored_s, 1),
        round(_share(took_ms, 50), 3),
        round(_share(took_ms, 99), 3),
        round(n / delivered_s, 1),
        int(_share(late, 50)),
        int(_share(late, 99)),
    )


def _message(delay: str) -> Message:
    return Message(PAYLOAD, to=f"handler:{NAME}", delay=delay)


def _share(values: Sequence[float], percent: int) -> float:
    """Return a percentile: the smallest value that `percent` % of the values do not exceed."""
    return sorted(values)[-(-len(values) * percent // 100) - 1]


class _Counter:
    """A handler that counts messages. `is_done` is set when the expected number of messages has come."""

    def __init__(self) -> None:
        self.is_done = asyncio.Event()
        self.lateness_ms: list[int] = []
        self._left = 0

    def expect(self, n: int) -> None:
        self._left, self.lateness_ms = n, []
        self.is_done.clear()

    async def handle(self, event: bytes, context: Context) -> None:
        self.lateness_ms.append(int(context.lateness.total_seconds() * 1000))
        self._left -= 1
        if self._left == 0:
            self.is_done.set()

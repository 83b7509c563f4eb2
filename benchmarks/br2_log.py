"""BR2: the rate of appends and reads of a log, compared with bare XADD and XRANGE; and the memory of its entries."""

from __future__ import annotations

from aiodelay.redis import RedisLog

from .harness import (
    Benchmark,
    Goal,
    Plan,
    Row,
    Stopwatch,
    check,
    in_turn,
    per_message_us,
    quantile,
    ratios,
    raw_payload,
)
from .redis_server import emptied

__all__ = ["BENCHMARK"]

MESSAGES = 1_000_000
GOAL = Goal("at least", 0.7)
TOPIC, STREAM = "orders", "stream"
KEY = f"{{default:00}}:log:{TOPIC}"
AT_ONCE = 500


def run(plan: Plan) -> list[Row]:
    n = plan.size(MESSAGES)
    payloads = [raw_payload(i) for i in range(n)]
    elements = plan.run(appended(plan.redis, payloads))
    taken: dict[str, list[float]] = {"bare": [], "ours": []}
    memory: dict[str, list[int]] = {"bare": [], "ours": []}
    times = in_turn(
        plan,
        {
            "bare": lambda: plan.run(bare(plan.redis, elements, taken["bare"], memory["bare"])),
            "ours": lambda: plan.run(log(plan.redis, payloads, taken["ours"], memory["ours"])),
        },
    )

    def row(what: str, bare: list[float], ours: list[float], bare_name: str) -> Row:
        beside = f"{per_message_us(ours, n)} a message, bare {per_message_us(bare, n)}"
        unit = f"x speed of bare {bare_name}"
        return Row("BR2", f"Redis: {n:,} messages {what}", unit, ratios(bare, ours), GOAL, beside)

    held = f"{quantile(memory['ours'], 0.5) / n:,.0f} B a message, bare {quantile(memory['bare'], 0.5) / n:,.0f} B"
    takes = tuple(ours / bare for ours, bare in zip(memory["ours"], memory["bare"], strict=True))
    return [
        row("appended to a log", times["bare"], times["ours"], "XADD"),
        row("read from a log", taken["bare"], taken["ours"], "XRANGE"),
        Row("BR2", f"Redis: {n:,} messages in a log: memory", "x memory of a bare stream", takes, None, held),
    ]


async def appended(url: str, payloads: list[bytes]) -> list[bytes]:
    """Return the entries that aiodelay stores for the messages."""
    async with emptied(url) as client, RedisLog(url) as ours:
        await ours.append(TOPIC, payloads)
        return [fields[b"m"] for _, fields in await client.xrange(KEY)]


async def bare(url: str, elements: list[bytes], reading: list[float], memory: list[int]) -> float:
    """Measure the bare limit: XADD with given ids, 500 in a pipeline; then XRANGE, 500 at a time."""
    async with emptied(url) as client:
        with Stopwatch() as watch:
            for at in range(0, len(elements), AT_ONCE):
                async with client.pipeline(transaction=False) as pipeline:
                    for index, element in enumerate(elements[at : at + AT_ONCE], at + 1):
                        pipeline.xadd(STREAM, {"m": element}, id=f"0-{index}")
                    await pipeline.execute()
        memory.append(await client.memory_usage(STREAM, samples=0))
        found: list[bytes] = []
        with Stopwatch() as read:
            while len(found) < len(elements):
                part = await client.xrange(STREAM, f"0-{len(found) + 1}", "0", count=AT_ONCE)
                found += [fields[b"m"] for _, fields in part]
        check(found == elements, "the bare side read other elements")
        reading.append(read.seconds)
    return watch.seconds


async def log(url: str, payloads: list[bytes], reading: list[float], memory: list[int]) -> float:
    """Measure our side: append all messages in one call, then read them."""
    n = len(payloads)
    async with emptied(url) as client, RedisLog(url) as ours:
        with Stopwatch() as watch:
            indexes = await ours.append(TOPIC, payloads)
        check(list(indexes) == list(range(1, n + 1)), "the indexes are not consecutive")
        memory.append(await client.memory_usage(KEY, samples=0))
        with Stopwatch() as read:
            payloads_read = [entry.payload async for entry in ours.read(TOPIC)]
        check(payloads_read == payloads, "read wrongly")
        reading.append(read.seconds)
    return watch.seconds


BENCHMARK = Benchmark("BR2", "a log on Redis", run, needs_redis=True)

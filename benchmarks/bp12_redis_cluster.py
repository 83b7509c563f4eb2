"""BP12: the work of BP1 to BP4 on a cluster of three nodes, compared with the same work on a single server."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import partial

from aiodelay.backends.redis.records.keys import Keys
from aiodelay.redis import RedisStore
from aiodelay.testing.servers import redis_servers, serving
from tests.support.topologies import clustered

from .bp1_redis_dispatch import typed
from .bp2_redis_transfer import transfer
from .bp3_redis_schedule import schedule_each, schedule_many
from .harness import DEFAULT_CONCURRENCY, Benchmark, Goal, Plan, Row, Stopwatch, in_turn, quantile, ratios
from .lateness import PER_S, SPAN_S, check_all, measure
from .redis_server import MinuteAgo, emptied

__all__ = ["BENCHMARK"]

GOAL = Goal("at least", 0.97)
TAG = Keys("default").tag.removesuffix(":")
MESSAGES, MANY = 20_000, 100_000
CONCURRENCY = 1_500
LIST = f"orders{TAG}"
"""The key of a list in the slot of the namespace."""
LATE_PART = 0.2
"""The part of BP4's span and delays. A pair then takes 12 s, and 30 pairs 6 minutes."""
CALLS, COMMANDS = 5_000, 15
BARE = f"for _ = 1, {COMMANDS} do redis.call('EXISTS', KEYS[1]) end"
"""A script with as many commands as the claim of one message has."""


def run(plan: Plan) -> list[Row]:
    found = redis_servers()[0]
    with serving(found) as url, clustered(found.program, replicas=False) as cluster:
        urls = {"single": url, "cluster": cluster.url}
        rows = [_row(plan, name, work, urls, GOAL) for name, work in _works(plan).items()]
        calls = plan.size(CALLS)
        what = f"bare, {calls:,} calls of a script with {COMMANDS} commands, one after another"
        nodes = urls | {"cluster": cluster.owner(LIST).url}
        return [*rows, _row(plan, what, partial(_bare_s, n=calls), nodes, None)]


Work = Callable[[str], Coroutine[None, None, float]]
"""Does the work on a URL, and returns the seconds that it took, or the lateness."""


def _works(plan: Plan) -> Mapping[str, Work]:
    n, many, late = plan.size(MESSAGES), plan.size(MANY), plan.size(round(PER_S * SPAN_S * LATE_PART))
    due = f"{n:,} messages due at once, to an empty handler of typed events, concurrency"
    return {
        f"BP1, {due} {CONCURRENCY:,}": partial(typed, n=n, concurrency=CONCURRENCY),
        f"BP1, {due} {DEFAULT_CONCURRENCY} (default)": partial(typed, n=n, concurrency=DEFAULT_CONCURRENCY),
        f"BP2, {many:,} messages due at once, moved to a list in the slot of the namespace": partial(
            transfer, n=many, clock=MinuteAgo(), key=LIST
        ),
        f"BP3, {n:,} concurrent calls of `schedule()`": partial(schedule_each, n=n),
        f"BP3, `schedule_many` of {many:,} messages": partial(schedule_many, n=many),
        f"BP4, {late:,} messages at {PER_S}/s, p50 of the lateness": partial(_lateness_s, plan=plan, n=late),
    }


def _row(plan: Plan, what: str, work: Work, urls: Mapping[str, str], goal: Goal | None) -> Row:
    """Measure both sides in pairs; the first side changes with each pair."""
    times = in_turn(plan, {name: partial(_measured, plan, work, url) for name, url in urls.items()})
    single, cluster = (quantile(times[name], 0.5) * 1000 for name in ("single", "cluster"))
    beside = f"{cluster:,.1f} ms, single server {single:,.1f} ms"
    values = ratios(times["single"], times["cluster"])
    return Row("BP12", f"Redis Cluster, 3 nodes, 1 shard: {what}", "x speed on a single server", values, goal, beside)


def _measured(plan: Plan, work: Work, url: str) -> float:
    return plan.run(work(url))


async def _lateness_s(url: str, plan: Plan, n: int) -> float:
    """Return the median lateness of messages, in seconds."""
    async with emptied(url):
        found = check_all([await measure(RedisStore(url), range(n), PER_S, plan.scale * LATE_PART)], n)
    return quantile(found.ours, 0.5) / 1000


async def _bare_s(url: str, n: int) -> float:
    """Measure what a cluster costs any program: calls to one node, by plain redis-py."""
    async with emptied(url) as client:
        sha = await client.script_load(BARE)
        with Stopwatch() as watch:
            for _ in range(n):
                await client.evalsha(sha, 1, LIST)
    return watch.seconds


BENCHMARK = Benchmark("BP12", "a Redis cluster beside a single server", run, needs_redis=True)

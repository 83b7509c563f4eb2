"""BA3: the time that Redis takes for each page and query of the service, and its growth with the pending messages."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from typing import Any, NamedTuple

import redis
from starlette.routing import Route

from aiodelay import Scheduler
from aiodelay.backends.redis.connection.scripts import NAMES, STANDALONE, script
from aiodelay.core.ids import new_op
from aiodelay.core.values import At, Dead, Envelope, Put
from aiodelay.redis import RedisStore
from aiodelay.service import admin

from .api_server import running_api
from .bp7_redis_growth import AT_ONCE, LOGGED_US, claim_all, settle
from .growth import FEW, LANE, MANY, apply, fill
from .harness import Benchmark, Goal, Plan, Row, check, quantile, raw_payload
from .redis_server import empty

__all__ = ["BENCHMARK"]

LONGEST = Goal("at most", 5.0)
GROWTH = Goal("at most", 1.5)
PAGE = "limit=500"
OVERDUE = "overdue-0"
ASKED: Mapping[str, Sequence[str]] = {
    "/": ("/", "/?span=day", "/?span=month"),
    "/live": ("/live?view=hour", "/live?view=strip"),
    "/messages": ("/messages", f"/messages?id={OVERDUE}", f"/messages?lane={LANE}&state=scheduled", "/messages?text=x"),
    "/messages/{id:path}": (f"/messages/{OVERDUE}",),
    "/recurring": ("/recurring",),
    "/dead": ("/dead", "/dead?text=x"),
    "/dead/{revision}/{id:path}": ("/dead/<dead>",),
    "/sinks": ("/sinks",),
    "/instances": ("/instances",),
    "/consumers": ("/consumers",),
    "/login": ("/login",),
    "/docs": ("/docs",),
    "/openapi.json": ("/openapi.json",),
    "/v1/stores": ("/v1/stores",),
    "/v1/counts": ("/v1/counts",),
    "/v1/load": ("/v1/load", "/v1/load?bucket=1h&buckets=1000", "/v1/load?bucket=1s&buckets=1000"),
    "/v1/lateness": ("/v1/lateness",),
    "/v1/journal": (f"/v1/journal?{PAGE}", f"/v1/journal?{PAGE}&id={OVERDUE}"),
    "/v1/forecast": ("/v1/forecast",),
    "/v1/holds": ("/v1/holds",),
    "/v1/pauses": ("/v1/pauses",),
    "/v1/limits": ("/v1/limits",),
    "/v1/limits/keys": (f"/v1/limits/keys?what={LANE}",),
    "/v1/bulk": ("/v1/bulk",),
    "/v1/consumers": ("/v1/consumers",),
    "/v1/messages": (
        f"/v1/messages?{PAGE}",
        f"/v1/messages?{PAGE}&lane={LANE}",
        f"/v1/messages?{PAGE}&due_from=<week>",
        f"/v1/messages?{PAGE}&state=overdue",
        f"/v1/messages?{PAGE}&text=x",
        f"/v1/messages?id={OVERDUE}",
    ),
    "/v1/messages/{id:path}": (f"/v1/messages/{OVERDUE}",),
    "/v1/dead": (f"/v1/dead?{PAGE}", f"/v1/dead?{PAGE}&text=x"),
    "/v1/dead/{revision}/{id:path}": ("/v1/dead/<dead>",),
    "/schedules": ("/schedules",),
    "/schedule/{id:path}": (f"/schedule/{OVERDUE}",),
    "/info": ("/info",),
    "/liveness": ("/liveness",),
}
"""The requests that the benchmark sends to each route."""
OF_OPERATIONS = ("{token}", "{operation}")
"""Routes with these parameters show an operation that this process runs. They ask the server nothing."""
PATHS = [path for paths in ASKED.values() for path in paths]
READ_ON = 3
"""The most pages that are read one after the other."""
COSTLY_MS = 1.0
"""Paths that cost the server less than this are not compared one by one."""
SHOWN = 5


class Took(NamedTuple):
    """The cost of all paths, in ms: the longest run of each command, and the server's processor time for each path."""

    longest: Mapping[str, float]
    cpu_ms: Mapping[str, float]


def run(plan: Plan) -> list[Row]:
    _check_all_are_asked()
    url = f"{plan.redis}{'&' if '?' in plan.redis else '?'}journal=10000"
    few, many = plan.size(FEW), plan.size(MANY)
    for name, n in (("few", few), ("many", many)):
        plan.run(filled(RedisStore(url, namespace=name), n))
    with (
        running_api(url, "few") as small,
        running_api(url, "many") as large,
        redis.Redis.from_url(plan.redis) as client,
    ):
        client.config_set("slowlog-log-slower-than", LOGGED_US)
        client.config_set("slowlog-max-len", 10_000)
        rounds = [(asked(client, small), asked(client, large)) for _ in range(plan.runs + 1)]
    empty(plan.redis)
    return rows_of(rounds[1:], few, many)  # the first round also loads scripts


def rows_of(rounds: Sequence[tuple[Took, Took]], few: int, many: int) -> list[Row]:
    """Return the longest command, the growth of all paths together, and the growth of the path that grows most."""
    longest: dict[str, list[float]] = {}
    for name, ms in (each for _, large in rounds for each in large.longest.items()):
        longest.setdefault(name, []).append(ms)
    slowest = sorted(longest, key=lambda name: -max(longest[name]))[:SHOWN]
    before, after = ([sum(each.cpu_ms.values()) for each in part] for part in zip(*rounds, strict=True))
    costly = [path for path in PATHS if min(small.cpu_ms[path] for small, _ in rounds) >= COSTLY_MS]
    growth = {path: tuple(large.cpu_ms[path] / small.cpu_ms[path] for small, large in rounds) for path in costly}
    most = max(growth, key=lambda path: quantile(growth[path], 0.5))
    worst = tuple(max(large.longest.values(), default=0.0) for _, large in rounds)
    ratios = tuple(b / a for a, b in zip(before, after, strict=True))
    medians = f"{quantile(after, 0.5):.1f} ms in all, with {few:,} pending {quantile(before, 0.5):.1f} ms"
    named = "highest of all rounds, ms: " + ", ".join(f"{name} {max(longest[name]):.1f}" for name in slowest)
    what, unit = f"with {many:,} messages pending", f"x time with {few:,} pending"
    return [
        Row("BA3", f"Redis: longest command of all pages and queries {what}", "ms", worst, LONGEST, named),
        Row("BA3", f"Redis: processor time of all pages and queries {what}", unit, ratios, GROWTH, medians),
        Row("BA3", f"Redis: processor time of the path that grows most, `{most}`", unit, growth[most], None, ""),
    ]


async def filled(store: RedisStore, n: int) -> None:
    """Store messages that are due within a month, overdue messages without a handler, and dead letters."""
    async with store:
        await fill(store, n, random.Random(n))
        now = store.now_ms()
        due = [Put(new_op(), Envelope(f"dead-{i}", LANE, payload=raw_payload(0)), At(now)) for i in range(AT_ONCE)]
        await apply(store, due)
        async with store.work("bench", [LANE]) as work:
            claims = await claim_all(work)
            dead = [Dead(each.record.id, each.record.revision, each.token, "rejected", 1, "no") for each in claims]
            await settle(work, dead)
        overdue = [Envelope(f"overdue-{i}", "nobody", payload=raw_payload(0)) for i in range(AT_ONCE)]
        await apply(store, [Put(new_op(), each, At(now)) for each in overdue])


def _check_all_are_asked() -> None:
    routes = [route for route in admin(Scheduler("memory://")).routes if isinstance(route, Route)]
    there = {route.path for route in routes if "GET" in (route.methods or ()) and "/static/" not in route.path}
    there = {path for path in there if not path.endswith(OF_OPERATIONS)}
    check(there == {*ASKED}, f"not asked, or not there: {sorted(there ^ {*ASKED})}")


def asked(client: redis.Redis, port: int) -> Took:
    """Send all requests, and return their cost."""
    (letter,) = json.loads(answer(port, "/v1/dead?limit=1"))["letters"]
    week = (datetime.now(UTC) + timedelta(days=7)).strftime("%Y-%m-%dT%H:%M:%SZ")
    cpu_ms = {}
    client.slowlog_reset()
    for path in PATHS:
        before = _cpu_ms(client)
        read_on(port, path.replace("<dead>", f"{letter['revision']}/{letter['id']}").replace("<week>", week))
        cpu_ms[path] = _cpu_ms(client) - before
    return Took(_longest(client), cpu_ms)


def read_on(port: int, path: str) -> None:
    """Request a path, and the pages that follow, up to `READ_ON` pages."""
    after = ""
    for _ in range(READ_ON):
        page = answer(port, path + after)
        place = json.loads(page).get("after") if PAGE in path else None
        if not place:
            return
        after = f"&after={place}"


def answer(port: int, path: str) -> bytes:
    """Send a request, and return the answer. If the answer is endless, return only its beginning."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        check(response.status == 200, f"{path}: {response.status}")
        return response.readline() if path.startswith("/live?") else response.read()
    finally:
        connection.close()


def _cpu_ms(client: redis.Redis) -> float:
    """Return the processor time of the server's main thread."""
    found: Any = client.info("cpu")
    return 1000 * float(found["used_cpu_user_main_thread"] + found["used_cpu_sys_main_thread"])


def _longest(client: redis.Redis) -> dict[str, float]:
    """Return the longest run of each command in the server's slow log."""
    found: Any = client.slowlog_get(-1)
    scripts = {script(name).sha: name for name in (*NAMES, *STANDALONE)}
    longest: dict[str, float] = {}
    for each in found:
        words = each["command"].split(b" ", 2)
        name = scripts[words[1]] if words[0] == b"EVALSHA" else words[0].decode()
        longest[name] = max(longest.get(name, 0.0), each["duration"] / 1000)
    return longest


BENCHMARK = Benchmark("BA3", "what pages and queries cost the server", run, needs_redis=True)

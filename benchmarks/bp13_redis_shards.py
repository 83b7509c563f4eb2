"""BP13: the servers' processor time for a message with several shards, rates of nodes, and the wait for a move."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

import redis

from aiodelay import Context, Scheduler
from aiodelay.backends.redis.sharded.reshard import reshard
from aiodelay.core.ids import new_id, new_op
from aiodelay.core.values import MAX_CLAIM_MESSAGES, After, Envelope, Put
from aiodelay.redis import ShardedStore
from aiodelay.testing.servers import redis_servers, serving
from tests.support.topologies import clustered

from .harness import (
    DEFAULT_CONCURRENCY,
    Benchmark,
    Goal,
    Order,
    Plan,
    Row,
    check,
    check_once_each,
    in_turn,
    order,
    quantile,
)
from .redis_server import MinuteAgo, emptied

__all__ = ["BENCHMARK"]

MESSAGES = 20_000
CONCURRENCIES = (DEFAULT_CONCURRENCY, 1_500)
SHARDS = (1, 4, 16)
PENDING = 100_000
"""The number of pending messages that `aiodelay reshard` moves."""
NODES = (1, 4, 16)
"""The numbers of nodes whose rates are computed. For 16 nodes, the time for a message is that of 4 nodes."""
BUSY = 0.5
"""The part of a core that may be busy, as `aiodelay plan` counts. A busier core makes messages late."""
LANE, HOUR_MS = "orders", 3_600_000
PAYLOAD = b'{"order": 1234567, "customer": "somebody@example.org", "amount": 12.5}'
CONSTANT = Goal("at most", 1.1)
ON_NODES, ON_ONE_OF_NODES = f"4 nodes with {max(SHARDS)} shards", "4 nodes with 1 shard"


class Place(NamedTuple):
    """Servers with a namespace.

    Attributes:
        url: The URL of the namespace, with the number of shards.
        servers: The URLs of all servers.
    """

    url: str
    servers: Sequence[str]


def run(plan: Plan) -> list[Row]:
    n, found = plan.size(MESSAGES), redis_servers()[0]
    with ExitStack() as stack:
        url = stack.enter_context(serving(found))
        places = {_on_one(shards): Place(f"{url}?shards={shards}", [url]) for shards in SHARDS}
        cluster = stack.enter_context(clustered(found.program, primaries=4, replicas=False))
        nodes = [each.url for each in cluster.nodes]
        places[ON_NODES] = Place(f"{cluster.url}?shards={max(SHARDS)}", nodes)
        places[ON_ONE_OF_NODES] = Place(f"{cluster.url}?shards=1", nodes)
        costs = {
            concurrency: in_turn(
                plan, {name: partial(_measured, plan, place, n, concurrency) for name, place in places.items()}
            )
            for concurrency in CONCURRENCIES
        }
        pending = plan.size(PENDING)
        moves = {name: places[name].url.partition("?")[0] for name in (_on_one(max(SHARDS)), ON_NODES)}
        waits = in_turn(plan, {name: partial(_waited, plan, url, pending) for name, url in moves.items()})
    rows = [row for each in CONCURRENCIES for row in _cost_rows(costs[each], n, each)]
    return rows + _rate_rows(costs) + _wait_rows(waits, pending)


def _on_one(shards: int) -> str:
    return "one server with 1 shard" if shards == 1 else f"one server with {shards} shards"


def _cost_rows(costs: Mapping[str, Sequence[float]], n: int, concurrency: int) -> list[Row]:
    text = f"Redis: processor time of the servers for a message, {n:,} messages, concurrency {concurrency:,}"
    one = _on_one(1)
    pairs = [(where, one) for where in costs if where != one]
    rows = []
    for where, base in [*pairs, (ON_NODES, ON_ONE_OF_NODES)]:
        own, other = costs[where], costs[base]
        values = tuple(us / base_us for us, base_us in zip(own, other, strict=True))
        beside = f"{quantile(own, 0.5):.1f} µs a message, {base} {quantile(other, 0.5):.1f} µs"
        goal = None if where == ON_ONE_OF_NODES else CONSTANT  # what a cluster costs without shards
        rows.append(Row("BP13", f"{text}, {where}", f"x time of {base}", values, goal, beside))
    return rows


def _rate_rows(costs: Mapping[int, Mapping[str, Sequence[float]]]) -> list[Row]:
    """Return the rates that nodes carry. They are computed, not measured."""
    rows = []
    for nodes in NODES:
        where = _on_one(1) if nodes == 1 else ON_NODES
        own = costs[DEFAULT_CONCURRENCY][where]
        named = "1 node" if nodes == 1 else f"{nodes} nodes"
        what = f"Redis: {named} with one core each, by computation: {nodes} x {BUSY:g} s / time for a message"
        values = tuple(nodes * BUSY * 1000 / us for us in own)
        beside = f"{quantile(own, 0.5):.1f} µs of the servers for a message, {where}"
        rows.append(Row("BP13", what, "thousand messages/s", values, None, beside))
    return rows


def _wait_rows(waits: Mapping[str, Sequence[float]], pending: int) -> list[Row]:
    """Return how long the processes of a namespace wait while `aiodelay reshard` moves a million messages."""
    rows = []
    for where, own in waits.items():
        what = f"Redis: wait for a move of {pending:,} pending messages from 1 shard to {where}"
        values = tuple(seconds / pending * 1e6 for seconds in own)
        rows.append(Row("BP13", what, "s for a million", values, None, f"{quantile(own, 0.5):.1f} s"))
    return rows


# --- one measurement --------------------------------------------------------------------------------------


def _waited(plan: Plan, url: str, pending: int) -> float:
    return plan.run(wait_s(url, pending))


async def wait_s(url: str, pending: int) -> float:
    """Store messages, and move them from 1 shard to the most shards. Return how long processes wait, in seconds."""
    async with emptied(url):
        async with ShardedStore(url) as store:
            for first in range(0, pending, MAX_CLAIM_MESSAGES):
                numbers = range(first, min(first + MAX_CLAIM_MESSAGES, pending))
                await store.apply(
                    [Put(new_op(), Envelope(new_id(), LANE, payload=PAYLOAD), After(HOUR_MS + i)) for i in numbers]
                )
        moved = await reshard(url, "", max(SHARDS), lambda *_: None)
        check(moved.messages == pending, f"{moved.messages} messages were moved")
    return moved.waited_ms / 1000


def _measured(plan: Plan, place: Place, n: int, concurrency: int) -> float:
    return plan.run(server_us(place, n, concurrency))


async def server_us(place: Place, n: int, concurrency: int) -> float:
    """Store messages by concurrent calls, and deliver them. Return the servers' µs of processor time for a message."""
    at, delivered = datetime.now(UTC), list[int]()
    all_delivered = asyncio.get_running_loop().create_future()
    producing, store = ShardedStore(place.url, clock=MinuteAgo()), ShardedStore(place.url)
    scheduler = Scheduler(store)

    @scheduler.handler(concurrency=concurrency, timeout="30s")
    async def handle(event: Order, context: Context) -> None:
        _ = context.attempt
        delivered.append(event.number)
        if len(delivered) == n:
            all_delivered.set_result(None)

    async with emptied(place.url.partition("?")[0]):
        async with producing, store:  # The checks of an opening store are no part of a message's cost.
            before_s = _processor_s(place.servers)
            async with Scheduler(producing, dispatch=False) as producer, asyncio.TaskGroup() as tasks:
                for i in range(n):
                    tasks.create_task(producer.schedule(order(i), at=at))
            async with scheduler:
                await all_delivered
            used_s = _processor_s(place.servers) - before_s
        check_once_each(delivered, n)
        async with ShardedStore(place.url) as after:
            check(not await after.counts(), "something is left in the store")
    return used_s / n * 1e6


def _processor_s(servers: Sequence[str]) -> float:
    """Return the processor time of all servers since their start, in seconds."""
    total = 0.0
    for url in servers:
        with redis.Redis.from_url(url) as client:
            used = client.info("cpu")
        total += used["used_cpu_user"] + used["used_cpu_sys"]
    return total


BENCHMARK = Benchmark("BP13", "processor time of Redis servers with shards", run, needs_redis=True)

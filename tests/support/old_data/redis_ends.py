"""Old data of a Redis list, a fan-out topic and a log, with messages in every state.

The scripts of lists, topics and logs use the clock of the server. So the claims that the story leaves open have lapsed
when a test reads the data.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from msgspec.structs import asdict, replace

from aiodelay.backends.redis.log.entries import LogMessage
from aiodelay.core.transitions import delivery_id
from aiodelay.core.values import LEASE_MS, Again, Claim, Delivery, Demand, Done, Envelope
from aiodelay.ports import Feed, Sink, Source
from aiodelay.redis import (
    RedisFanout,
    RedisFanoutSink,
    RedisFanoutSource,
    RedisListSink,
    RedisListSource,
    RedisLog,
    ShardedStore,
)
from aiodelay.testing.conformance import Stage

from .story import FAR, TRACE

__all__ = ["LIST", "read_ends", "tell_ends"]

LIST, TOPIC = "{old-data}list", "orders"
ADDRESSES = {"list": LIST, "fan-out": f"{TOPIC}?consumer=billing", "log": f"{TOPIC}?consumer=billing"}
LANE = "taken"
SHORT_MS = 10
"""A lease that has ended when a test reads the data."""
PUSHED_MS = 1_893_456_000_000


class Ends:
    """The open sinks and sources."""

    def __init__(self, url: str, namespace: str, opened: AsyncExitStack) -> None:
        self._opened = opened
        self.list_sink = RedisListSink(url, max_length=3)
        self.fanout_sink = RedisFanoutSink(url, namespace=namespace)
        self.inline_sink = RedisFanoutSink(url, namespace=namespace, inline_below=500)
        self.log = RedisLog(url, namespace=namespace)
        self.fanout = RedisFanout(url, namespace=namespace)
        self.sources: dict[str, Source] = {
            "list": RedisListSource(url),
            "fan-out": RedisFanoutSource(url, namespace=namespace),
            "log": self.log,
        }

    async def open(self) -> None:
        ends: list[Sink | Source | RedisFanout] = [self.list_sink, self.fanout_sink, self.inline_sink, self.fanout]
        for each in (*ends, *self.sources.values()):
            await self._opened.enter_async_context(each)

    async def feed(self, name: str, instance: str, store: ShardedStore) -> Feed:
        """Open the feed of one of the sources for a process."""
        taking = self.sources[name].feed(ADDRESSES[name], instance, store.put_back, store.now_ms)
        return await self._opened.enter_async_context(taking)


@asynccontextmanager
async def _opened(url: str, namespace: str) -> AsyncIterator[Ends]:
    async with AsyncExitStack() as opened:
        ends = Ends(url, namespace, opened)
        await ends.open()
        yield ends


# --- the story --------------------------------------------------------------------------------------------


async def tell_ends(stage: Stage, url: str, namespace: str) -> None:
    """Write the list, the topic and the log. Some messages stay in the store, because their list is full."""
    assert isinstance(stage.store, ShardedStore)
    async with _opened(url, namespace) as ends:
        await ends.fanout.register(TOPIC, "billing")
        await ends.fanout.register(TOPIC, "audit", ordered=True)
        await ends.log.register(TOPIC, "billing")
        await ends.log.register(TOPIC, "audit", start="now", ordered=True)
        for sink, address in ((ends.list_sink, LIST), (ends.fanout_sink, TOPIC), (ends.log, TOPIC)):
            await _move(stage, sink, address)
        await _send(ends)
        for name in ADDRESSES:
            await _take(await ends.feed(name, "one", stage.store), stage.store)
        await stage.store.shards[0].command("RPUSH", LIST, b"pushed by another program")


async def _move(stage: Stage, sink: Sink, address: str) -> None:
    """Let the store move four due messages."""
    puts = [
        stage.put(f"{sink.name} {n}", lane=sink.name, address=address, key=b"k", headers={"n": b"%d" % n}, trace=TRACE)
        for n in range(4)
    ]
    await stage.stored(*puts, stage.put(f"{sink.name} later", FAR, lane=sink.name, address=address))
    assert isinstance(stage.store, ShardedStore)
    with stage.store.transferring(sink) as moving:
        await moving.transfer(Demand(100))


async def _send(ends: Ends) -> None:
    """Send messages as another store does, and append a message as another program does."""
    for sink, address, message_id in (
        (ends.fanout_sink, TOPIC, "sent"),
        (ends.inline_sink, TOPIC, "sent inline"),
        (ends.fanout_sink, f"{TOPIC}@billing", "sent to billing"),
        (ends.log, TOPIC, "appended"),
        (ends.log, f"{TOPIC}?consumer=billing", "appended for billing"),
    ):
        envelope = Envelope(message_id, sink.name, address, encoding="json", payload=b"[1]", version=3)
        given = f"{message_id}/{PUSHED_MS}/{PUSHED_MS - 1}"
        await sink.send([Delivery(envelope, given, PUSHED_MS, PUSHED_MS, attempt=2, lateness_ms=0)])
    await ends.log.append(TOPIC, [LogMessage(b"mine", key=b"k", headers={"a": b"b"}, id="own id")])
    fields = ("payload", "hello", "key", "k1", "header.trace", "abc", "at", f"{PUSHED_MS}")
    index = max([each.index async for each in ends.log.read(TOPIC)]) + 1
    await ends.log._command("XADD", f"{ends.log.keys.key('log:')}{TOPIC}", f"0-{index}", *fields)


async def _take(feed: Feed, store: ShardedStore) -> None:
    """Take three messages: one ends, one gets a retry, and one stays in flight."""
    claimed = await feed.claim({LANE: Demand(3)}, request="one", lease_ms=SHORT_MS)
    done, again, _ = claimed.claims
    await feed.settle([_done(done), _again(again, store.now_ms() + 1)])


def _done(claim: Claim) -> Done:
    return Done(claim.record.id, claim.record.revision, claim.token)


def _again(claim: Claim, due_ms: int) -> Again:
    return Again(claim.record.id, claim.record.revision, claim.token, due_ms, claim.record.attempt + 1, "no answer")


# --- what is read -----------------------------------------------------------------------------------------


async def read_ends(stage: Stage, url: str, namespace: str) -> dict[str, Any]:
    """Return the messages of the list, the topic and the log, in the order in which a process gets them."""
    assert isinstance(stage.store, ShardedStore)
    async with _opened(url, namespace) as ends:
        found: dict[str, Any] = {
            "lengths": await stage.store.lengths([f"redis-list:{LIST}"]),
            "blocked": await stage.store.blocked(),
            "registered": await stage.store.registered(),
            "fan-out": [(each.name, each.consumers, each.published, each.kept) for each in await ends.fanout.topics()],
            "log": [(each.name, each.first, each.last, each.consumers) for each in await ends.log.topics()],
            "entries": [asdict(each) async for each in ends.log.read(TOPIC)],
            "entries left": [each.index async for each in ends.log.read(TOPIC, consumer="billing")],
        }
        for name in ADDRESSES:
            found[f"taken from {name}"] = await _taken(await ends.feed(name, "two", stage.store))
        found["registered afterwards"] = [replace(each, seen_ms=None) for each in await stage.store.registered()]
    found["dead"] = [(*each.key, each.reason, each.record.last_error) for each in await stage.dead()]
    return found


async def _taken(feed: Feed) -> list[Sequence[Any]]:
    """Take all messages, one after the other. An unreadable message comes without a claim."""
    found: list[Sequence[Any]] = []
    empty = 0
    while empty < 2:
        claims = (await feed.claim({LANE: Demand(1)}, request="two", lease_ms=LEASE_MS)).claims
        empty = 0 if claims else empty + 1
        for claim in claims:
            found.append((delivery_id(claim.record), claim.record, claim.missed))
            await feed.settle([_done(claim)])
    return found

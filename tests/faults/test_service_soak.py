"""The service under load while its servers are killed and return, it ends and is killed, and its tokens are exchanged.

The test judges every delivered message and the answer to every request.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiokafka import AIOKafkaConsumer
from confluent_kafka.admin import AdminClient
from redis.asyncio import Redis

from aiodelay.backends.redis.records.elements import decode_element
from aiodelay.service import hash_token
from aiodelay.testing.servers import free_port, redis_programs
from tests.support.asked import NEVER, Delivered, Fault, State, Wanted, judge, payload_of
from tests.support.command import Program
from tests.support.kafka import Broker, create_topic
from tests.support.processes import ROOT
from tests.support.servers import RedisServer, start
from tests.support.soak import KEYS, STORES, Book, Clients, Load, now_ms

FILE = """
[stores.redis]
url = "redis://{redis}?journal=10000"
allowed_targets = ["kafka:of-redis", "kafka:of-box", "redis-list:of-redis-*"]

[stores.kafka]
url = "kafka://{kafka}/schedules?create_topic=true&partitions=4&history=history"
allowed_targets = ["kafka:of-kafka", "redis-list:of-kafka-*"]

[sinks.kafka]
url = "kafka://{kafka}"

[sinks.redis-list]
url = "redis-list://{redis}"

[[intake]]
from = "kafka://{kafka}/requests"
store = "redis"
allow = "of-box"

[limits]
probe_every = "0s"
probe_timeout = "2s"
drain = "2s"

[api]
read_only = false
rate = 0
"""
TOKEN = """
[[api.tokens]]
name = "{name}"
hash = "{hash}"
scopes = ["read", "schedule", "operate"]
"""
SLACK_S = 15.0
"""What a busy machine may add to what is promised."""
RED_S = 2 + 1 + SLACK_S
"""limits.probe_timeout, and how long an answer of /readyz stands."""
GREEN_S = 50.0
TOKENS_S = 2 + SLACK_S
"""So soon after the file has changed its tokens hold."""
EVENT_S = 2 + 20 + SLACK_S
"""So soon a page that follows ends once its token is valid no more: at its next event, which a store may delay."""
END_S = 2 + 30
"""limits.drain, and what docs/operate.md adds to it while a store is away."""
LIVE_S = 5.0
ANSWER_S = 40.0
"""So soon requests are answered (docs/api.md), but streams and pages that follow."""
CLOSED_S = 1.0
"""By then the service knows that its clients have gone."""
OURS = ("of-", "requests", "schedules", "history")
TOPICS = {"of-redis": "redis to kafka", "of-kafka": "kafka to kafka", "of-box": "box"}
MORE_TASKS, MORE_THREADS, MORE_FILES, MORE_KB = 3, 6, 5 + 2 * 7, 40_000
"""What a process may hold more at the end than before.

Threads that were needed once stay. So do connections to Redis: the pools of the store and of the lists grow from one to
eight each.
"""


class Stage:
    """The servers, the service, and what befalls them.

    Args:
        folder: Where the service runs.
        redis: A server of our own.
        broker: The same.

    Attributes:
        away_s: How long servers stay away, at most, once that was noticed.
    """

    away_s = 0.0

    def __init__(self, folder: Path, redis: RedisServer, broker: Broker) -> None:
        self._file, self.redis, self.broker = folder / "aiodelay.toml", redis, broker
        self._port, self._tokens = free_port(), 0
        self.base = f"http://127.0.0.1:{self._port}"
        self.book = Book(self._new_token())
        self._service: Program | None = None
        self.logged: Counter[str] = Counter()

    def _new_token(self) -> str:
        self._tokens += 1
        return f"token-{self._tokens}"

    def write(self, *tokens: str) -> None:
        """Write the service's file."""
        text = FILE.format(redis=f"127.0.0.1:{self.redis.port}", kafka=self.broker.bootstrap)
        self._file.write_text(text + "".join(TOKEN.format(name=each, hash=hash_token(each)) for each in tokens))
        self._file.chmod(0o600)

    # --- the service --------------------------------------------------------------------------------------

    @property
    def service(self) -> Program:
        """The process that runs now."""
        assert self._service is not None
        return self._service

    async def begin(self) -> None:
        """Start the service, and wait until it listens."""
        self._start()
        await asyncio.to_thread(self.service.err.wait_for, "listening on")
        self.book.away_since_ms = None

    def _start(self) -> None:
        program = ("-m", "tests.faults.programs.service", "serve", "--port", f"{self._port}")
        self._service = Program(*program, cwd=self._file.parent, environment={"PYTHONPATH": f"{ROOT}"})

    async def end(self, number: int) -> int:
        """End the service by a signal; return its exit code."""
        self.book.away_since_ms = now_ms()
        self.service.send(number)
        return await self._has_ended()

    async def _has_ended(self) -> int:
        code = await asyncio.to_thread(self.service.exit_code, END_S)
        lines = [json.loads(line) for line in self.service.err.seen if line.startswith("{")]
        self.logged.update(line["level"] for line in lines)
        faults = [line for line in lines if "exception" in line or "because of a bug in aiodelay" in line["message"]]
        self.book.answers.wrong += [f"logged: {line}" for line in faults]
        self.service.__exit__()
        return code

    def leave(self) -> None:
        """Leave nothing behind."""
        if self._service is not None:
            self._service.__exit__()
        self.redis.stop()
        self.broker.recover()
        with AdminClient({"bootstrap.servers": self.broker.bootstrap}) as admin:
            ours = [name for name in admin.list_topics(timeout=10).topics if name.startswith(OURS)]
            for deleted in admin.delete_topics(ours).values():
                deleted.result(10)

    async def held(self, before: dict[str, Any] | None) -> dict[str, Any]:
        """Return what the service holds when nobody asks it for anything.

        It may still write what came last: if it holds more than before, it is asked again, for up to `SLACK_S`.
        """
        ends_s = time.monotonic() + SLACK_S
        while True:
            await asyncio.sleep(CLOSED_S)  # nothing tells when it has noticed
            self.service.send(signal.SIGUSR1)
            held: dict[str, Any] = json.loads(await asyncio.to_thread(self.service.out.wait_for, "^{"))
            if before is None or not more_than(before, held) or time.monotonic() > ends_s:
                return held

    # --- what befalls -------------------------------------------------------------------------------------

    async def befall(self, what: str) -> None:
        """Have something happen, and wait until all is well again."""
        faults: dict[str, Callable[[], Awaitable[None]]] = {
            "redis killed": self._redis_killed,
            "redis stopped": self._redis_stopped,
            "broker killed": self._broker_killed,
            "broker stopped": self._broker_stopped,
            "service killed": self._service_killed,
            "service ended": self._service_ended,
            "service ended without redis": self._service_ended_without_redis,
            "tokens exchanged": self._tokens_exchanged,
        }
        begun_ms, place = now_ms(), len(self.book.faults)
        self.book.faults.append(Fault(what, begun_ms, NEVER))
        await faults[what]()
        await self._until(lambda answer: answer.status_code == 200, GREEN_S)
        self.book.faults[place] = Fault(what, begun_ms, now_ms())
        print(f"{what}: {(now_ms() - begun_ms) / 1000:.1f} s")

    async def _stays_away(self, store: str) -> None:
        await self._until(lambda answer: answer.status_code == 503 and f"{store}: " in answer.text, RED_S)
        await asyncio.sleep(random.uniform(0, self.away_s))  # a storm's pause

    async def _redis_killed(self) -> None:
        self.redis.kill()
        await self._stays_away("redis")
        await asyncio.to_thread(self.redis.start)

    async def _redis_stopped(self) -> None:
        os.kill(self.redis.pid, signal.SIGSTOP)
        await self._stays_away("redis")
        os.kill(self.redis.pid, signal.SIGCONT)

    async def _broker_killed(self) -> None:
        self.broker.kill()
        await self._stays_away("kafka")
        await asyncio.to_thread(self.broker.start)

    async def _broker_stopped(self) -> None:
        self.broker.freeze()
        await self._stays_away("kafka")
        self.broker.thaw()

    async def _service_killed(self) -> None:
        await self.end(signal.SIGKILL)
        await self.begin()

    async def _service_ended(self) -> None:
        assert await self.end(signal.SIGTERM) == 0
        await self.begin()

    async def _service_ended_without_redis(self) -> None:
        self.redis.kill()
        assert await self.end(signal.SIGTERM) == 0
        await self.begin()
        await asyncio.to_thread(self.service.err.wait_for, "trying again for up to")
        await asyncio.to_thread(self.redis.start)

    async def _tokens_exchanged(self) -> None:
        old, new = self.book.token, self._new_token()
        self.write(old, new)
        await self._until_answered(new, 200)
        self.book.token = new
        async with self._asking() as client:
            headers = {"authorization": f"Bearer {old}"}
            async with client.stream("GET", "/live", params={"view": "hour"}, headers=headers) as followed:
                assert followed.status_code == 200
                await self.book.until_old_requests_are_answered()
                self.write(new)
                await self._until_answered(old, 401)
                async with asyncio.timeout(EVENT_S):
                    async for _ in followed.aiter_bytes():
                        pass

    async def _until_answered(self, token: str, status: int) -> None:
        since_s = time.monotonic()
        async with self._asking() as client:
            while True:
                answer = await client.get("/v1/stores", headers={"authorization": f"Bearer {token}"})
                if answer.status_code == status:
                    return
                assert time.monotonic() - since_s < TOKENS_S, f"{token}: {answer.text}"
                await asyncio.sleep(0.05)

    # --- how it stands ------------------------------------------------------------------------------------

    def _asking(self) -> httpx.AsyncClient:
        """Return a client with a new connection for each request, as probes of Kubernetes have it.

        A kept connection may be closed by the service at the moment of the next request.
        """
        anew = httpx.Limits(max_keepalive_connections=0)
        return httpx.AsyncClient(base_url=self.base, timeout=2 * LIVE_S, trust_env=False, limits=anew)

    async def _until(self, is_so: Callable[[httpx.Response], bool], within_s: float) -> None:
        """Ask whether it is ready until the answer is as wanted."""
        since_s = time.monotonic()
        async with self._asking() as client:
            while not is_so(answer := await client.get("/readyz")):
                assert time.monotonic() - since_s < within_s, answer.text
                await asyncio.sleep(0.1)

    async def until_ready(self) -> None:
        """Wait until it is ready."""
        await self._until(lambda answer: answer.status_code == 200, GREEN_S)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Ask all the time whether it lives."""
        watching = asyncio.create_task(self._watch())
        yield
        watching.cancel()
        await asyncio.wait([watching])

    async def _watch(self) -> None:
        answers = self.book.answers
        async with self._asking() as client:
            while True:
                since_ms, since_s = now_ms(), time.monotonic()
                try:
                    answer = await client.get("/livez", headers={"connection": "close"})
                    answers.took("GET /livez", since_s, f"{answer.status_code}")
                except httpx.HTTPError as error:
                    if not self.book.was_away(since_ms):
                        answers.wrong.append(f"GET /livez: {error!r}")
                await asyncio.sleep(0.2)

    async def until_empty(self, clients: Clients, within_s: float) -> None:
        """Wait until nothing is left in the stores; nothing may have been given up."""
        since_s = time.monotonic()
        while True:
            answers = [await clients.ask("GET", "/v1/counts", store) for store in STORES]
            told = [answer.json()["lanes"] for answer in answers if answer is not None and answer.is_success]
            lanes = [lane for each in told for lane in each]
            left = sum(lane[state] for lane in lanes for state in ("scheduled", "overdue", "in_flight", "held"))
            if len(told) == len(answers) and not left:
                break
            assert time.monotonic() - since_s < within_s, f"left: {lanes}"
            await asyncio.sleep(0.2)
        assert not sum(lane["dead"] for lane in lanes), f"given up: {lanes}"

    async def delivered(self, expected: set[str]) -> list[Delivered]:
        """Return all that came out, once what is expected is there."""
        found = [each async for each in self._of_lists()]
        missing, ends_s = expected - {each.payload for each in found}, time.monotonic() + 20
        options = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
        async with AIOKafkaConsumer(*TOPICS, bootstrap_servers=self.broker.bootstrap, **options) as consumer:
            while time.monotonic() < ends_s:
                for batch in (await consumer.getmany(timeout_ms=200)).values():
                    for each in batch:
                        delivery_id = dict(each.headers)["aiodelay-delivery-id"].decode()
                        found.append(Delivered(TOPICS[each.topic], delivery_id, each.value.decode(), each.timestamp))
                        missing.discard(found[-1].payload)
                if not missing:
                    ends_s = min(ends_s, time.monotonic() + 1.5)
        return found

    async def _of_lists(self) -> AsyncIterator[Delivered]:
        async with Redis.from_url(self.redis.url) as redis:
            for store, n in product(STORES, range(KEYS)):
                for element in await redis.lrange(f"of-{store}-{n}", 0, -1):
                    assert isinstance(element, bytes)
                    read = decode_element(element, lane="redis-list")
                    record, at_ms = read.record, read.pushed_ms
                    assert at_ms is not None
                    delivery_id = f"{record.id}/{record.revision}/{record.due_ms}"
                    yield Delivered(f"{store} to list", delivery_id, record.envelope.payload.decode(), at_ms)


@pytest.fixture
def stage(tmp_path: Path, own_broker: Broker) -> Iterator[Stage]:
    stage = Stage(tmp_path, start(redis_programs()[0].program, "--appendfsync", "always"), own_broker)
    yield stage
    stage.leave()


async def soak(stage: Stage, *faults: Sequence[str], rate: float, far_ms: int, calm_s: float) -> None:
    """Put the service under load, time after time, and compare what it holds after the last time and the one before.

    Args:
        stage: Its servers run.
        faults: What befalls it each time; the last time, not itself.
        rate: Messages a second, of those that are scheduled one by one.
        far_ms: How far ahead messages are that will be changed.
        calm_s: How long nothing happens, before, between and after.
    """
    seed = random.randrange(1 << 30)
    print("seed", seed)
    for topic in (*TOPICS, "requests"):
        await create_topic(stage.broker.bootstrap, topic, 2)
    stage.write(stage.book.token)
    await stage.begin()
    await stage.until_ready()
    clients = Clients(stage.base, stage.book)
    load = Load(clients, stage.broker.bootstrap, rate=rate, far_ms=far_ms, rng=random.Random(seed))
    held: list[dict[str, Any]] = []
    async with stage.watched():
        for these in faults:
            async with clients.connected():
                async with load.running():
                    await asyncio.sleep(calm_s)  # as in calm
                    for what in these:
                        await stage.befall(what)
                        await asyncio.sleep(calm_s)  # as in calm
                await stage.until_empty(clients, far_ms / 1000 + 30)
            held.append(await stage.held(held[-1] if held else None))
    book = stage.book
    found = await stage.delivered(
        {payload_of(name, mine.expected) for name, mine in book.wanted.items() if mine.expected is not None}
    )
    assert await stage.end(signal.SIGTERM) == 0
    verdict = judge(book.wanted, found, book.faults)
    print(book.answers, verdict, f"logged: {dict(stage.logged)}", *held, sep="\n")
    assert not verdict.wrong + book.answers.wrong
    assert book.answers.slowest_s.pop("GET /livez") < LIVE_S + SLACK_S
    assert max(slowest for route, slowest in book.answers.slowest_s.items() if route not in ENDLESS) < ANSWER_S
    assert not more_than(*held[-2:])


ENDLESS = ("GET /live", "POST /v1/messages (stream)")


def more_than(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Compare what a process holds at two times, at which nobody asks it for anything; return what is too much."""
    tasks = [Counter(each["tasks"]) for each in (before, after)]
    more = {"tasks": tasks[1].total() - tasks[0].total()}
    more |= {name: after[name] - before[name] for name in ("threads", "files", "kb")}
    most = {"tasks": MORE_TASKS, "threads": MORE_THREADS, "files": MORE_FILES, "kb": MORE_KB}
    return [f"{more[name]} {name} more, {tasks[1] - tasks[0]}" for name in most if more[name] > most[name]]


@pytest.mark.nightly  # each fault by itself: tests/e2e/test_serve.py, test_serve_outages; all at once: test_nemesis
@pytest.mark.asyncio
@pytest.mark.timeout(600)
async def test_through_restarts_of_all_what_was_acknowledged_comes_as_promised(stage: Stage) -> None:
    restarts = ["service killed", "service ended"]
    await soak(stage, restarts, ["redis killed", "tokens exchanged", "broker killed"], rate=20, far_ms=5_000, calm_s=1)


@pytest.mark.storm
@pytest.mark.asyncio
@pytest.mark.timeout(3000)
async def test_through_many_restarts_of_all_what_was_acknowledged_comes_as_promised(stage: Stage) -> None:
    stage.away_s = 25
    restarts = ["service killed", "redis killed", "service ended", "service ended without redis"]
    others = ["redis killed", "tokens exchanged", "broker killed", "redis stopped", "broker stopped"]
    rounds = [random.sample(others, len(others)) for _ in range(2)]
    await soak(stage, restarts, others, [each for these in rounds for each in these], rate=30, far_ms=10_000, calm_s=5)


# --- what judges is judged --------------------------------------------------------------------------------


def came(version: int, at_ms: int, *, delivery_id: str = "m/1/1", lane: str = "redis to list") -> Delivered:
    return Delivered(lane, delivery_id, payload_of("m", version), at_ms)


CHANGED = [State(0, 9_000, 100, 200), State(1, 500, 200)]
CANCELLED = [State(0, 9_000, 100, 200), State(0, NEVER, 200)]
FAULT = Fault("redis killed", 400, 600)


@pytest.mark.parametrize(
    ("rule", "states", "found", "lane"),
    [
        ("", CHANGED, [came(1, 500)], "redis to list"),
        ("", CANCELLED, [], "redis to list"),
        ("", CHANGED, [came(1, 500, lane="box"), came(1, 501, lane="box")], "box"),
        ("S1", CHANGED, [came(1, 499)], "redis to list"),
        ("S2", CHANGED, [], "redis to list"),
        ("S3", CHANGED, [came(1, 500), came(1, 501)], "redis to list"),
        ("S4", CHANGED, [came(1, 500), came(0, 9_001)], "redis to list"),
        ("S4", CANCELLED, [came(0, 9_000)], "redis to list"),
        ("S6", CHANGED, [came(1, 500), came(1, 501, delivery_id="m/2/1")], "redis to list"),
        ("S8", CHANGED, [came(1, 500)._replace(payload="m/1 1/n")], "redis to list"),
        ("B1", CHANGED, [came(1, 9_000, lane="box"), came(1, 9_001, lane="box")], "box"),
        ("nobody asked", CHANGED, [came(1, 500), came(1, 500)._replace(payload=payload_of("n", 0))], "redis to list"),
    ],
)
def test_the_judge_finds_out(rule: str, states: list[State], found: list[Delivered], lane: str) -> None:
    mine = Wanted(lane, [*states], Counter({0: 1, 1: 1}))
    wrong = judge({"m": mine}, found, [FAULT]).wrong
    assert [line.startswith(rule) for line in wrong] == [True] * bool(rule)

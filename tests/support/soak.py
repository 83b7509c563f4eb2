"""Clients of a service, of every kind. They record their requests, the answers, and the time of each answer."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from tests.support.asked import LANES, NEVER, Fault, State, Wanted, payload_of
from tests.support.boxes import request
from tests.support.waiting import until

__all__ = ["KEYS", "STORES", "Answers", "Book", "Clients", "Load", "now_ms"]

AT_ONCE = 48
"""The most requests about a store that are under way at a time."""
STORES = ("redis", "kafka")
KEYS = 20
"""The number of lists that share the messages. A list takes 10,000."""
PAUSE_S = 0.3
"""The pause before a client repeats a request that was not carried out."""
GIVES_UP_S, NO_ANSWER_S = 180.0, 60.0
STORED = ("stored", "replaced", "repeated")
PROBLEMS = {
    404: {"MessageNotFoundError"},
    409: {"TooLateError"},
    503: {"StoreUnavailableError", "StoreBusyError", "ClosedError"},
    504: {"OutcomeUnknownError"},
}
"""Allowed answers besides success. Clients send no forbidden request and reach no limit."""
LOOKS = (
    *(
        "/v1/counts",
        "/v1/load",
        "/v1/forecast",
        "/v1/lateness",
        "/v1/journal",
        "/v1/messages?limit=50",
        "/v1/dead",
        "/v1/pauses",
    ),
    *("/v1/messages?text=7&limit=5", "/v1/messages?id=m7", "/v1/messages/m7"),
)
_PAGES = ("/", "/messages", "/messages?state=overdue", "/recurring", "/dead", "/sinks", "/messages/m7")
PAGES = {"redis": (*_PAGES, "/instances"), "kafka": _PAGES}


def now_ms() -> int:
    """Return the time in epoch ms."""
    return time.time_ns() // 1_000_000


def instant(ms: float) -> str:
    """Return an instant as text."""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")


@dataclass(slots=True)
class Answers:
    """Statistics of the answers.

    Attributes:
        counted: The number of answers, by route and status, or name of the problem.
        slowest_s: The time of the slowest answer, by route.
        wrong: One text for each wrong answer.
    """

    counted: Counter[str] = field(default_factory=Counter)
    slowest_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    wrong: list[str] = field(default_factory=list)

    def took(self, route: str, since_s: float, what: str) -> None:
        """Count an answer and its time."""
        self.counted[f"{route} {what}"] += 1
        self.slowest_s[route] = max(self.slowest_s[route], time.monotonic() - since_s)

    def __str__(self) -> str:
        routes = (f"{route}: at most {slowest:.2f} s" for route, slowest in sorted(self.slowest_s.items()))
        return "\n".join([*routes, f"{dict(sorted(self.counted.items()))}", *self.wrong[:50]])


class Book:
    """The data that all clients share: the requests, the faults of the service, and the valid token."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.wanted: dict[str, Wanted] = {}
        self.faults: list[Fault] = []
        self.away_since_ms: int | None = None
        """The time since which the service has been away; None: it should answer."""
        self.answers = Answers()
        self.asking: Counter[str] = Counter()
        """The number of requests under way, by token."""

    async def until_old_requests_are_answered(self) -> None:
        """Wait until no request with an older token is under way."""

        def are_answered() -> bool:
            return not any(n for token, n in self.asking.items() if token != self.token)

        await until(are_answered, "requests with an old token are answered", 2 * NO_ANSWER_S)

    def was_away(self, since_ms: int) -> bool:
        """Return whether the service has been away at any time since `since_ms`."""
        ended = (fault.ended_ms for fault in self.faults if fault.what.startswith("service"))
        return self.away_since_ms is not None or any(each >= since_ms for each in ended)


class Clients:
    """Sends requests to the service.

    Args:
        base: The address of the service, which stays the same.
        book: The book in which everything is recorded.
    """

    def __init__(self, base: str, book: Book) -> None:
        self._base, self.book = base, book
        self._slots = {store: asyncio.Semaphore(AT_ONCE) for store in STORES}

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Keep connections open during a block."""
        timeout = httpx.Timeout(NO_ANSWER_S, pool=None)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._base, limits=limits, timeout=timeout, trust_env=False) as self.http:
            yield

    async def ask(
        self,
        method: str,
        path: str,
        store: str,
        *,
        route: str = "",
        headers: Mapping[str, str] | None = None,
        **body: Any,  # noqa: ANN401 - arguments of httpx
    ) -> httpx.Response | None:
        """Send a request about a store. Return the answer, or None if there was none. Record what is wrong with it.

        Args:
            method: The HTTP method.
            path: The path in the API or the page.
            store: The name of the store in the service.
            route: The route under which the answer is counted; the path by default.
            headers: Headers in addition to the token.
            body: `json` or `content`.
        """
        route = f"{method} {route or path.partition('?')[0]}"
        async with self._slots[store]:
            since_ms, since_s, token = now_ms(), time.monotonic(), self.book.token
            headers = {"authorization": f"Bearer {token}", **(headers or {})}
            url = httpx.URL(path).copy_add_param("store", store)
            self.book.asking[token] += 1
            try:
                answer = await self.http.request(method, url, headers=headers, **body)
            except httpx.HTTPError as error:
                self.book.answers.took(route, since_s, type(error).__name__)
                if not self.book.was_away(since_ms):
                    self.book.answers.wrong.append(f"{route}: {error!r} after {time.monotonic() - since_s:.1f} s")
                return None
            finally:
                self.book.asking[token] -= 1
        name = "" if answer.is_success else _problem(answer)
        self.book.answers.took(route, since_s, name or str(answer.status_code))
        if not (answer.is_success or answer.is_redirect or name in PROBLEMS.get(answer.status_code, ())):
            self.book.answers.wrong.append(f"{now_ms()} {route}: {answer.status_code} {answer.text[:300]}")
        return answer

    async def until_carried_out(
        self, send: Callable[[], Awaitable[httpx.Response | None]]
    ) -> tuple[httpx.Response, bool]:
        """Repeat a request until it is surely carried out, or finally refused.

        Returns:
            The last answer, and whether an earlier attempt may have been carried out.
        """
        ends_s, in_doubt = time.monotonic() + GIVES_UP_S, False
        while True:
            answer = await send()
            if answer is not None and answer.status_code not in (503, 504, 500):
                return answer, in_doubt
            in_doubt |= answer is None or answer.status_code != 503
            told = "nothing" if answer is None else answer.text
            assert time.monotonic() < ends_s, f"not carried out in {GIVES_UP_S} s; the last answer is {told}"
            await asyncio.sleep(PAUSE_S)


def _problem(answer: httpx.Response) -> str:
    """Return the name of a problem, from the API or a page."""
    if answer.headers.get("content-type") == "application/problem+json":
        return str(answer.json()["error"])
    found = re.search(r'<p class="quiet mono">(\w+)</p>', answer.text)
    return found[1] if found else ""


class Load:
    """All the work that clients do at the same time.

    Args:
        clients: The clients that send the requests.
        kafka: The broker for the requests to the delay box.
        rate: Messages per second that clients schedule one by one. The box gets half as many, and clients read the
            service half as often.
        far_ms: How far ahead the messages are due that clients will change.
        rng: The random numbers that decide what clients do.
    """

    def __init__(self, clients: Clients, kafka: str, *, rate: float, far_ms: int, rng: random.Random) -> None:
        self._clients, self._kafka, self._book = clients, kafka, clients.book
        self._rate, self._far_ms, self._rng = rate, far_ms, rng
        self._numbers = itertools.count(1)
        self._has_ended = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the load during a block. At the end, finish the work that has begun."""
        self._has_ended.clear()
        async with asyncio.TaskGroup() as tasks:
            for each in (self._schedule_singly, self._schedule_in_streams, self._fill_box, self._look):
                tasks.create_task(each())
            for store in STORES:
                tasks.create_task(self._view(store))
            try:
                yield
            finally:
                self._has_ended.set()

    async def _pause(self, seconds: float) -> bool:
        """Wait. Return whether to go on."""
        try:
            async with asyncio.timeout(seconds):
                await self._has_ended.wait()
        except TimeoutError:
            return True
        return False

    # --- who schedules ------------------------------------------------------------------------------------

    async def _schedule_singly(self) -> None:
        kinds = (self._plain, self._plain, self._keyed, self._replaced, self._cancelled, self._moved, self._fired)
        lanes = [name for name in LANES if name != "box"]
        async with asyncio.TaskGroup() as tasks:
            while await self._pause(self._rng.expovariate(self._rate)):
                tasks.create_task(self._rng.choice(kinds)(self._new(self._rng.choice(lanes))))

    def _new(self, lane: str) -> str:
        name = f"m{next(self._numbers)}"
        self._book.wanted[name] = Wanted(lane)
        return name

    def _soon_ms(self) -> int:
        return now_ms() + self._rng.randrange(int(self._far_ms / 2))

    def _later_ms(self) -> int:
        return now_ms() + self._far_ms

    def _message(self, name: str, version: int, due_ms: int) -> dict[str, object]:
        to = LANES[self._book.wanted[name].lane].to.format(int(name[1:]) % KEYS)
        return {"to": to, "payload": payload_of(name, version), "at": instant(due_ms), "key": name}

    async def _put(self, name: str, version: int, due_ms: int, *, key: str = "") -> None:
        """Store a version of a message."""
        mine, message = self._book.wanted[name], self._message(name, version, due_ms)
        store, headers = LANES[mine.lane].store, {"idempotency-key": key} if key else {}
        body = message if version or key else message | {"id": name}

        async def send() -> httpx.Response | None:
            mine.sent[version] += 1
            method, path = ("PUT", f"/v1/messages/{name}") if version else ("POST", "/v1/messages")
            route = "/v1/messages/{id}" if version else ""
            answer = await self._clients.ask(method, path, store, route=route, headers=headers, json=body)
            mine.sent[version] -= answer is not None and answer.status_code == 503
            return answer

        answer, _ = await self._clients.until_carried_out(send)
        if answer.is_success and answer.json()["outcome"] in STORED:
            mine.becomes(version, due_ms, now_ms())
        else:
            self._book.answers.wrong.append(f"{message} was answered {answer.text}")

    async def _plain(self, name: str) -> None:
        await self._put(name, 0, self._soon_ms())

    async def _keyed(self, name: str) -> None:
        self._book.wanted[name].is_keyed = True
        await self._put(name, 0, self._soon_ms(), key=name)

    async def _replaced(self, name: str) -> None:
        await self._put(name, 0, self._later_ms() if self._rng.random() < 0.7 else self._soon_ms())
        await asyncio.sleep(self._rng.uniform(0, 3))  # the client pauses between two requests
        await self._put(name, 1, self._soon_ms())

    async def _cancelled(self, name: str) -> None:
        await self._put(name, 0, self._later_ms())
        await asyncio.sleep(self._rng.uniform(0, 3))  # the client pauses between two requests
        answer, in_doubt = await self._change(name, "DELETE", "", None)
        mine = self._book.wanted[name]
        if answer.is_success and answer.json()["outcome"] in ("cancelled", "recorded"):
            mine.becomes(0, NEVER, now_ms())
        else:  # in flight: delivered now or never; not found: an earlier attempt may have cancelled it
            mine.is_in_doubt |= answer.is_success or (in_doubt and answer.status_code == 404)

    async def _moved(self, name: str) -> None:
        await self._put(name, 0, self._later_ms())
        await asyncio.sleep(self._rng.uniform(0, 3))  # the client pauses between two requests
        due_ms = self._soon_ms()
        self._judge_move(name, due_ms, *await self._change(name, "POST", "/reschedule", {"at": instant(due_ms)}))

    async def _fired(self, name: str) -> None:
        await self._put(name, 0, self._later_ms())
        await asyncio.sleep(self._rng.uniform(0, 3))  # the client pauses between two requests
        due_ms = now_ms()
        self._judge_move(name, due_ms, *await self._change(name, "POST", "/fire", None))

    async def _change(self, name: str, method: str, action: str, body: object) -> tuple[httpx.Response, bool]:
        store = LANES[self._book.wanted[name].lane].store
        options: dict[str, Any] = {} if body is None else {"json": body}
        path, route = f"/v1/messages/{name}{action}", f"/v1/messages/{{id}}{action}"
        return await self._clients.until_carried_out(
            lambda: self._clients.ask(method, path, store, route=route, **options)
        )

    def _judge_move(self, name: str, due_ms: int, answer: httpx.Response, in_doubt: bool) -> None:
        mine = self._book.wanted[name]
        if answer.is_success and answer.json()["outcome"] in ("rescheduled", "fired"):
            mine.becomes(0, due_ms, now_ms())
        elif in_doubt:  # an earlier attempt may have moved it, and it may have ended since
            mine.states.append(State(0, due_ms, now_ms()))

    # --- streams ------------------------------------------------------------------------------------------

    async def _schedule_in_streams(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while await self._pause(2):
                lane = self._rng.choice([name for name in LANES if name != "box"])
                names = [self._new(lane) for _ in range(self._rng.randrange(5, 60))]
                tasks.create_task(self._stream(lane, names, is_keyed=self._rng.random() < 0.5))

    async def _stream(self, lane: str, names: Sequence[str], *, is_keyed: bool) -> None:
        """Send lines until each is stored. A stream with a key sends all of its lines again each time."""
        dues = {name: self._soon_ms() for name in names}
        left, ends_s = list(names), time.monotonic() + GIVES_UP_S
        for name in names:
            self._book.wanted[name].is_keyed = is_keyed
        headers = {"content-type": "application/x-ndjson"} | ({"idempotency-key": names[0]} if is_keyed else {})
        while left:
            assert time.monotonic() < ends_s, f"{left} were not stored"
            sent = list(names) if is_keyed else left
            lines = [self._message(name, 0, dues[name]) | ({} if is_keyed else {"id": name}) for name in sent]
            content = "\n".join(map(json.dumps, lines))
            for name in sent:
                self._book.wanted[name].sent[0] += 1
            store, route = LANES[lane].store, "/v1/messages (stream)"
            answer = await self._clients.ask(
                "POST", "/v1/messages", store, route=route, content=content, headers=headers
            )
            left = self._not_stored(sent, dues, answer)
            await asyncio.sleep(PAUSE_S if left else 0)

    def _not_stored(self, sent: Sequence[str], dues: Mapping[str, int], answer: httpx.Response | None) -> list[str]:
        if answer is None or not answer.is_success:
            if answer is not None and answer.status_code == 503:
                for name in sent:
                    self._book.wanted[name].sent[0] -= 1
            return list(sent)
        left = set(sent)
        *lines, totals = map(json.loads, answer.text.splitlines())
        for line in lines:
            name = sent[line["line"] - 1]
            mine, problem = self._book.wanted[name], line.get("problem")
            if problem is None and line["scheduled"]["outcome"] in STORED:
                left.discard(name)
                mine.becomes(0, dues[name], now_ms())
            elif problem is not None and problem["error"] in PROBLEMS.get(problem["status"], ()):
                mine.sent[0] -= problem["status"] == 503
                self._book.answers.counted[f"line {problem['error']}"] += 1
            else:
                self._book.answers.wrong.append(f"line of {name}: {line}")
        if totals != {"stored": len(sent) - len(left), "refused": len(left)}:
            self._book.answers.wrong.append(f"{len(left)} of {len(sent)} lines were not stored; the answer: {totals}")
        return [name for name in sent if name in left]

    # --- the box ------------------------------------------------------------------------------------------

    async def _fill_box(self) -> None:
        producer = AIOKafkaProducer(bootstrap_servers=self._kafka, acks="all", enable_idempotence=True)
        async with producer, asyncio.TaskGroup() as tasks:
            while await self._pause(2 / self._rate):
                tasks.create_task(self._request(producer, self._new("box")))

    async def _request(self, producer: AIOKafkaProducer, name: str) -> None:
        mine, due_ms = self._book.wanted[name], self._soon_ms()
        mine.sent[0], mine.is_keyed = 1, True
        value = request("of-box", payload_of(name, 0), at=instant(due_ms))
        mine.becomes(0, due_ms, now_ms())
        try:
            await producer.send_and_wait("requests", value)
        except KafkaError:
            mine.is_in_doubt = True

    # --- who looks ----------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Read the API and the page, one request after the other."""
        while await self._pause(2 / self._rate):
            store = self._rng.choice(STORES)
            paths = self._rng.choice((LOOKS, PAGES[store]))
            await self._clients.ask("GET", self._rng.choice(paths), store)

    async def _view(self, store: str) -> None:
        """Follow the page's stream of events, as a browser does. When the stream ends, connect again."""
        while await self._pause(0.2):
            since_ms, since_s = now_ms(), time.monotonic()
            headers = {"authorization": f"Bearer {self._book.token}"}
            try:
                await self._follow(store, headers)
            except httpx.HTTPError as error:
                self._book.answers.took("GET /live", since_s, type(error).__name__)
                if not self._book.was_away(since_ms):
                    self._book.answers.wrong.append(f"GET /live: {error!r}")

    async def _follow(self, store: str, headers: Mapping[str, str]) -> None:
        """Follow the stream until it ends, or until another token is valid."""
        token, params = self._book.token, {"store": store, "view": "hour"}
        async with self._clients.http.stream("GET", "/live", params=params, headers=dict(headers)) as answer:
            if answer.status_code != 200:
                await answer.aread()
                self._book.answers.wrong.append(f"GET /live: {answer.status_code} {answer.text[:300]}")
                return
            last_s = time.monotonic()
            async for line in answer.aiter_lines():
                if line:
                    self._book.answers.took("GET /live", last_s, "event")
                    last_s = time.monotonic()
                if self._has_ended.is_set() or self._book.token != token:
                    return

"""Bad inputs over HTTP: each gets the named error of the library, and no command reaches the store."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from aiodelay import Scheduler
from aiodelay.service import admin
from tests.support.api import ALL, problem_of, serving_api
from tests.support.bad_inputs import BAD_MESSAGES, GOOD_MESSAGE, NO_MESSAGES, changed
from tests.support.clear_errors import PYTHON_WORDS, SECRETS, RecordingStore

pytestmark = pytest.mark.asyncio

NDJSON = {"content-type": "application/x-ndjson"}
LATER = "2027-01-01T00:00:00Z"
NAIVE = "2027-01-01T00:00:00"
WRONG: tuple[Any, ...] = (
    *(None, True, 7, -1, 1.5, 10**18, 1e300, "", "x", "-1s", NAIVE, "0001-01-01T00:00:00+14:00"),
    *("9999-12-31T23:59:59.9999999Z", [], [None], [1, "a"], {}, {"x": None}, {"x": 1}),
)
MESSAGES: list[dict[str, Any]] = [
    {"to": "handler:work", "payload": "x", "delay": "1s", "id": "a", "key": "k", "headers": {"a": {"base64": "AA=="}}},
    {"to": "handler:work", "payload_base64": "AA==", "at": LATER, "key_base64": "AA==", "conflict": {"newer": 7}},
    {"to": "elsewhere:x", "payload": None, "key": "k", "delay": "1s", "conflict": {"if_revision": 7}},
    {
        "to": "handler:work",
        "payload": {},
        "late": {"drop": "1s"},
        "every": {"interval": "1h", "start": LATER, "missed": "all", "overlap": "skip"},
    },
    {
        "to": "handler:work",
        "payload": [],
        "late": {"dead_letter": "1s"},
        "conflict": "keep",
        "every": {"cron": "0 9 * * mon", "tz": "Europe/Paris"},
    },
]
LETTERS = [{"letters": [{"id": "a", "revision": 1}]}]
BODIES: dict[str, list[dict[str, Any]]] = {
    "post /v1/messages": MESSAGES[:1],  # all of them as lines
    "put /v1/messages/{id}": MESSAGES[:1],
    "post /v1/messages/{id}/reschedule": [{"delay": "1s"}, {"at": LATER}],
    "post /v1/pause": [{"what": "work"}],
    "post /v1/resume": [{"what": "work"}],
    "post /v1/limits": [{"what": "work", "limits": [{"key": "customer", "concurrency": 2, "rate": "5/min"}]}],
    "post /v1/dead/redrive": LETTERS,
    "post /v1/dead/purge": LETTERS,
    "post /v1/bulk": [
        {"action": "reschedule", "at": LATER, "messages": {"lane": ["work"], "state": "held", "due_from": LATER}},
        {
            "action": "reschedule",
            "delay": "1s",
            "messages": {"due_to": LATER, "address": "x", "type": "a", "text": "b"},
        },
        {"action": "purge", "dead": {"lane": ["work"], "reason": "rejected", "dead_from": LATER, "dead_to": LATER}},
        {"action": "cancel", "series": True},
    ],
}
"""Good bodies of each operation that takes one."""
STATUS = {"PayloadTooLargeError": 413, "TargetNotAllowedError": 403}


@asynccontextmanager
async def api() -> AsyncIterator[tuple[httpx.AsyncClient, RecordingStore]]:
    """The API over a store that notes what reaches it."""
    store = RecordingStore()
    targets = ["handler:work", "elsewhere:x"]
    async with (
        Scheduler(store, dispatch=False) as scheduler,
        serving_api(scheduler, **(ALL | {"allowed_targets": targets})) as client,
    ):
        yield client, store


@asynccontextmanager
async def near_api() -> AsyncIterator[httpx.AsyncClient]:
    """The API without a network, for many requests."""
    async with Scheduler(RecordingStore(), dispatch=False) as scheduler:
        app = admin(scheduler, read_only=False, allowed_targets=["handler:work", "elsewhere:x"])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            yield client


async def test_what_is_wrong_with_a_message_is_said_by_its_name_on_every_way_in() -> None:
    async with api() as (client, store):
        for change, error, field, allowed in BAD_MESSAGES:
            status = STATUS.get(error, 422)
            body, plain = changed(change), {"content-type": "application/json"}
            problems = [problem_of(await client.post("/v1/messages", content=body, headers=plain), status, error)]
            lines = await client.post("/v1/messages", content=body, headers=NDJSON)
            first, last = [json.loads(line) for line in lines.text.splitlines()]
            assert last == {"stored": 0, "refused": 1}
            problems.append(first["problem"])
            if "id" not in change:
                put = await client.put("/v1/messages/order-7", content=body, headers=plain)
                problems.append(problem_of(put, status, error))
            for problem in problems:
                assert (problem["type"], problem["allowed"]) == (problems[0]["type"], problems[0]["allowed"])
                assert problem["field"] == field, change
                assert allowed in problem["allowed"], problem
                assert problem["value"]
            assert not [secret for secret in SECRETS if secret in json.dumps(problems)], problems
        assert store.applied == []


async def test_what_is_no_message_at_all_is_refused_too() -> None:
    async with api() as (client, store):
        for text in NO_MESSAGES:
            for method, path in (("POST", "/v1/messages"), ("PUT", "/v1/messages/x")):
                answer = await client.request(method, path, content=text, headers={"content-type": "application/json"})
                assert answer.status_code == 422, (text[:50], answer.text)
                assert answer.json()["allowed"]
            lines = await client.post("/v1/messages", content=text, headers=NDJSON)
            assert lines.status_code == 200
            assert json.loads(lines.text.splitlines()[-1])["stored"] == 0
        assert store.applied == []


async def test_an_idempotency_key_is_no_longer_than_it_may_be() -> None:
    async with api() as (client, store):
        for key in ("", "x" * 256, "a\tb"):
            answer = await client.post("/v1/messages", json=GOOD_MESSAGE, headers={"idempotency-key": key})
            problem_of(answer, 422, "IdempotencyKeyError")
        assert store.applied == []


async def test_bodies_of_other_routes_are_read_strictly() -> None:
    async with api() as (client, store):
        await client.post("/v1/messages", json=GOOD_MESSAGE)
        store.applied.clear()
        for path, good in (
            ("/v1/messages/order-7/reschedule", {"delay": "1s"}),
            ("/v1/pause", {"what": "work"}),
            ("/v1/resume", {"what": "work"}),
            ("/v1/dead/redrive", {"letters": [{"id": "x", "revision": 1}]}),
            ("/v1/dead/purge", {"letters": [{"id": "x", "revision": 1}]}),
            ("/v1/bulk", {"action": "cancel"}),
        ):
            name = next(iter(good))
            bodies: tuple[Any, ...] = (good | {"more": 1}, {name: 7}, [], "x")
            for body in bodies:
                answer = await client.post(path, json=body)
                assert answer.status_code == 422, (path, body, answer.text)
                assert answer.json()["allowed"]
            for text in (b"", b"{", b"[" * 100_000, b"\xff"):
                answer = await client.post(path, content=text, headers={"content-type": "application/json"})
                problem_of(answer, 422, "InputError")
        for when in ({}, {"at": LATER, "delay": "1s"}, {"at": "x"}, {"delay": "-1s"}):
            answer = await client.post("/v1/messages/order-7/reschedule", json=when)
            problem_of(answer, 422, "ScheduleTimeError")
        assert store.applied == []


async def test_values_of_queries_are_read_strictly() -> None:
    async with api() as (client, _):
        for path, error in (
            ("/v1/messages?state=lost", "InputError"),
            ("/v1/messages?due_from=2027-01-01", "ScheduleTimeError"),
            ("/v1/messages?due_to=soon", "ScheduleTimeError"),
            ("/v1/messages?after=x", "InputError"),
            ("/v1/messages?after=%FF", "InputError"),
            ("/v1/messages?after=" + "A" * 2_001, "ParameterError"),
            ("/v1/messages?limit=0", "ParameterError"),
            ("/v1/messages?limit=1e3", "ParameterError"),
            ("/v1/messages?id=", "MessageIdError"),
            ("/v1/messages?lane=a%20b", "ConfigurationError"),
            ("/v1/messages/", "MessageIdError"),
            ("/v1/dead?after=x", "InputError"),
            ("/v1/dead/x/y", "ParameterError"),
            ("/v1/load?bucket=0s", "ConfigurationError"),
            ("/v1/load?bucket=1", "ConfigurationError"),
            ("/v1/load?buckets=1001", "ParameterError"),
            ("/v1/forecast?span=0s", "ConfigurationError"),
            ("/v1/forecast?rate=0/s", "ConfigurationError"),
            ("/v1/forecast?spread=5", "ConfigurationError"),
            ("/v1/forecast?within=", "ConfigurationError"),
            ("/v1/journal?after=-1", "ParameterError"),
            ("/schedules?limit=0", "ParameterError"),
        ):
            problem = problem_of(await client.get(path), 422, error)
            assert problem["field"], path
            assert problem["allowed"], path
        for method, path in (("GET", "/v1/nothing"), ("POST", "/v1/messagesx")):
            problem_of(await client.request(method, path), 404, "NotFoundError")
        for method, path in (("PATCH", "/v1/messages/x"), ("DELETE", "/v1/messages"), ("POST", "/v1/counts")):
            refused = await client.request(method, path)
            problem_of(refused, 405, "MethodNotAllowedError")
            assert refused.headers["allow"]


def spoiled(good: Any) -> Iterator[Any]:  # noqa: ANN401 - JSON
    """Yield a JSON value with each of its parts, in turn, left out or replaced by each wrong value."""
    yield from WRONG
    if isinstance(good, dict):
        yield good | {"more": 1}
        for name, part in good.items():
            yield {each: value for each, value in good.items() if each != name}
            yield from (good | {name: each} for each in spoiled(part))
    elif isinstance(good, list):
        yield from ([each] for part in good for each in spoiled(part))


def told_in_python(problem: dict[str, Any]) -> bool:
    return any(PYTHON_WORDS.search(problem.get(each, "")) for each in ("field", "value", "allowed", "detail"))


def operations_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the operations of an OpenAPI document, by method and path."""
    return {
        f"{method} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


async def test_no_error_of_a_bad_body_speaks_python() -> None:
    async with near_api() as client:
        operations = operations_of((await client.get("/openapi.json")).json())
        assert {name for name, each in operations.items() if "requestBody" in each} == BODIES.keys()
        problems = []
        for operation, goods in BODIES.items():
            method, path = operation.replace("{id}", "order-7").split()
            for body in (each for good in goods for each in spoiled(good)):
                answer = await client.request(method, path, json=body)
                if answer.status_code == 422:
                    problems.append((operation, body, answer.json()))
        bodies = [each for good in MESSAGES for each in spoiled(good)]
        text = b"\n".join(json.dumps(each).encode() for each in bodies)
        lines = await client.post("/v1/messages", content=text, headers=NDJSON)
        answers = [json.loads(line) for line in lines.text.splitlines()]
        problems += [("line", bodies[each["line"] - 1], each["problem"]) for each in answers if "problem" in each]
    assert len(problems) > 1_000
    assert [each for each in problems if told_in_python(each[2])] == []


async def test_a_closed_scheduler_is_told_of_without_its_context_manager() -> None:
    async with serving_api(Scheduler(RecordingStore()), **ALL) as client:
        problem = problem_of(await client.get("/v1/counts"), 503, "ClosedError")
    assert problem["detail"] == "scheduler is not open yet"


async def test_no_error_of_a_bad_query_speaks_python() -> None:
    async with near_api() as client:
        operations = operations_of((await client.get("/openapi.json")).json())
        problems = []
        for operation, described in operations.items():
            method, path = operation.split()
            path = re.sub(r"\{revision\}", "1", re.sub(r"\{\w+\}", "x", path))
            names = [each["name"] for each in described.get("parameters", []) if each["in"] == "query"]
            for query in ({name: value} for name in names for value in ("", "-1", "x y", NAIVE, "9" * 30)):
                answer = await client.request(method, path, params=query)
                if answer.status_code == 422:
                    problems.append((operation, query, answer.json()))
    assert len(problems) > 50
    assert [each for each in problems if told_in_python(each[2])] == []

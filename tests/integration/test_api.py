"""The HTTP API, route by route, on real stores and a real server."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from aiodelay import Reject, Retry, Scheduler
from aiodelay.core.ids import new_op
from aiodelay.core.values import (
    At,
    Cancel,
    Command,
    Dead,
    Demand,
    Envelope,
    Outcome,
    Put,
    Refused,
    SourcePosition,
    Stored,
)
from aiodelay.memory import MemoryStore
from aiodelay.redis import RedisFanout, RedisLog
from aiodelay.service import ApiLimits, admin
from aiodelay.service.api import bulk, models, plans
from aiodelay.service.health import PROBE
from tests.support.api import ALL, client_of, problem_of, serving_api, serving_app
from tests.support.stores import SHARED_STORES, empty_store
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

NDJSON = {"content-type": "application/x-ndjson"}
D = [f"d{i}" for i in range(6)]


@pytest.fixture(scope="module", params=SHARED_STORES, ids=str)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with empty_store(request.param, tmp_path_factory.mktemp("api")) as url:
        yield url


@pytest.fixture
def url(server: str) -> str:
    return f"{server}{'&' if '?' in server else '?'}journal=1000"


def scheduler_of(url: str, **options: Any) -> Scheduler:  # noqa: ANN401 - as of what they go to
    return Scheduler(url, namespace=f"n{uuid4().hex[:12]}", **options)


@asynccontextmanager
async def quiet(url: str, **options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Scheduler]]:  # noqa: ANN401 - as of what they go to
    """An API over a scheduler that delivers nothing."""
    async with (
        scheduler_of(url, dispatch=False) as scheduler,
        serving_api(scheduler, **(ALL | options)) as client,
    ):
        yield client, scheduler


def work(**changed: Any) -> dict[str, Any]:  # noqa: ANN401 - as of what they go to
    return {"to": "handler:work", "payload": "p", "delay": "1h"} | changed


async def fill(client: httpx.AsyncClient, ids: list[str], **changed: Any) -> None:  # noqa: ANN401 - as of what they go to
    lines = [json.dumps(work(id=each, **changed)) for each in ids]
    answer = await client.post("/v1/messages", content="\n".join(lines), headers=NDJSON)
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.text.splitlines()[-1]) == {"stored": len(ids), "refused": 0}


async def test_a_message_is_scheduled_seen_replaced_moved_fired_and_cancelled(url: str) -> None:
    async with quiet(url) as (client, scheduler):
        stored = await client.post("/v1/messages", json=work(id="a/b", key="k", headers={"h": "1"}))
        assert stored.status_code == 201
        assert (stored.json()["id"], stored.json()["outcome"]) == ("a/b", "stored")
        found = (await client.get("/v1/messages/a%2Fb")).json()
        assert (found["id"], found["payload"], found["key"], found["headers"]) == ("a/b", "p", "k", {"h": "1"})
        assert (found["state"], found["due"]) == ("scheduled", stored.json()["due"])
        replaced = await client.put("/v1/messages/a%2Fb", json=work(payload={"x": [1.50]}))
        assert (replaced.status_code, replaced.json()["outcome"]) == (200, "replaced")
        snapshot = await scheduler.get("a/b")
        assert snapshot is not None
        assert snapshot.record.envelope.payload == b'{"x":[1.5]}'
        at = (datetime.now(UTC).replace(microsecond=0) + timedelta(hours=5)).isoformat()
        moved = await client.post("/v1/messages/a%2Fb/reschedule", json={"at": at})
        assert moved.json() == {"id": "a/b", "outcome": "rescheduled"}
        assert (await client.get("/v1/messages/a%2Fb")).json()["due"][:19] == at[:19]
        assert (await client.post("/v1/messages/a%2Fb/fire")).json() == {"id": "a/b", "outcome": "fired"}
        assert (await client.get("/v1/messages/a%2Fb")).json()["state"] == "overdue"
        assert (await client.delete("/v1/messages/a%2Fb")).json() == {"id": "a/b", "outcome": "cancelled"}
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/fire")):
            problem_of(await client.request(method, f"/v1/messages/a%2Fb{path}"), 404, "MessageNotFoundError")
        again = await client.post("/v1/messages/a%2Fb/reschedule", json={"delay": "1s"})
        problem_of(again, 404, "MessageNotFoundError")


async def test_bytes_come_out_as_they_went_in(url: str) -> None:
    async with quiet(url) as (client, scheduler):
        payload, key = bytes(range(256)), b"\xff\x00"
        given = {
            "to": "handler:work",
            "payload_base64": base64.b64encode(payload).decode(),
            "key_base64": base64.b64encode(key).decode(),
            "headers": {"h": {"base64": "/w=="}},
            "delay": "1h",
            "id": "b",
        }
        assert (await client.post("/v1/messages", json=given)).status_code == 201
        snapshot = await scheduler.get("b")
        assert snapshot is not None
        envelope = snapshot.record.envelope
        assert (envelope.payload, envelope.key, envelope.headers) == (payload, key, {"h": b"\xff"})
        found = (await client.get("/v1/messages/b")).json()
        assert {name: found[name] for name in ("payload_base64", "key_base64", "headers")} == {
            name: given[name] for name in ("payload_base64", "key_base64", "headers")
        }


async def test_of_several_conflicts_each_answers_as_in_the_library(url: str) -> None:
    async with quiet(url) as (client, _):
        for conflict, status, outcome in (
            ("error", 201, "stored"),
            ("replace", 201, "replaced"),
            ("keep", 200, "kept"),
            ({"newer": 7}, 201, "replaced"),
            ({"newer": 7}, 200, "outdated"),
            ("newer:8", 201, "replaced"),
            ("earlier", 200, "kept"),
            ("throttle:1m:last", 201, "replaced"),
            ("append:50", 201, "replaced"),
            ("throttle:1m", 200, "kept"),
        ):
            answer = await client.post("/v1/messages", json=work(id="c", conflict=conflict))
            assert (answer.status_code, answer.json()["outcome"]) == (status, outcome), conflict
        problem_of(await client.post("/v1/messages", json=work(id="c", conflict="error")), 409, "DuplicateIdError")


async def test_recurring_messages_and_late_policies_are_kept(url: str) -> None:
    async with quiet(url) as (client, _):
        rule = {"cron": "0 9 * * mon", "tz": "Europe/Paris"}
        given = {"to": "handler:work", "payload": "", "every": rule, "id": "r", "late": {"drop": "15m"}}
        assert (await client.post("/v1/messages", json=given)).status_code == 201
        found = (await client.get("/v1/messages/r")).json()
        assert (found["every"]["cron"], found["every"]["tz"]) == ("0 9 * * MON", "Europe/Paris")
        assert found["late"] == {"drop": "15m"}


async def test_a_repeated_idempotency_key_stores_once_also_after_the_end(url: str) -> None:
    async with quiet(url) as (client, scheduler):
        key = {"idempotency-key": "order 7"}
        given = work()
        first = await client.post("/v1/messages", json=given, headers=key)
        again = await client.post("/v1/messages", json=given, headers=key)
        assert (first.status_code, again.status_code) == (201, 200)
        assert again.json() == first.json() | {"outcome": "repeated"}
        await scheduler.cancel(first.json()["id"])
        late = await client.post("/v1/messages", json=given, headers=key)
        assert (late.status_code, late.json()) == (200, again.json() | {"due": None, "revision": 0})
        assert [each async for each in scheduler.pending()] == []
        other = await client.post("/v1/messages", json=given, headers={"idempotency-key": "order 8"})
        assert other.status_code == 201


async def test_the_id_of_the_probe_message_is_refused(url: str) -> None:
    async with quiet(url) as (client, scheduler):
        given = work(id=PROBE)
        problem_of(await client.post("/v1/messages", json=given), 422, "MessageIdError")
        problem_of(await client.put(f"/v1/messages/{PROBE}", json=given), 422, "MessageIdError")
        line = await client.post("/v1/messages", content=json.dumps(given), headers=NDJSON)
        assert json.loads(line.text.splitlines()[0])["problem"]["error"] == "MessageIdError"
        assert [each async for each in scheduler.pending()] == []


@pytest.mark.parametrize("conflict", ["keep", "error", "earlier", "append", "throttle:1h", "newer:7"])
async def test_an_idempotency_key_without_an_id_excludes_conflict(url: str, conflict: str) -> None:
    async with quiet(url) as (client, scheduler):
        key = {"idempotency-key": "order 7"}
        answer = await client.post("/v1/messages", json=work(conflict=conflict), headers=key)
        assert problem_of(answer, 422, "IdempotencyKeyError")["field"] == "conflict"
        lines = await client.post("/v1/messages", content=json.dumps(work(conflict=conflict)), headers=NDJSON | key)
        assert json.loads(lines.text.splitlines()[0])["problem"]["error"] == "IdempotencyKeyError"
        assert [each async for each in scheduler.pending()] == []
        own = await client.post("/v1/messages", json=work(conflict=conflict, id="own"), headers=key)
        assert own.json()["outcome"] == "stored"


async def test_if_match_changes_only_the_revision_that_it_names(url: str) -> None:
    async with quiet(url) as (client, scheduler):
        first = await client.put("/v1/messages/m", json=work())
        tag = {"if-match": first.headers["etag"]}
        assert first.headers["etag"] == f'"{first.json()["revision"]}"'
        second = await client.put("/v1/messages/m", json=work(payload="2"), headers=tag)
        assert (second.status_code, second.json()["outcome"]) == (200, "replaced")
        for method, path in (("PUT", "m"), ("DELETE", "m"), ("PUT", "unknown")):
            body = work(payload="3") if method == "PUT" else None
            answer = await client.request(method, f"/v1/messages/{path}", headers=tag, json=body)
            problem_of(answer, 412, "RevisionError")
        found = await client.get("/v1/messages/m")
        assert (found.json()["payload"], found.headers["etag"]) == ("2", second.headers["etag"])
        assert await scheduler.get("unknown") is None
        gone = await client.delete("/v1/messages/m", headers={"if-match": second.headers["etag"]})
        assert gone.json()["outcome"] == "cancelled"
        assert (await client.delete("/v1/messages/m", headers=tag)).status_code == 404


@pytest.mark.parametrize("tag", ["*", "7", 'W/"7"', '"7", "8"', '"x"', '"123456789012345"', '""'])
async def test_if_match_takes_one_revision(url: str, tag: str) -> None:
    async with quiet(url) as (client, _):
        await client.put("/v1/messages/m", json=work())
        for method in ("PUT", "DELETE"):
            body = work() if method == "PUT" else None
            answer = await client.request(method, "/v1/messages/m", headers={"if-match": tag}, json=body)
            problem_of(answer, 422, "IfMatchError")


async def test_a_precondition_that_a_route_does_not_read_is_refused(url: str) -> None:
    async with quiet(url) as (client, scheduler):
        first = await client.put("/v1/messages/m", json=work())
        none, match = {"if-none-match": "*"}, {"if-match": '"7"'}
        for method, path, headers, body in (
            ("PUT", "/m", none, work(payload="2")),
            ("DELETE", "/m", none, None),
            ("POST", "", none, work(id="m", payload="2")),
            ("POST", "", match, work(id="m", payload="2")),
            ("POST", "/m/reschedule", match, {"delay": "9h"}),
            ("POST", "/m/fire", match, None),
        ):
            answer = await client.request(method, f"/v1/messages{path}", headers=headers, json=body)
            problem = problem_of(answer, 422, "PreconditionError")
            assert problem["field"] in headers
            assert headers[problem["field"]] in problem["value"]
        found = await scheduler.get("m")
        assert found is not None
        assert found.record.revision == first.json()["revision"]
        assert (await client.get("/v1/messages/m")).json()["due"] == first.json()["due"]


async def test_if_match_and_conflict_exclude_each_other(url: str) -> None:
    async with quiet(url) as (client, _):
        answer = await client.put("/v1/messages/m", json=work(conflict="keep"), headers={"if-match": '"7"'})
        problem_of(answer, 422, "IfMatchError")
        outdated = await client.put("/v1/messages/m", json=work(conflict={"if_revision": 7}))
        assert (outdated.status_code, outdated.json()["outcome"]) == (200, "outdated")


async def test_a_repeated_stream_with_a_key_stores_each_line_once(url: str) -> None:
    async with quiet(url) as (client, scheduler):
        body = "\n".join([json.dumps(work()), "", json.dumps(work(id="own")), json.dumps(work())])
        headers = NDJSON | {"idempotency-key": "k"}
        outcomes = []
        for _ in range(2):
            answer = await client.post("/v1/messages", content=body, headers=headers)
            lines = [json.loads(line) for line in answer.text.splitlines()]
            outcomes.append({each["line"]: each["scheduled"]["outcome"] for each in lines if "line" in each})
        assert outcomes == [
            {1: "stored", 3: "stored", 4: "stored"},
            {1: "repeated", 3: "replaced", 4: "repeated"},
        ]
        assert len([each async for each in scheduler.pending()]) == 3


async def test_each_line_of_a_stream_has_its_own_answer(url: str) -> None:
    async with quiet(url) as (client, scheduler):
        lines = [
            json.dumps(work(id="one")),
            "{",
            json.dumps(work(to="nowhere:x")),
            json.dumps(work(delay="-1s")),
            json.dumps(work(id="five")),
        ]
        answer = await client.post("/v1/messages", content="\n".join(lines) + "\n", headers=NDJSON)
        assert answer.headers["content-type"] == "application/x-ndjson"
        told = [json.loads(line) for line in answer.text.splitlines()]
        assert told[-1] == {"stored": 2, "refused": 3}
        by_line = {each["line"]: each for each in told[:-1]}
        assert {number: each["scheduled"]["id"] for number, each in by_line.items() if "scheduled" in each} == {
            1: "one",
            5: "five",
        }
        assert {number: each["problem"]["error"] for number, each in by_line.items() if "problem" in each} == {
            2: "InputError",
            3: "TargetNotAllowedError",
            4: "ScheduleTimeError",
        }
        assert {each.record.id async for each in scheduler.pending()} == {"one", "five"}


async def test_a_stream_is_read_no_faster_than_the_store_takes_it(url: str) -> None:
    async with quiet(url) as (client, scheduler):
        free, sent, held = asyncio.Event(), 0, scheduler._commands
        assert held is not None
        carry_out_many = held.carry_out_many

        async def slowly(*args: Any) -> Any:  # noqa: ANN401 - as of the method
            await free.wait()
            return await carry_out_many(*args)

        held.carry_out_many = slowly  # type: ignore[method-assign, assignment]
        line = (json.dumps(work(payload="x" * 10_000)) + "\n").encode()

        async def body() -> AsyncIterator[bytes]:
            nonlocal sent
            for _ in range(3_000):
                sent += 1
                yield line

        posting = asyncio.create_task(client.post("/v1/messages", content=body(), headers=NDJSON))
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.3)  # nothing tells that no more is read
        assert sent < 2_000, "of 30 MB, what is in flight, in the kernel's buffers and no more has been read"
        free.set()
        answer = await posting
        assert json.loads(answer.text.splitlines()[-1]) == {"stored": 3_000, "refused": 0}


async def test_what_was_read_of_a_stream_that_breaks_off_is_stored_and_told(url: str) -> None:
    limits = ApiLimits(max_body=1_024)
    async with quiet(url, limits=limits) as (client, scheduler):
        body = json.dumps(work(id="a")) + "\n" + "x" * 200_000 + "\n" + json.dumps(work(id="b"))
        answer = await client.post("/v1/messages", content=body, headers=NDJSON)
        last = json.loads(answer.text.splitlines()[-1])
        assert (last["stored"], last["problem"]["error"]) == (1, "LineTooLargeError")
        assert {each.record.id async for each in scheduler.pending()} == {"a"}


async def test_pages_follow_each_other_without_gap_or_repetition(url: str) -> None:
    async with quiet(url) as (client, scheduler):
        at = (datetime.now(UTC) + timedelta(days=1)).isoformat()
        ids = [f"m{n:03}" for n in range(25)]
        await fill(client, ids[:20], delay=None, at=at)  # all at one and the same ms
        await fill(client, ids[20:], delay="30h")
        seen: list[str] = []
        after: str | None = None
        while True:
            params = {"limit": "7"} | ({"after": after} if after else {})
            found = (await client.get("/v1/messages", params=params)).json()
            seen += [each["id"] for each in found["messages"]]
            assert found["of"] is None
            assert all("payload" not in each for each in found["messages"])
            after = found["after"]
            if after is None:
                break
        assert seen == ids
        assert scheduler is not None


async def all_pages(client: httpx.AsyncClient, path: str, **params: str) -> list[list[str]]:
    """Return the ids of each page of a list."""
    pages, after = list[list[str]](), None
    while not pages or after is not None:
        found = (await client.get(path, params=params | ({"after": after} if after else {}))).json()
        pages.append([each["id"] for each in found.get("messages", found.get("letters"))])
        after = found["after"]
    return pages


async def test_the_message_of_an_exact_id_comes_first_and_hides_no_other(url: str) -> None:
    async with quiet(url) as (client, _):
        await fill(client, ["x1", "x2", "other"])
        await fill(client, ["x"], delay="2h")
        assert await all_pages(client, "/v1/messages", text="x", limit="1") == [["x"], ["x1"], ["x2"], []]
        assert await all_pages(client, "/v1/messages", text="x", limit="2") == [["x", "x1"], ["x2"]]


async def test_messages_are_listed_by_lane_time_state_and_id(url: str) -> None:
    async with quiet(url) as (client, scheduler):
        await fill(client, ["w1", "w2"])
        await fill(client, ["o1"], to="handler:other", delay="2h")
        await fill(client, ["due"], delay="0s")
        await scheduler.pause("other")

        async def listed(**params: str | list[str]) -> list[str]:
            answer = await client.get("/v1/messages", params=params)
            assert answer.status_code == 200, answer.text
            return sorted(each["id"] for each in answer.json()["messages"])

        assert await listed(lane="work") == ["due", "w1", "w2"]
        assert await listed(lane=["work", "other"]) == ["due", "o1", "w1", "w2"]
        assert await listed(lane="nobody") == []
        soon = (datetime.now(UTC) + timedelta(minutes=90)).isoformat()
        assert await listed(due_from=soon) == ["o1"]
        assert await listed(due_to=soon) == ["due", "w1", "w2"]
        assert await listed(state="overdue") == ["due"]
        assert await listed(state="scheduled") == ["w1", "w2"]
        assert await listed(state="held") == ["o1"]
        assert await listed(id="w2") == ["w2"]
        assert await listed(id="none") == []
        assert await listed(id="w2", lane="work", state="scheduled", due_to=soon, text="w") == ["w2"]
        for others in ({"lane": "other"}, {"state": "overdue"}, {"due_from": soon}, {"text": "x"}, {"type": "other"}):
            assert await listed(id="w2", **others) == [], "all filters count"
        problem_of(await client.get("/v1/messages", params={"id": "w2", "state": "lost"}), 422, "InputError")
        assert await listed(text="w") == ["w1", "w2"]
        assert await listed(type="other") == ["o1"]


async def test_what_no_index_answers_is_looked_for_among_a_bounded_number(url: str) -> None:
    async with quiet(url, limits=ApiLimits(max_examined=10)) as (client, _):
        await fill(client, [f"m{n:02}" for n in range(23)] + ["wanted"])
        told, after, found = [], None, []
        while True:
            params = {"text": "wanted"} | ({"after": after} if after else {})
            page = (await client.get("/v1/messages", params=params)).json()
            told.append((page["examined"], page["of"]))
            found += [each["id"] for each in page["messages"]]
            after = page["after"]
            if after is None:
                break
        assert found == ["wanted"]
        assert told == [(10, 24), (10, 24), (4, 24)]


async def test_counts_load_and_the_oldest_overdue(url: str) -> None:
    async with quiet(url) as (client, _):
        await fill(client, ["a", "b"], delay="10m")
        past = datetime.now(UTC) - timedelta(minutes=5)
        await fill(client, ["late"], delay=None, at=past.isoformat())
        found = (await client.get("/v1/counts")).json()
        (lane,) = found["lanes"]
        assert (lane["lane"], lane["scheduled"], lane["overdue"]) == ("work", 2, 1)
        assert lane["read_by_nobody"] is True
        assert found["oldest_overdue"] is not None
        load = (await client.get("/v1/load", params={"bucket": "15m", "buckets": 4})).json()
        assert load["bucket"] == "15m"
        assert [(each["lane"], each["messages"]) for each in load["buckets"]] == [("work", 2)]


async def test_held_messages_do_not_hide_the_oldest_overdue(url: str) -> None:
    async with quiet(url) as (client, scheduler):
        await scheduler.pause("held")
        await fill(client, [f"held-{n}" for n in range(250)], to="handler:held", delay="0s")
        assert (await client.get("/v1/counts")).json()["oldest_overdue"] is None
        late = (await client.post("/v1/messages", json=work(delay="0s"))).json()
        assert (await client.get("/v1/counts")).json()["oldest_overdue"] == late["due"]


async def test_what_is_paused_is_held_until_it_is_resumed(url: str) -> None:
    async with quiet(url) as (client, scheduler):
        pause = {"what": "work"}
        assert (await client.post("/v1/pause", json=pause)).json() == {"id": "work", "outcome": "paused"}
        assert (await client.post("/v1/pause", json=pause)).json()["outcome"] == "was_paused"
        for path in ("/v1/pauses", "/v1/holds"):  # the former name goes on working
            assert (await client.get(path)).json() == {"paused": ["work"], "blocked": []}
        assert list(await scheduler.paused()) == ["work"]
        assert (await client.post("/v1/resume", json=pause)).json()["outcome"] == "resumed"
        assert (await client.post("/v1/resume", json=pause)).json()["outcome"] == "was_not_paused"


@asynccontextmanager
async def with_dead_letters(
    url: str,
    ids: Sequence[str],
    **options: Any,  # noqa: ANN401 - as of what they go to
) -> AsyncIterator[tuple[httpx.AsyncClient, Scheduler]]:
    """An API over a scheduler that has given up one message after the other."""
    scheduler = scheduler_of(url)

    @scheduler.handler(name="work")
    async def refuse(event: bytes) -> Reject:
        return Reject("no")

    async with scheduler, serving_api(scheduler, **(ALL | options)) as client:
        for message_id in ids:
            await fill(client, [message_id], delay="0s")
            await scheduler.run_until_idle()
        await scheduler.remove_handler("work")
        yield client, scheduler


async def test_dead_letters_are_listed_shown_redriven_and_purged(url: str) -> None:
    async with with_dead_letters(url, D[:5]) as (client, scheduler):
        page = (await client.get("/v1/dead", params={"limit": 3})).json()
        rest = (await client.get("/v1/dead", params={"after": page["after"]})).json()
        letters = page["letters"] + rest["letters"]
        assert (page["of"], rest["after"]) == (5, None)
        assert sorted(each["id"] for each in letters) == [f"d{i}" for i in range(5)]
        assert {each["reason"] for each in letters} == {"rejected"}
        one = letters[0]
        whole = await client.get(f"/v1/dead/{one['revision']}/{one['id']}")
        assert whole.json() == one | {"payload": "p", "traceback": None}
        keys = [{"id": each["id"], "revision": each["revision"]} for each in letters]
        redriven = (await client.post("/v1/dead/redrive", json={"letters": [keys[0], keys[0]]})).json()
        assert [each["outcome"] for each in redriven["letters"]] == ["stored", "not_found"]
        assert (await client.get(f"/v1/messages/{one['id']}")).json()["state"] == "overdue"
        assert (await client.post("/v1/dead/purge", json={"letters": keys})).json() == {"purged": 4}
        assert [each async for each in scheduler.dead_letters()] == []
        problem_of(await client.get(f"/v1/dead/{one['revision']}/{one['id']}"), 404, "DeadLetterNotFoundError")
        for bad in ([], [keys[0]] * 1_001):
            problem_of(await client.post("/v1/dead/purge", json={"letters": bad}), 422, "LettersError")


async def test_all_dead_letters_of_one_id_are_listed(url: str) -> None:
    async with with_dead_letters(url, [*["x"] * 5, "x1", "x2"]) as (client, _):
        for size, pages in ((2, [["x", "x"], ["x", "x"], ["x", "x1"], ["x2"]]), (5, [["x"] * 5, ["x1", "x2"]])):
            assert await all_pages(client, "/v1/dead", text="x", limit=str(size)) == pages
        assert await all_pages(client, "/v1/dead", text="x", reason="late") == [[]]


async def test_a_dead_letter_is_shown_with_its_errors_and_its_traceback(url: str) -> None:
    scheduler = scheduler_of(url)

    @scheduler.handler(name="work", retry=Retry.never())
    async def work(event: bytes) -> None:
        raise KeyError("total")

    async with scheduler, serving_api(scheduler, **ALL) as client:
        await fill(client, ["d"], delay="0s")
        await scheduler.run_until_idle()
        (listed,) = (await client.get("/v1/dead")).json()["letters"]
        shown = (await client.get(f"/v1/dead/{listed['revision']}/d")).json()
    assert (listed["last_error"], listed["earlier_errors"]) == ("KeyError: 'total'", [])
    assert "traceback" not in listed
    first, *_, last = shown["traceback"].splitlines()
    assert (first, last) == ("Traceback (most recent call last):", "KeyError: 'total'")


async def test_dead_letters_are_filtered_among_a_bounded_number(url: str) -> None:
    async with with_dead_letters(url, D[:6], limits=ApiLimits(max_examined=4)) as (client, _):
        first = (await client.get("/v1/dead", params={"reason": "late"})).json()
        assert (first["letters"], first["examined"], first["of"]) == ([], 4, 6)
        second = (await client.get("/v1/dead", params={"reason": "late", "after": first["after"]})).json()
        assert (second["examined"], second["after"]) == (2, None)
        assert len((await client.get("/v1/dead", params={"lane": "work"})).json()["letters"]) == 4
        assert (await client.get("/v1/dead", params={"lane": "other"})).json()["letters"] == []
        newest = (await client.get("/v1/dead", params={"after": first["after"]})).json()["letters"][-1]
        found = await client.get(f"/v1/dead/{newest['revision']}/{newest['id']}")
        assert found.json()["id"] == newest["id"], "found by its id, whatever the number of others"
        past = "2020-01-01T00:00:00Z"
        assert (await client.get("/v1/dead", params={"dead_to": past})).json()["examined"] == 0
        assert len((await client.get("/v1/dead", params={"dead_from": past})).json()["letters"]) == 4
        problem = problem_of(await client.get("/v1/dead", params={"reason": "boredom"}), 422, "InputError")
        assert "late" in problem["allowed"]


async def carried_out(client: httpx.AsyncClient, **asked: Any) -> dict[str, Any]:  # noqa: ANN401 - as of what they go to
    """Plan a bulk action, confirm it, and return the operation once it has ended."""
    plan = (await client.post("/v1/bulk", json=asked)).json()
    return await ended(client, plan["confirm"])


async def ended(client: httpx.AsyncClient, confirm: str) -> dict[str, Any]:
    """Confirm a plan, and return the operation once it has ended; confirming again is safe."""
    while (answer := await client.post(f"/v1/bulk/{confirm}")).status_code == 202:
        pass
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert found == (await client.get(f"/v1/bulk/{confirm}")).json()
    return found


async def test_bulk_actions_do_nothing_before_they_are_confirmed_and_then_what_was_shown(url: str) -> None:
    async with quiet(url) as (client, scheduler):
        await fill(client, [f"m{n}" for n in range(7)])
        await fill(client, ["other"], to="handler:other")
        plan = (await client.post("/v1/bulk", json={"action": "cancel", "messages": {"lane": ["work"]}})).json()
        assert (plan["count"], len(plan["first"]), plan["more"]) == (7, 5, False)
        assert len([each async for each in scheduler.pending()]) == 8
        await fill(client, ["later"])
        await scheduler.cancel("m0")
        done = await ended(client, plan["confirm"])
        assert (done["action"], done["state"], done["found"], done["changed"]) == ("cancel", "done", 7, 7)
        assert done["outcomes"] == {"cancelled": 6, "not_found": 1}
        assert {each.record.id async for each in scheduler.pending()} == {"other", "later"}
        assert await ended(client, plan["confirm"]) == done, "a repeat does nothing"
        assert (await client.get("/v1/bulk")).json()["operations"] == [done]
        problem_of(await client.post("/v1/bulk/no-such-plan"), 404, "PlanNotFoundError")
        problem_of(await client.get("/v1/bulk/no-such-plan"), 404, "OperationNotFoundError")


async def test_a_plan_is_carried_out_once_even_if_its_result_is_forgotten(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "KEPT", 0)
    async with quiet(url) as (client, scheduler):
        await fill(client, ["m"])
        plan = (await client.post("/v1/bulk", json={"action": "cancel"})).json()
        assert (await ended(client, plan["confirm"]))["outcomes"] == {"cancelled": 1}
        await fill(client, ["m"])
        await carried_out(client, action="fire", messages={"lane": ["none"]})
        problem_of(await client.post(f"/v1/bulk/{plan['confirm']}"), 404, "PlanNotFoundError")
        assert [each.record.id async for each in scheduler.pending()] == ["m"]


async def test_a_bulk_cancel_names_recurring_series_and_leaves_them_out_unless_asked(url: str) -> None:
    async with quiet(url) as (client, scheduler):
        await fill(client, ["m0", "m1"])
        await client.post("/v1/messages", json={"to": "handler:work", "payload": "p", "every": "1h", "id": "report"})
        plan = (await client.post("/v1/bulk", json={"action": "cancel"})).json()
        assert plan["series"] == {"count": 1, "first": ["report"], "included": False}
        assert plan["count"] == 2
        done = await ended(client, plan["confirm"])
        assert (done["outcomes"], done["series"]) == ({"cancelled": 2}, plan["series"])
        assert [each.record.id async for each in scheduler.pending()] == ["report"]
        done = await carried_out(client, action="cancel", series=True)
        assert done["outcomes"] == {"cancelled": 1}
        assert done["series"] == {"count": 1, "first": ["report"], "included": True}
        assert [each.record.id async for each in scheduler.pending()] == []


async def test_a_bulk_action_of_any_size_is_one_operation(url: str) -> None:
    async with quiet(url, limits=ApiLimits(max_examined=300)) as (client, scheduler):
        await fill(client, [f"m{n}" for n in range(2_100)])
        await fill(client, ["other"])
        asked = {"action": "cancel", "messages": {"text": "m"}}
        plan = (await client.post("/v1/bulk", json=asked)).json()
        assert (plan["count"], plan["more"], plan["examined"], plan["of"]) == (300, True, 300, 2_101)
        done = await ended(client, plan["confirm"])
        assert (done["found"], done["changed"], done["outcomes"]) == (2_100, 2_100, {"cancelled": 2_100})
        assert [each.record.id async for each in scheduler.pending()] == ["other"]


class Gated(MemoryStore):
    """Carries out cancels only while its gate is open; a broken one refuses them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.asked, self.is_broken = asyncio.Event(), 0, False
        self.gate.set()

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        if any(isinstance(each, Cancel) for each in commands):
            self.asked += 1
            await self.gate.wait()
            if self.is_broken:
                return [Refused("unavailable", "the disk is gone")] * len(commands)
        return await super().apply(commands, source=source)


async def test_a_bulk_operation_tells_its_progress_and_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "STEP", 10)
    monkeypatch.setattr(plans, "RUNNING", 1)
    store = Gated()
    async with Scheduler(store, dispatch=False) as scheduler, serving_api(scheduler, **ALL) as client:
        await fill(client, [f"m{n}" for n in range(50)])
        plan = (await client.post("/v1/bulk", json={"action": "cancel"})).json()
        other = (await client.post("/v1/bulk", json={"action": "fire"})).json()
        store.gate.clear()
        path = f"/v1/bulk/{plan['confirm']}"
        begun = await client.post(path, params={"wait": 0})
        assert (begun.status_code, begun.json()["found"]) == (202, 50)
        await until(lambda: store.asked, "the first step is under way")
        assert (await client.get(path)).json()["state"] == "changing"
        problem_of(await client.post(f"/v1/bulk/{other['confirm']}"), 503, "TooManyOperationsError")

        async def is_stopping() -> bool:
            return bool((await client.get(path)).json()["stopping"])

        stopping = asyncio.create_task(client.post(f"{path}/stop"))
        await until(is_stopping, "the service has heard of it")
        store.gate.set()
        stopped = (await stopping).json()
        assert (stopped["state"], stopped["changed"], stopped["outcomes"]) == ("stopped", 10, {"cancelled": 10})
        assert len([each async for each in scheduler.pending()]) == 40
        assert (await ended(client, other["confirm"]))["outcomes"] == {"fired": 40, "not_found": 10}


async def test_a_bulk_operation_ends_when_the_store_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "STEP", 10)
    store = Gated()
    async with (
        Scheduler(store, dispatch=False, store_timeout="50ms") as scheduler,
        serving_api(scheduler, **ALL) as client,
    ):
        await fill(client, [f"m{n}" for n in range(50)])
        store.is_broken = True
        done = await carried_out(client, action="cancel")
        assert (done["state"], done["found"], done["changed"]) == ("failed", 50, 10)
        assert "the disk is gone" in done["error"]


async def test_an_operation_that_fails_by_a_bug_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: object, *__: object) -> int:
        raise KeyError("a bug")

    async with Scheduler("memory://", dispatch=False) as scheduler, serving_api(scheduler, **ALL) as client:
        await fill(client, ["m"])
        monkeypatch.setattr(Scheduler, "cancel", fail)
        done = await carried_out(client, action="cancel")
    assert (done["state"], done["error"]) == ("failed", "the service failed; its log has the reason")
    assert "a bug" in caplog.text


async def test_a_purge_finds_all_letters_of_an_id() -> None:
    store = MemoryStore()
    async with Scheduler(store, dispatch=False) as scheduler, serving_api(scheduler, **ALL) as client:
        async with store.work("w", ["work"]) as running:
            for n in range(450):
                await store.apply([Put(new_op(), Envelope("x" if n else "x1", "work", payload=b"x"), At(0))])
                (claim,) = (await running.claim({"work": Demand(1)}, request=new_op().hex(), lease_ms=9_000)).claims
                record = claim.record
                await running.settle([Dead(record.id, record.revision, claim.token, "rejected", 1)])
        done = await carried_out(client, action="purge", dead={"text": "x"})
        assert (done["found"], done["outcomes"]) == (450, {"purged": 450})


async def test_bulk_actions_leave_out_retries_of_occurrences(url: str) -> None:
    scheduler = scheduler_of(url)

    @scheduler.handler(name="work", retry=Retry(first="1h"))
    async def fail(event: bytes) -> None:
        raise ValueError

    async with scheduler, serving_api(scheduler, **ALL) as client:
        await client.post("/v1/messages", json=work(id="series", delay=None, every="1s"))

        await until(lambda: has_retries(client), "an occurrence waits for its retry")
        await scheduler.pause("work")
        (retry, *_) = (await client.get("/v1/messages", params={"text": "~"})).json()["messages"]
        page = (await client.get(f"/messages/{retry['id']}")).text
        assert "changes only together with its series" in page
        assert 'name="action"' not in page
        assert f'aria-label="{retry["id"]}"' not in (await client.get("/messages")).text
        plan = (await client.post("/v1/bulk", json={"action": "cancel"})).json()
        assert (plan["count"], plan["series"]["first"]) == (0, ["series"])
        done = await carried_out(client, action="fire")
        assert (done["found"], done["outcomes"]) == (1, {"fired": 1})
        await client.delete("/v1/messages/series")


async def has_retries(client: httpx.AsyncClient) -> bool:
    return bool((await client.get("/v1/messages", params={"text": "~"})).json()["messages"])


async def test_bulk_reschedule_and_fire(url: str) -> None:
    async with quiet(url) as (client, scheduler):
        await fill(client, ["a", "b"])
        asked = {"action": "reschedule", "delay": "5h", "messages": {"text": "a"}}
        plan = (await client.post("/v1/bulk", json=asked)).json()
        assert (plan["examined"], plan["of"]) == (2, 2)
        assert (await ended(client, plan["confirm"]))["outcomes"] == {"rescheduled": 1}
        moved, kept = [await scheduler.get(each) for each in "ab"]
        assert moved is not None
        assert kept is not None
        assert moved.record.due_ms - kept.record.due_ms > timedelta(hours=3).total_seconds() * 1000
        assert (await carried_out(client, action="fire"))["outcomes"] == {"fired": 2}


async def test_bulk_redrive_and_purge(url: str) -> None:
    async with with_dead_letters(url, D[:4]) as (client, scheduler):
        plan = (await client.post("/v1/bulk", json={"action": "redrive", "dead": {"text": "d1"}})).json()
        assert (plan["count"], plan["first"]) == (1, ["d1"])
        assert (await ended(client, plan["confirm"]))["outcomes"] == {"stored": 1}
        assert (await carried_out(client, action="purge"))["outcomes"] == {"purged": 3}
        assert [each async for each in scheduler.dead_letters()] == []


async def test_bulk_refuses_what_could_not_be_done(url: str) -> None:
    async with quiet(url) as (client, _):
        for given, error in (
            ({"action": "cancel", "dead": {}}, "BulkError"),
            ({"action": "purge", "messages": {}}, "BulkError"),
            ({"action": "fire", "delay": "1s"}, "BulkError"),
            ({"action": "fire", "series": True}, "BulkError"),
            ({"action": "reschedule"}, "ScheduleTimeError"),
            ({"action": "reschedule", "at": "tomorrow"}, "ScheduleTimeError"),
            ({"action": "cancel", "messages": {"state": "lost"}}, "InputError"),
            ({"action": "explode"}, "InputError"),
        ):
            problem_of(await client.post("/v1/bulk", json=given), 422, error)


async def test_lateness_and_the_journal_tell_what_was_delivered(url: str) -> None:
    scheduler = scheduler_of(url)

    @scheduler.handler(name="work")
    async def take(event: bytes) -> None: ...

    async with scheduler, serving_api(scheduler, **ALL) as client:
        past = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
        await fill(client, ["a", "b", "c"], delay="0s")
        await fill(client, ["late"], delay=None, at=past)
        await scheduler.run_until_idle()
        found = (await client.get("/v1/lateness")).json()
        assert found["samples"] == 4
        assert found["p50_ms"] < 1_800_000 <= found["max_ms"] == found["p99_ms"]
        assert sum(each["messages"] for each in found["buckets"]) == 4
        assert (await client.get("/v1/lateness")).json() == found, "nothing is counted twice"
        entries = (await client.get("/v1/journal", params={"id": "late"})).json()
        assert [each["event"] for each in entries["entries"]] == ["stored", "claimed", "delivered"]
        rest = await client.get("/v1/journal", params={"id": "late", "after": entries["after"]})
        assert rest.json() == {"entries": [], "after": entries["after"]}


async def test_consumers_of_topics_and_of_logs_are_listed_with_their_lag(url: str) -> None:
    async with quiet(url) as (client, scheduler):
        if url.startswith("sqlite"):
            problem_of(await client.get("/v1/consumers"), 422, "UnsupportedByStoreError")
            return
        await published(url.partition("?")[0], scheduler.namespace)
        found = (await client.get("/v1/consumers", params={"limit": 2})).json()
        rest = (await client.get("/v1/consumers", params={"after": found["after"]})).json()
        listed = [*found["consumers"], *rest["consumers"]]
        assert [tuple(each[name] for name in CONSUMER) for each in listed] == [
            ("orders", "fan-out", "billing", 1, 0, None, True),
            ("orders", "fan-out", "mail", 1, 0, None, True),
            ("orders", "log", "report", 2, 0, 1, False),
            ("orders", "log", "search", 2, 1, 0, False),
            ("payments", "fan-out", "billing", 0, 0, None, True),
        ]
        assert [each["seen"] is not None for each in listed] == [False, False, True, True, False]
        assert rest["after"] is None
        named = (await client.get("/v1/consumers", params={"topic": "payments"})).json()
        assert named["consumers"] == rest["consumers"][-1:]
        problem_of(await client.get("/v1/consumers", params={"topic": "a b"}), 422, "TargetError")


CONSUMER = ("topic", "kind", "consumer", "waiting", "in_flight", "cursor", "away")


async def published(server: str, namespace: str) -> None:
    """Fill a topic and a log of the same name; of the log's consumers one has committed, and one has taken."""
    async with (
        RedisFanout(server, namespace=namespace) as fanout,
        RedisLog(server, namespace=namespace) as log,
        Scheduler(f"{server}", namespace=namespace) as moving,
    ):
        for topic, consumer in (("orders", "billing"), ("orders", "mail"), ("payments", "billing")):
            await fanout.register(topic, consumer)
        await moving.schedule(b"x", to="redis-fanout:orders", delay="0s")
        await moving.run_until_idle()
        await log.append("orders", [b"x"] * 3)
        await log.register("orders", "report")
        await log.commit("orders", "report", 1)
        back = moving.store
        async with log.feed("orders?consumer=search", "one", back.put_back, back.now_ms) as feed:
            claimed = await feed.claim({"search": Demand(1)}, request="r", lease_ms=60_000)
            assert len(claimed.claims) == 1


async def test_without_a_journal_lateness_says_what_is_missing(tmp_path: Path) -> None:
    async with quiet(f"sqlite:///{tmp_path}/none.db") as (client, _):
        for path in ("/v1/lateness", "/v1/journal"):
            problem_of(await client.get(path), 422, "UnsupportedByStoreError")


async def test_several_stores_are_told_apart_by_name(url: str, tmp_path: Path) -> None:
    async with (
        scheduler_of(url, dispatch=False) as first,
        scheduler_of(f"sqlite:///{tmp_path}/second.db", dispatch=False, allowed_targets=["handler:x"]) as second,
        serving_api({"first": first, "second": second}, read_only=False) as client,
    ):
        stores = (await client.get("/v1/stores")).json()["stores"]
        assert [(each["name"], each["allowed_targets"]) for each in stores] == [
            ("first", []),
            ("second", ["handler:x"]),
        ]
        problem = problem_of(await client.get("/v1/messages"), 422, "UnknownStoreError")
        assert problem["allowed"] == "first, second"
        problem_of(await client.get("/v1/messages?store=third"), 422, "UnknownStoreError")
        given = work(to="handler:x", id="m")
        assert (await client.post("/v1/messages?store=second", json=given)).status_code == 201
        refused = await client.post("/v1/messages?store=first", json=given)
        assert "nothing" in problem_of(refused, 403, "TargetNotAllowedError")["allowed"]
        assert await second.get("m") is not None
        assert await first.get("m") is None


async def test_what_may_be_scheduled_to_is_said_to_who_asked_for_something_else(url: str) -> None:
    async with quiet(url, allowed_targets=["handler:work", "handler:mail.*"]) as (client, scheduler):
        for to in ("handler:other", "handler:wor", "redis-list:work"):
            problem = problem_of(await client.post("/v1/messages", json=work(to=to)), 403, "TargetNotAllowedError")
            assert problem["field"] == "to"
            assert to in problem["value"]
            assert "handler:work, handler:mail.*" in problem["allowed"]
        assert (await client.post("/v1/messages", json=work(to="handler:mail.out"))).status_code == 201
        assert len([each async for each in scheduler.pending()]) == 1


async def test_what_another_program_has_put_beyond_all_calendars_is_shown(tmp_path: Path) -> None:
    async with quiet(f"sqlite:///{tmp_path}/far.db") as (client, scheduler):
        put = Put(new_op(), Envelope("never", "work", payload=b"p"), At((1 << 48) - 1))
        (outcome,) = await scheduler.store.apply([put])
        assert isinstance(outcome, Stored)
        assert (await client.get("/v1/messages/never")).json()["due"] == "9999-12-31T23:59:59.999Z"
        assert (await client.get("/v1/messages")).json()["messages"][0]["id"] == "never"
        assert (await client.get("/schedules")).json()[0]["epoch"] == -(-((1 << 48) - 1) // 1000)


async def test_the_routes_of_etf1_answer_in_its_shapes(url: str) -> None:
    async with quiet(url) as (client, _):
        due = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
        at = due + timedelta(milliseconds=1)
        await client.post(
            "/v1/messages", json=work(id="vid1", key="k", payload="video 1", delay=None, at=at.isoformat())
        )
        (schedule,) = (await client.get("/schedules")).json()
        assert schedule["epoch"] == int(due.timestamp()) + 1, "rounded up, as in the topic"
        assert abs(schedule.pop("timestamp") - datetime.now(UTC).timestamp()) < 60
        topic = schedule.pop("topic")
        assert schedule == {
            "id": "vid1",
            "epoch": int(due.timestamp()) + 1,
            "target-topic": "handler:work",
            "target-key": "k",
            "value": base64.b64encode(b"video 1").decode(),
        }
        assert topic
        assert (await client.get("/schedule/vid1")).json()["id"] == "vid1"
        problem_of(await client.get("/schedule/vid2"), 404, "MessageNotFoundError")
        assert (await client.get("/schedules?limit=1")).json() != []
        info = (await client.get("/info")).json()
        assert info.keys() == {"hostname", "address", "server_address", "kafka"}
        assert info["kafka"].keys() == {"bootstrap_servers", "topics", "history_topic"}
        alive = await client.get("/liveness")
        assert (alive.status_code, alive.content) == (200, b"")


async def test_more_schedules_than_one_look_returns_are_all_listed(url: str) -> None:
    async with quiet(url) as (client, _):
        ids = [f"m{n:04}" for n in range(450)]
        await fill(client, ids)
        found = (await client.get("/schedules")).json()
        assert sorted(each["id"] for each in found) == ids
        assert len((await client.get("/schedules?limit=201")).json()) == 201


async def test_the_app_can_be_mounted_in_another(url: str) -> None:
    outer = FastAPI()
    async with scheduler_of(url, dispatch=False) as scheduler:
        outer.mount("/delayed", admin(scheduler, **ALL))
        async with serving_app(outer) as base, client_of(base) as client:
            assert (await client.post("/delayed/v1/messages", json=work(id="m"))).status_code == 201
            assert (await client.get("/delayed/v1/messages/m")).json()["id"] == "m"
            problem_of(await client.get("/delayed/v1/messages/n"), 404, "MessageNotFoundError")
            assert (await client.get("/delayed/docs")).status_code == 200
            document = (await client.get("/delayed/openapi.json")).json()
            assert document["servers"] == [{"url": "/delayed"}]
            assert (await client.get(f"{document['servers'][0]['url']}/v1/counts")).status_code == 200


async def test_answers_are_what_the_document_says(url: str) -> None:
    """Each answer can be read as the model that its route names, with no field more and none less."""
    async with with_dead_letters(url, D[:2]) as (client, _):
        await fill(client, ["m"])
        for path, model in (
            ("/v1/messages", models.ListOut),
            ("/v1/messages/m", models.MessageOut),
            ("/v1/counts", models.CountsOut),
            ("/v1/load?bucket=1h", models.LoadOut),
            ("/v1/forecast?rate=5/s", models.ForecastOut),
            ("/v1/lateness", models.LatenessOut),
            ("/v1/journal", models.JournalOut),
            ("/v1/pauses", models.PausesOut),
            ("/v1/stores", models.StoresOut),
            ("/v1/dead", models.DeadListOut),
        ):
            answer = (await client.get(path)).json()
            read = msgspec.convert(answer, model)
            assert json.loads(msgspec.json.encode(read)) == answer, path


async def test_the_document_says_which_field_is_deprecated_and_what_replaces_it(url: str) -> None:
    async with quiet(url) as (client, _):
        schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    for name in ("MessageOut", "DeadOut"):
        fields = schemas[name]["properties"]
        assert {each for each, schema in fields.items() if schema.get("deprecated")} == {"is_last_attempt"}
        assert "is_cancelled" in fields["is_last_attempt"]["description"]
        assert fields["is_cancelled"]["type"] == "boolean"


async def test_the_document_and_its_page_need_nothing_from_elsewhere(url: str) -> None:
    async with quiet(url) as (client, _):
        document = (await client.get("/openapi.json")).json()
        assert document["openapi"].startswith("3.1")
        page = await client.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "script" not in page.text
        assert "http://" not in page.text.replace("http://www.w3.org", "")
        assert "https://" not in page.text
        for path in document["paths"]:
            assert path in page.text

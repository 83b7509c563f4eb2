"""The HTTP API: scopes of tokens, limits, and the data that errors reveal."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import httpx
import pytest

from aiodelay import Scheduler, StoreUnavailableError
from aiodelay.core.values import Command, DeadKey, Outcome, SourcePosition, Unknown
from aiodelay.memory import MemoryStore
from aiodelay.service import ApiLimits, Token, Tokens, admin, hash_token
from aiodelay.service.api.application import ROUTERS
from aiodelay.service.api.schemas import scopes_of
from aiodelay.testing.clock import VirtualClock
from tests.support.api import ALL, SECRETS, TOKENS, bearer, problem_of, serving_api
from tests.support.clear_errors import SECRETS as PLANTED
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

WORK = {"to": "handler:work", "payload": "p", "delay": "1h"}
NDJSON = {"content-type": "application/x-ndjson"}


@asynccontextmanager
async def api(**options: Any) -> AsyncIterator[httpx.AsyncClient]:  # noqa: ANN401 - as of `admin`
    """The API over a store in memory."""
    async with (
        Scheduler("memory://?journal=100", dispatch=False) as scheduler,
        serving_api(scheduler, **(ALL | options)) as client,
    ):
        yield client


def routes() -> Iterator[tuple[str, str, str]]:
    """Each route: its method, a path, and what a token must be for."""
    for method, path, scope in scopes_of(ROUTERS):
        yield method, path.replace("{id}", "x").replace("{revision}", "1").replace("{confirm}", "c"), scope


OPEN = {"/liveness"}


async def test_all_routes_but_one_need_a_scope_and_only_looking_needs_read() -> None:
    found = list(routes())
    assert len(found) >= 25
    assert {path for _, path, scope in found if not scope} == OPEN
    assert all((scope == "read") == (method == "GET") for method, path, scope in found if path not in OPEN)


async def test_without_a_token_401_and_with_the_wrong_scope_403_on_every_route() -> None:
    async with api(tokens=TOKENS) as client:
        for method, path, scope in routes():
            if not scope:
                continue
            for headers in (
                {},
                bearer("guessed"),
                {"authorization": f"Basic {SECRETS[scope]}"},
                {"authorization": "Bearer"},
            ):
                refused = await client.request(method, path, headers=headers)
                problem_of(refused, 401, "UnauthorizedError")
                assert refused.headers["www-authenticate"].startswith("Bearer")
            for other in SECRETS.keys() - {scope}:
                refused = await client.request(method, path, headers=bearer(SECRETS[other]))
                assert problem_of(refused, 403, "ScopeError")["allowed"] == scope
            allowed = await client.request(method, path, headers=bearer(SECRETS[scope]))
            assert allowed.status_code not in (401, 403), (method, path)


async def test_read_only_refuses_each_change_whatever_the_token() -> None:
    secret = "all of it"
    token = Token(name="all", hash=hash_token(secret), scopes=("read", "schedule", "operate"))
    async with api(tokens=[token], read_only=True) as client:
        for method, path, scope in routes():
            answer = await client.request(method, path, headers=bearer(secret))
            if scope in ("schedule", "operate"):
                problem_of(answer, 403, "ReadOnlyError")
            else:
                assert answer.status_code != 403
    async with api(read_only=True) as client:
        problem_of(await client.post("/v1/messages", json=WORK), 403, "ReadOnlyError")


async def test_it_is_read_only_and_allows_no_destination_unless_told_otherwise() -> None:
    async with Scheduler("memory://", dispatch=False) as scheduler:
        async with serving_api(scheduler) as client:
            problem_of(await client.post("/v1/messages", json=WORK), 403, "ReadOnlyError")
        async with serving_api(scheduler, read_only=False) as client:
            problem_of(await client.post("/v1/messages", json=WORK), 403, "TargetNotAllowedError")


async def test_tokens_are_exchanged_while_it_runs() -> None:
    tokens = Tokens(TOKENS)
    async with api(tokens=tokens) as client:
        assert (await client.get("/v1/counts", headers=bearer(SECRETS["read"]))).status_code == 200
        tokens.load([Token(name="new", hash=hash_token("new secret"), scopes=("read",))])
        problem_of(await client.get("/v1/counts", headers=bearer(SECRETS["read"])), 401, "UnauthorizedError")
        assert (await client.get("/v1/counts", headers=bearer("new secret"))).status_code == 200


async def test_refused_tokens_are_told_at_most_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiodelay.audit")
    clock = VirtualClock()
    async with api(tokens=Tokens(TOKENS, clock)) as client:

        async def guess(times: int) -> None:
            for n in range(times):
                problem_of(await client.get("/v1/counts", headers=bearer(f"guess {n}")), 401, "UnauthorizedError")

        await guess(5)
        problem_of(await client.get("/v1/counts"), 401, "UnauthorizedError")
        clock.move(1_000)
        await guess(2)
    lines = [json.loads(record.message) for record in caplog.records]
    assert lines == [{"action": "refused token", "from": "127.0.0.1", "times": times} for times in (1, 5)]


async def test_a_token_is_compared_with_each_one_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, str]] = []

    def compare_digest(known: str, given: str) -> bool:
        compared.append((known, given))
        return known == given

    monkeypatch.setattr("aiodelay.service.api.security.compare_digest", compare_digest)
    assert Tokens(TOKENS).find(SECRETS["read"]) is TOKENS[0]
    assert compared == [(token.hash, TOKENS[0].hash) for token in TOKENS], "the hashes, and all of them"


async def test_without_tokens_only_this_machine_by_its_own_name_is_let_in() -> None:
    async with api() as client:
        assert (await client.get("/v1/counts")).status_code == 200
        for name in ("localhost", "localhost:80", "127.0.0.1:1", "[::1]:8080"):
            assert (await client.get("/v1/counts", headers={"host": name})).status_code == 200, name
        for headers in (
            {"host": "evil.example"},
            {"host": "localhost.evil.example"},
            {"host": "127.0.0.1.evil.example"},
            {"host": ""},
            {"x-forwarded-for": "127.0.0.1"},
            {"forwarded": "for=127.0.0.1"},
        ):
            problem_of(await client.get("/v1/counts", headers=headers), 401, "UnauthorizedError")
    app = admin(Scheduler("memory://"))
    peers: tuple[tuple[Any, int], ...] = (("10.1.2.3", 401), (None, 401), ("127.0.0.1", 503))
    for peer, status in peers:  # uvicorn before 0.31 may not know the address
        transport = httpx.ASGITransport(app, client=(peer, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as inside:
            assert (await inside.get("/v1/counts")).status_code == status, "it is not open, and says so to who may ask"


async def test_other_sites_cannot_change_anything() -> None:
    async with api() as client:
        own = str(client.base_url).rstrip("/")
        for headers in (
            {"origin": "https://evil.example"},
            {"origin": "null"},
            {"origin": "http://["},
            {"origin": own.replace("http://", "https://") + "0"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
            {"sec-fetch-site": "cross-site", "origin": own},
        ):
            problem_of(await client.post("/v1/messages", json=WORK, headers=headers), 403, "CrossSiteError")
            problem_of(await client.delete("/v1/messages/x", headers=headers), 403, "CrossSiteError")
        for headers in ({"origin": own, "sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}):
            assert (await client.post("/v1/messages", json=WORK, headers=headers)).status_code == 201
        for type_ in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            refused = await client.post("/v1/messages", content=json.dumps(WORK), headers={"content-type": type_})
            problem_of(refused, 415, "ContentTypeError")
        preflight = await client.options("/v1/messages", headers={"origin": "https://evil.example"})
        assert preflight.status_code == 405


async def test_every_answer_has_the_headers_that_keep_browsers_in() -> None:
    async with api(tokens=TOKENS) as client:
        reader = bearer(SECRETS["read"])
        for path, headers in (
            ("/v1/counts", reader),
            ("/v1/counts", {}),
            ("/v1/messages/none", reader),
            ("/nowhere", {}),
            ("/docs", {}),
            ("/liveness", {}),
        ):
            answer = await client.get(path, headers=headers | {"origin": "https://evil.example"})
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'")
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-store"
            assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_bodies_and_streams_have_a_largest_size() -> None:
    async with api(limits=ApiLimits(max_body=2_000, max_stream=5_000)) as client:
        large = json.dumps(WORK | {"payload": "x" * 2_000})
        problem_of(await client.post("/v1/messages", json=json.loads(large)), 413, "BodyTooLargeError")

        async def unsized() -> AsyncIterator[bytes]:
            yield large.encode()

        headers = {"content-type": "application/json"}
        answer = await client.post("/v1/messages", content=unsized(), headers=headers)
        problem = problem_of(answer, 413, "BodyTooLargeError")
        assert (problem["field"], problem["allowed"]) == ("body", "2000 bytes")
        answer = await client.post("/v1/messages", content="x" * 2_001, headers=NDJSON)
        problem = json.loads(answer.text.splitlines()[-1])["problem"]
        assert (problem["error"], problem["field"], problem["allowed"]) == ("LineTooLargeError", "line", "2000 bytes")

        async def stream() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield json.dumps(WORK).encode() + b"\n"

        answer = await client.post("/v1/messages", content=stream(), headers=NDJSON)
        last = json.loads(answer.text.splitlines()[-1])
        assert last["problem"]["error"] == "BodyTooLargeError"
        counts = (await client.get("/v1/counts")).json()
        assert counts["lanes"][0]["scheduled"] == last["stored"], "what was read is stored"
    async with api() as client:
        payload = "x" * 262_145
        problem = problem_of(
            await client.post("/v1/messages", json=WORK | {"payload": payload}), 413, "PayloadTooLargeError"
        )
        assert problem["field"] == "payload"


@pytest.mark.parametrize(
    ("type_", "status"), [("application/json", b"408"), ("application/x-ndjson", b"200")], ids=["one", "stream"]
)
async def test_a_body_that_does_not_come_is_not_waited_for(type_: str, status: bytes) -> None:
    async with api(limits=ApiLimits(body_timeout_s=0.3)) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ncontent-type: " + type_.encode())
        writer.write(b"\r\ncontent-length: 100\r\n\r\n{")
        async with asyncio.timeout(60):
            answer = await reader.read()  # to its end: the connection is closed
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert b"BodyTimeoutError" in answer
        assert b'"field":"body","allowed":"0.3 s"' in answer
        writer.close()
        await writer.wait_closed()


async def test_only_so_many_streams_are_read_at_once() -> None:
    async with api(limits=ApiLimits(streams=1, body_timeout_s=600)) as client:
        goes_on, begun = asyncio.Event(), asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            yield json.dumps(WORK).encode() + b"\n"
            begun.set()
            await goes_on.wait()

        first = asyncio.create_task(client.post("/v1/messages", content=body(), headers=NDJSON))
        await begun.wait()
        line = json.dumps(WORK)
        while (second := await client.post("/v1/messages", content=line, headers=NDJSON)).status_code == 200:
            pass  # the first has been sent, and may not have arrived
        problem_of(second, 429, "TooManyStreamsError")
        assert second.headers["retry-after"] == "1"
        goes_on.set()
        assert (await first).status_code == 200
        assert (await client.post("/v1/messages", content=line, headers=NDJSON)).status_code == 200


async def test_a_client_that_asks_too_often_is_told_how_long_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    monkeypatch.setattr("aiodelay.service.api.security.SystemClock", lambda: clock)
    async with api(tokens=TOKENS, limits=ApiLimits(rate=1, burst=3)) as client:
        reader, scheduler = bearer(SECRETS["read"]), bearer(SECRETS["schedule"])
        answers = [await client.get("/v1/counts", headers=reader) for _ in range(6)]
        assert [each.status_code for each in answers[:3]] == [200] * 3
        problem_of(answers[-1], 429, "TooManyRequestsError")
        assert answers[-1].headers["retry-after"] == "1"
        assert (await client.post("/v1/messages", json=WORK, headers=scheduler)).status_code == 201, "each has its own"
        guesses = [await client.get("/v1/counts", headers=bearer(f"guess {n}")) for n in range(6)]
        assert {each.status_code for each in guesses[:3]} == {401}
        problem_of(guesses[-1], 429, "TooManyRequestsError")
        assert (await client.get("/v1/counts", headers=reader)).status_code == 429
        clock.move(1_000)  # one request a second
        assert (await client.get("/v1/counts", headers=reader)).status_code == 200


async def test_pages_have_a_largest_size() -> None:
    async with api(limits=ApiLimits(max_page=5)) as client:
        for path in ("/v1/messages", "/v1/dead", "/v1/journal"):
            problem_of(await client.get(path, params={"limit": 6}), 422, "PageTooLargeError")
            problem_of(await client.get(path, params={"limit": 0}), 422, "ParameterError")
            assert (await client.get(path, params={"limit": 5})).status_code == 200
        body = "\n".join([json.dumps(WORK)] * 9)
        assert (await client.post("/v1/messages", content=body, headers=NDJSON)).status_code == 200
        assert len((await client.get("/v1/messages")).json()["messages"]) == 5


async def test_each_change_stands_in_the_audit_log_and_looking_does_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiodelay.audit")
    async with api(tokens=TOKENS) as client:
        scheduler, operator = bearer(SECRETS["schedule"]), bearer(SECRETS["operate"])
        await client.post("/v1/messages", json=WORK | {"id": "m"}, headers=scheduler)
        await client.put("/v1/messages/m", json=WORK, headers=scheduler)
        await client.post("/v1/messages/m/reschedule", json={"delay": "2h"}, headers=scheduler)
        await client.post("/v1/messages/m/fire", headers=scheduler)
        await client.delete("/v1/messages/m", headers=scheduler)
        await client.delete("/v1/messages/m", headers=scheduler)
        await client.post("/v1/messages", content=json.dumps(WORK), headers=scheduler | NDJSON)
        for path in ("/v1/pause", "/v1/resume"):
            await client.post(path, json={"what": "work"}, headers=operator)
        for path in ("/v1/dead/redrive", "/v1/dead/purge"):
            await client.post(path, json={"letters": [{"id": "d", "revision": 1}]}, headers=operator)
        plan = await client.post("/v1/bulk", json={"action": "cancel"}, headers=operator)
        await client.post(f"/v1/bulk/{plan.json()['confirm']}", headers=operator)
        await client.get("/v1/messages", headers=bearer(SECRETS["read"]))
    lines = [json.loads(record.message) for record in caplog.records if record.name == "aiodelay.audit"]
    assert [(each["action"], each["by"]) for each in lines] == [
        ("schedule", "scheduleer"),
        ("schedule", "scheduleer"),
        ("reschedule", "scheduleer"),
        ("fire", "scheduleer"),
        ("cancel", "scheduleer"),
        ("cancel", "scheduleer"),
        ("schedule_many", "scheduleer"),
        ("pause", "operateer"),
        ("resume", "operateer"),
        ("redrive", "operateer"),
        ("purge", "operateer"),
        ("bulk cancel", "operateer"),
    ]
    assert [each["outcome"] for each in lines[:6]] == [
        "stored",
        "replaced",
        "rescheduled",
        "fired",
        "cancelled",
        "not_found",
    ]
    assert {each["from"] for each in lines} == {"127.0.0.1"}
    assert lines[-1]["outcomes"] == {"cancelled": 1}


async def test_a_change_of_which_nobody_knows_whether_it_was_made_is_told_and_audited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Silent(MemoryStore):
        async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> list[Unknown]:
            return [Unknown("no answer")] * len(commands)

    caplog.set_level(logging.INFO, "aiodelay.audit")
    async with (
        Scheduler(Silent(), dispatch=False, store_timeout="50ms") as scheduler,
        serving_api(scheduler, **ALL) as client,
    ):
        for method, path in (("POST", "/v1/messages"), ("DELETE", "/v1/messages/m")):
            answer = await client.request(method, path, json=WORK | {"id": "m"})
            assert "Idempotency-Key" in problem_of(answer, 504, "OutcomeUnknownError")["detail"]
        line = await client.post("/v1/messages", content=json.dumps(WORK), headers=NDJSON)
        assert json.loads(line.text.splitlines()[0])["problem"]["error"] == "OutcomeUnknownError"
    lines = [json.loads(record.message) for record in caplog.records if record.name == "aiodelay.audit"]
    assert [(each["action"], each.get("id"), each["outcome"]) for each in lines] == [
        ("schedule", "m", "OutcomeUnknownError"),
        ("cancel", "m", "OutcomeUnknownError"),
        ("schedule_many", None, "done"),
    ]
    assert lines[-1]["refused"] == 1


async def test_a_change_in_parts_that_the_store_breaks_off_has_an_unknown_outcome(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(MemoryStore):
        async def fail(self, *_: object, **__: object) -> NoReturn:
            raise StoreUnavailableError("memory://", "no answer")

        purge = pause = resume = set_limits = fail

        async def redrive(self, keys: Sequence[DeadKey]) -> Sequence[Outcome]:
            await super().redrive(keys[:1])
            await self.fail()

    caplog.set_level(logging.INFO, "aiodelay.audit")
    letters = {"letters": [{"id": "d", "revision": 1}]}
    async with Scheduler(Failing(), dispatch=False) as scheduler, serving_api(scheduler, **ALL) as client:
        for path, body in (
            ("/v1/dead/redrive", letters),
            ("/v1/dead/purge", letters),
            ("/v1/pause", {"what": "work"}),
            ("/v1/resume", {"what": "work"}),
            ("/v1/limits", {"what": "work", "limits": []}),
        ):
            answer = await client.post(path, json=body)
            assert "in part; repeat" in problem_of(answer, 504, "OutcomeUnknownError")["detail"]
            assert answer.headers["retry-after"] == "1"
    lines = [json.loads(record.message) for record in caplog.records if record.name == "aiodelay.audit"]
    assert [each["outcome"] for each in lines] == ["StoreUnavailableError"] * 5


async def test_a_stream_that_is_cancelled_is_audited_with_its_counts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiodelay.audit")
    parts = ["{\n", (json.dumps(WORK) + "\n") * 1_000]

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": parts.pop(0).encode(), "more_body": True}

    async def send(_: object) -> None:
        pass

    async with Scheduler("memory://", dispatch=False) as scheduler:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/messages",
            "query_string": b"",
            "headers": [(b"host", b"localhost"), *((k.encode(), v.encode()) for k, v in NDJSON.items())],
            "client": ("127.0.0.1", 1),
        }
        running = asyncio.create_task(admin(scheduler, **ALL)(scope, receive, send))

        async def stored() -> int:
            return sum(count.scheduled for count in (await scheduler.counts()).values())

        await until(stored, "messages are stored")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        (line,) = [json.loads(record.message) for record in caplog.records]
        assert (line["action"], line["refused"], line["outcome"]) == ("schedule_many", 1, "CancelledError")
        assert 0 < line["stored"] <= await stored()


async def test_only_who_has_planned_may_confirm() -> None:
    other = Token(name="other", hash=hash_token("other"), scopes=("operate",))
    async with api(tokens=[*TOKENS, other]) as client:
        plan = await client.post("/v1/bulk", json={"action": "cancel"}, headers=bearer(SECRETS["operate"]))
        path = f"/v1/bulk/{plan.json()['confirm']}"
        problem_of(await client.post(path, headers=bearer("other")), 404, "PlanNotFoundError")
        assert (await client.post(path, headers=bearer(SECRETS["operate"]))).status_code == 200


EVIL = ("a\r\nX-Evil: 1", "a\x00b", "\u2028", "\x1b[31m", "a\nINFO forged")


async def test_nothing_that_is_given_breaks_a_line_of_a_log_or_of_a_header(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with api() as client:
        for evil in EVIL:
            for answer in (
                await client.post("/v1/messages", json=WORK | {"id": evil}),
                await client.post("/v1/messages", json=WORK | {"to": f"handler:{evil}"}),
                await client.post("/v1/messages", json=WORK | {"headers": {evil: "1"}}),
                await client.post("/v1/messages", json=WORK | {evil: "1"}),
                await client.put("/v1/messages/" + httpx.QueryParams({"q": evil})["q"].encode().hex(), json={evil: 1}),
                await client.post("/v1/pause", json={"what": evil}),
                await client.get("/v1/messages", params={"state": evil}),
                await client.get("/v1/messages", params={"lane": evil}),
                await client.get("/v1/messages", params={"after": evil}),
                await client.get("/v1/messages", params={"store": evil}),
                await client.get("/v1/messages", params={"due_from": evil}),
            ):
                assert 400 <= answer.status_code < 500, answer.text
                assert answer.json()["detail"].isprintable()
                assert "x-evil" not in answer.headers
        told = await client.post("/v1/dead/purge", json={"letters": [{"id": evil, "revision": 1} for evil in EVIL]})
        assert told.json() == {"purged": 0}
    ours = [record for record in caplog.records if record.name.startswith("aiodelay")]
    assert [record.name for record in ours].count("aiodelay.audit") == 1
    assert all(record.getMessage().isprintable() for record in ours)


async def test_paths_name_ids_and_nothing_else() -> None:
    async with api() as client:
        for path in (
            "/v1/messages/..%2F..%2Fetc%2Fpasswd",
            "/v1/messages/%2e%2e",
            "/v1/messages/a%00b",
            "/v1/messages/%ff",
        ):
            answer = await client.get(path)
            assert answer.status_code in (404, 422), path
            assert answer.headers["content-type"] == "application/problem+json"
        odd = "../x/fire?#&=%"
        assert (await client.post("/v1/messages", json=WORK | {"id": odd})).status_code == 201
        quoted = "/v1/messages/" + "".join(f"%{byte:02x}" for byte in odd.encode())
        assert (await client.get(quoted)).json()["id"] == odd
        assert (await client.delete(quoted)).json() == {"id": odd, "outcome": "cancelled"}


async def test_no_secret_stands_in_an_error_or_at_debug_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    payload, header, key, _ = PLANTED
    good = WORK | {"payload": payload, "key": key, "headers": {"authorization": header}, "id": "m"}
    told: list[str] = []
    async with api(tokens=TOKENS) as client:
        scheduler = bearer(SECRETS["schedule"])
        for changed in (
            {},
            {"delay": "-1s"},
            {"to": "x"},
            {"id": ""},
            {"conflict": 7},
            {"at": 5},
            {"unknown": payload},
        ):
            answer = await client.post("/v1/messages", json=good | changed, headers=scheduler)
            told.append(answer.text)
        answer = await client.post("/v1/messages", content=json.dumps(good) + "x", headers=scheduler | NDJSON)
        told.append(answer.text)
        for method in ("PUT", "DELETE"):
            await client.request(method, "/v1/messages/m", json=good, headers=scheduler)
        told.append((await client.get("/v1/messages", headers=scheduler)).text)
        told.append((await client.get("/v1/messages/m", headers=bearer(payload))).text)
    told += [
        record.getMessage() + str(vars(record))
        for record in caplog.records
        if record.name.startswith(("aiodelay", "uvicorn"))
    ]
    assert len(told) > 12
    for text in told:
        assert not [each for each in (*PLANTED, *SECRETS.values()) if each in text], text


async def test_what_fails_unexpectedly_is_told_to_the_log_and_not_to_the_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(MemoryStore):
        async def counts(self) -> Any:  # noqa: ANN401 - it never returns
            raise KeyError("something private")

        async def paused(self) -> Any:  # noqa: ANN401 - it never returns
            raise StoreUnavailableError("memory://", "gone")

    async with Scheduler(Broken(), dispatch=False) as scheduler, serving_api(scheduler, **ALL) as client:
        answer = await client.get("/v1/counts")
        problem_of(answer, 500, "InternalError")
        assert "private" not in answer.text
        assert answer.headers["x-content-type-options"] == "nosniff"
        away = await client.get("/v1/pauses")
        problem_of(away, 503, "StoreUnavailableError")
        assert away.headers["retry-after"] == "1"
        assert (await client.get("/v1/stores")).status_code == 200, "it goes on"
    assert "something private" in caplog.text

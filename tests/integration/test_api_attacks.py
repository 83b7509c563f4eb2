"""Attacks on the HTTP API and the page: malformed, forged, tampered and exhausting requests."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from aiodelay import Scheduler
from aiodelay.core.ids import new_op
from aiodelay.core.values import Again, At, Demand, Envelope, Put
from aiodelay.memory import MemoryStore
from aiodelay.service import Token, Tokens, admin, hash_token
from aiodelay.service.api.application import ROUTERS
from aiodelay.service.api.schemas import scopes_of
from aiodelay.service.api.streams import MOST_REFUSED
from aiodelay.service.page import live
from aiodelay.service.page.application import ROUTES
from tests.support.api import ALL, SECRETS, TOKENS, bearer, client_of, problem_of, serving_api
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

WORK = {"to": "handler:work", "payload": "p", "delay": "1h"}
FORM = {"content-type": "application/x-www-form-urlencoded"}
BIG = "9" * 5_000
EVIL_SITE = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}


@asynccontextmanager
async def service(store: str = "memory://?journal=100", **options: Any) -> AsyncIterator[httpx.AsyncClient]:  # noqa: ANN401
    """The page and the API over a store."""
    async with (
        Scheduler(store, dispatch=False) as scheduler,
        serving_api(scheduler, **(ALL | options)) as client,
    ):
        yield client


async def csrf_of(client: httpx.AsyncClient, path: str = "/messages") -> str:
    """Return what a form of the page brings along."""
    found = re.search(r'name="csrf" value="(\w+)"', (await client.get(path)).text)
    assert found is not None
    return found[1]


async def sign_in(client: httpx.AsyncClient, secret: str, **headers: str) -> httpx.Response:
    csrf = await csrf_of(client, "/login")
    return await client.post("/login", data={"csrf": csrf, "token": secret}, headers=headers)


def is_refused(answer: httpx.Response) -> bool:
    """Whether the answer to a form leads back to it, with what was typed."""
    return answer.status_code == 303 and "draft=" in answer.headers["location"]


def all_is_well(caplog: pytest.LogCaptureFixture) -> bool:
    """Whether nothing has failed that should not have."""
    return not [record for record in caplog.records if record.levelno >= logging.ERROR]


# --- what no program sends --------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [(), TOKENS], ids=["open", "tokens"])
@pytest.mark.parametrize("host", ["[", "[::1", "a b", "evil@127.0.0.1", "127.0.0.1:99999999", "\u00ff", "a/b", "a\\b"])
async def test_a_host_that_is_none_is_refused(
    caplog: pytest.LogCaptureFixture, tokens: tuple[Token, ...], host: str
) -> None:
    async with service(tokens=tokens) as client:
        for path in ("/v1/counts", "/", "/login"):
            answer = await client.get(path, headers={b"host": host.encode("latin-1")})
            problem_of(answer, 400, "HostError")
    assert all_is_well(caplog)


@pytest.mark.parametrize("origin", ["http://[", "[", "//", "null", "", "http://", "\u00ff"])
async def test_an_origin_that_is_none_is_another_site(caplog: pytest.LogCaptureFixture, origin: str) -> None:
    async with service() as client:
        for headers in ({}, {"host": ""}):
            given = {name.encode(): value.encode("latin-1") for name, value in (headers | {"origin": origin}).items()}
            answer = await client.post("/v1/pause", json={"what": "work"}, headers=given)
            problem_of(answer, 403, "CrossSiteError")
    assert all_is_well(caplog)


async def test_nobody_is_sent_to_where_the_header_host_says() -> None:
    async with service(tokens=TOKENS) as client:
        for path in ("/v1/counts/", "/messages/", "/dead/", "/login/"):
            answer = await client.get(path, headers={"host": "evil.example"})
            assert "evil.example" not in answer.headers.get("location", ""), path
        answer = await client.get("/messages", headers={"host": "evil.example"})
        assert answer.headers["location"] == "/login?back=%2Fmessages"


def cursor(*place: object) -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(place)).decode().rstrip("=")


@pytest.mark.parametrize("store", ["memory", "sqlite"])
async def test_cursors_that_were_tampered_with(caplog: pytest.LogCaptureFixture, tmp_path: Path, store: str) -> None:
    async with service("memory://" if store == "memory" else f"sqlite:///{tmp_path}/x.db") as client:
        for at in (1 << 63, (1 << 64) - 1, -(1 << 63)):
            for path, after in (
                ("messages", cursor(at, "x")),
                ("dead", cursor(0, "x", at)),
                ("dead", cursor(at, "", 0)),
            ):
                problem_of(await client.get(f"/v1/{path}", params={"after": after}), 422, "InputError")
                assert (await client.get(f"/{path}", params={"after": after})).status_code == 422
        for after in (
            cursor(0),
            cursor("x", 0),
            cursor(0, "x", 0, 0),
            cursor(0, b"x"),
            cursor(1.5, "x"),
            "=",
            "A" * 1_999,
        ):
            problem_of(await client.get("/v1/messages", params={"after": after}), 422, "InputError")
        assert (await client.get("/v1/messages", params={"after": cursor(0, "\0")})).status_code == 200
    assert all_is_well(caplog)


@pytest.mark.parametrize("number", [BIG, "281474976710656", "-1", "\u0663", "1e3"])
async def test_revisions_that_are_none(caplog: pytest.LogCaptureFixture, tmp_path: Path, number: str) -> None:
    async with service(f"sqlite:///{tmp_path}/x.db") as client:
        problem_of(await client.get(f"/v1/dead/{number}/x"), 422, "ParameterError")
        assert (await client.get(f"/dead/{number}/x")).status_code == 422
        form = {"csrf": await csrf_of(client), "action": "redrive", "letter": f"{number} x"}
        assert is_refused(await client.post("/plan", data=form))
        letters = {"letters": [{"id": "x", "revision": number}]}
        assert (await client.post("/v1/dead/purge", json=letters)).status_code == 422
    assert all_is_well(caplog)


async def test_of_a_field_given_twice_the_same_one_is_checked_and_stored() -> None:
    async with service() as client:
        plain = {"content-type": "application/json"}
        text = '{"to": "handler:work", "to": "elsewhere:x", "payload": "", "delay": "1h"}'
        problem_of(await client.post("/v1/messages", content=text, headers=plain), 403, "TargetNotAllowedError")
        text = '{"to": "elsewhere:x", "to": "handler:work", "payload": "", "delay": "1h", "id": "a"}'
        assert (await client.post("/v1/messages", content=text, headers=plain)).status_code == 201
        assert (await client.get("/v1/messages/a")).json()["to"] == "handler:work"


# --- what wears it out ------------------------------------------------------------------------------------


async def test_a_stream_of_nothing_but_mistakes_ends() -> None:
    async with service() as client:
        lines = [json.dumps(WORK), *["x"] * (MOST_REFUSED + 5_000), json.dumps(WORK)]
        headers = {"content-type": "application/x-ndjson"}
        answer = await client.post("/v1/messages", content="\n".join(lines), headers=headers)
        last = json.loads(answer.text.splitlines()[-1])
        assert (last["stored"], last["refused"]) == (1, MOST_REFUSED)
        assert last["problem"]["error"] == "TooManyRefusedError"
        assert str(MOST_REFUSED + 2) in last["problem"]["detail"], "it says from where on nothing was read"


async def test_a_server_can_end_while_a_page_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "EVERY_S", 0.1)
    async with Scheduler("memory://", dispatch=False) as scheduler:
        app = Starlette(routes=[Mount("/delayed", admin(scheduler))])
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))  # waits without limit
        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = asyncio.create_task(server.serve([listening]))
            base = f"http://127.0.0.1:{listening.getsockname()[1]}"
            await until(lambda: server.started, "uvicorn has started")
            async with client_of(base) as client, client.stream("GET", "/delayed/live") as answer:
                lines = answer.aiter_lines()
                assert (await anext(lines)).startswith("data: ")
                server.should_exit = True
                async with asyncio.timeout(60):
                    await serving


async def test_the_head_of_the_live_stream_ends() -> None:
    async with service() as client:
        answer = await client.head("/live")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert (await client.get("/v1/counts")).status_code == 200, "on the same connection"


async def test_thousands_of_lanes_do_not_make_the_page_long() -> None:
    async with service() as client:
        lines = [json.dumps(WORK | {"to": f"handler:lane-{n:04}"}) for n in range(1_000)]
        headers = {"content-type": "application/x-ndjson"}
        assert (await client.post("/v1/messages", content="\n".join(lines), headers=headers)).status_code == 200
        for path in ("/", "/sinks", "/messages"):
            text = (await client.get(path)).text
            assert len(text) < 200_000
            assert "lane-0199" in text
            assert "lane-0200" not in text
            assert path == "/messages" or "The API lists 800 more" in text


async def test_no_more_pages_follow_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_VIEWERS", 3)
    async with service() as client, AsyncExitStack() as stack:
        opened = [client.stream("GET", "/live", headers={"connection": "close"}) for _ in range(12)]
        answers = await asyncio.gather(*(stack.enter_async_context(each) for each in opened))
        following = [each.aiter_bytes() for each in answers if each.status_code == 200]
        first = await asyncio.gather(*(anext(each, b"") for each in following))
        assert len([each for each in first if each]) == 3


# --- who is not who he says -------------------------------------------------------------------------------


async def test_taking_the_last_token_away_opens_nothing() -> None:
    tokens = Tokens(TOKENS)
    async with service(tokens=tokens) as client:
        tokens.load([])
        problem_of(await client.get("/v1/counts"), 401, "UnauthorizedError")
        problem_of(await client.get("/v1/counts", headers=bearer(SECRETS["read"])), 401, "UnauthorizedError")
        assert (await client.get("/")).headers["location"].startswith("/login")
        tokens.load(TOKENS)
        assert (await client.get("/v1/counts", headers=bearer(SECRETS["read"]))).status_code == 200
    tokens = Tokens()
    async with service(tokens=tokens) as client:
        assert (await client.get("/v1/counts")).status_code == 200
        tokens.load(TOKENS)
        problem_of(await client.get("/v1/counts"), 401, "UnauthorizedError")


async def test_a_page_bound_to_this_machine_by_name_tricks_reads_nothing_and_changes_nothing() -> None:
    """A site whose name was bent to 127.0.0.1 is of the same origin for a browser: only the name tells."""
    async with service() as client:
        for path in (*(route.path for route in ROUTES if "{" not in route.path), "/v1/messages", "/schedules", "/info"):
            answer = await client.get(path, headers={"host": "evil.example:8080"})
            assert answer.status_code in (401, 405) or path == "/login", path
        own = {"host": "evil.example", "origin": "http://evil.example", "sec-fetch-site": "same-origin"}
        problem_of(await client.post("/v1/pause", json={"what": "work"}, headers=own), 401, "UnauthorizedError")
        form = {"csrf": await csrf_of(client), "action": "pause", "what": "work"}
        assert (await client.post("/plan", data=form, headers=own)).status_code == 401


async def test_another_site_cannot_send_a_form_of_the_page() -> None:
    async with service() as client:
        csrf = await csrf_of(client)
        for path in ("/plan", "/confirm", "/login", "/logout", "/theme"):
            form = {"csrf": csrf, "action": "pause", "what": "work"}
            problem_of(await client.post(path, data=form, headers=EVIL_SITE), 403, "CrossSiteError")
            for forged in ({}, {"csrf": ""}, {"csrf": "0" * 64}, {"csrf": "\u00e9"}):
                answer = await client.post(path, data=form | {"csrf": ""} | forged)
                assert answer.status_code == 403, path
                assert "CsrfError" in answer.text
            assert (await client.post(path, json=form)).status_code == 415, "nor is it taken as anything else"


async def test_a_form_of_one_session_is_none_of_another() -> None:
    async with service(tokens=TOKENS) as client:
        before = await csrf_of(client, "/login")
        await sign_in(client, SECRETS["read"])
        problem = await client.post("/plan", data={"csrf": before, "action": "pause", "what": "work"})
        assert "CsrfError" in problem.text


async def test_the_cookie_of_a_session() -> None:
    async with service(tokens=TOKENS) as client:
        answer = await sign_in(client, "guessed")
        assert answer.status_code == 303
        assert answer.headers["location"].endswith("wrong=yes")
        assert not client.cookies
        answer = await sign_in(client, SECRETS["read"])
        (cookie,) = answer.headers.get_list("set-cookie")
        assert answer.headers["location"] == "/"
        assert {"HttpOnly", "Path=/", "SameSite=strict"} <= {part.strip() for part in cookie.split(";")}
        assert SECRETS["read"] not in cookie
        assert "domain" not in cookie.lower(), "it is for this host alone"
        assert "Secure" not in cookie, "or browsers would not send it back here, without TLS"
        behind_tls = await sign_in(client, SECRETS["read"], **{"x-forwarded-proto": "https"})
        assert "Secure" in behind_tls.headers["set-cookie"]


async def test_a_session_is_always_a_new_one_and_the_one_before_ends() -> None:
    async with service(tokens=TOKENS) as client:
        client.cookies.set("aiodelay-session", "planted", domain="127.0.0.1")
        await sign_in(client, SECRETS["read"])
        first = client.cookies["aiodelay-session"]
        assert first != "planted"
        assert (await client.get("/v1/counts")).status_code == 200
        await sign_in(client, SECRETS["read"])
        second = client.cookies["aiodelay-session"]
        client.cookies.set("aiodelay-session", first, domain="127.0.0.1")
        problem_of(await client.get("/v1/counts"), 401, "UnauthorizedError")
        client.cookies.set("aiodelay-session", second, domain="127.0.0.1")
        assert (await client.post("/logout", data={"csrf": await csrf_of(client)})).status_code == 303
        client.cookies.set("aiodelay-session", second, domain="127.0.0.1")
        problem_of(await client.get("/v1/counts"), 401, "UnauthorizedError")


@pytest.mark.parametrize(
    "back", ["//evil.example", "/\\evil.example", "https://evil.example", "/\r\nx: y", "javascript:0"]
)
async def test_nobody_is_sent_elsewhere_after_signing_in(back: str) -> None:
    async with service(tokens=TOKENS) as client:
        csrf = await csrf_of(client, "/login")
        answer = await client.post("/login", data={"csrf": csrf, "token": SECRETS["read"], "back": back})
        assert answer.headers["location"] == "/"
        assert "x" not in answer.headers


async def test_no_link_of_a_message_leads_to_another_message() -> None:
    async with service() as client:
        for message_id in ("a/../b", "a/./b", "b?x=y", "b#c"):
            assert (await client.post("/v1/messages", json=WORK | {"id": message_id})).status_code == 201
            path = f"/messages/{quote(message_id, safe='')}"
            assert f'href="{path}"' in (await client.get("/messages")).text
            text = (await client.get(path)).text
            assert f'<a href="{path}">Load again</a>' in text
            assert f'name="back" value="{path}"' in text


async def test_each_form_of_the_page_needs_the_scope_of_what_it_does() -> None:
    one = Token(name="one", hash=hash_token("one" * 10), scopes=("read", "schedule"))
    async with service(tokens=[*TOKENS, one]) as client:
        await client.post("/v1/messages", json=WORK | {"id": "m"}, headers=bearer("one" * 10))
        await sign_in(client, SECRETS["read"])
        csrf = await csrf_of(client)
        for action, chosen in (("cancel", {"id": "m"}), ("fire", {"id": "m"}), ("pause", {"what": "work"})):
            answer = await client.post("/plan", data={"csrf": csrf, "action": action} | chosen)
            assert (answer.status_code, "ScopeError" in answer.text) == (403, True)
        client.cookies.clear()
        await sign_in(client, "one" * 10)
        csrf = await csrf_of(client)
        for form in ({"id": ["m", "n"]}, {"id": "m", "scope": "all"}, {"action": "pause", "what": "work"}):
            answer = await client.post("/plan", data={"csrf": csrf, "action": "cancel"} | form)
            assert (answer.status_code, "ScopeError" in answer.text) == (403, True), form
        plan = await client.post("/plan", data={"csrf": csrf, "action": "cancel", "id": "m"})
        answer = await client.get(plan.headers["location"])
        confirm = re.search(r'name="confirm" value="([^"]+)"', answer.text)
        assert confirm is not None
        client.cookies.clear()
        await sign_in(client, SECRETS["operate"])
        stolen = {"csrf": await csrf_of(client, "/login"), "confirm": confirm[1]}
        assert (await client.post("/confirm", data=stolen)).status_code in (403, 404), "only who was asked may confirm"


async def test_no_answer_can_be_framed_sniffed_or_read_by_another_site() -> None:
    async with service() as client:
        pages = [route.path for route in ROUTES if "{" not in route.path and route.path != "/live"]
        api = [path for method, path, _ in scopes_of(ROUTERS) if method == "GET" and "{" not in path]
        for path in (*pages, *api, "/docs", "/openapi.json", "/static/page.js", "/nowhere"):
            answer = await client.get(path, headers={"origin": "https://evil.example"})
            policy = answer.headers["content-security-policy"]
            assert "frame-ancestors 'none'" in policy, path
            assert policy.startswith("default-src 'none'"), path
            assert "unsafe" not in policy, path
            assert answer.headers["x-frame-options"] == "DENY"
            assert answer.headers["cache-control"] == "no-store" or path.startswith("/static/"), path
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"
            assert answer.headers["cross-origin-opener-policy"] == "same-origin"
            assert not [name for name in answer.headers if name.startswith("access-control")], path


async def test_a_method_that_a_path_does_not_have_is_told_all_that_it_has() -> None:
    async with service() as client:
        for method, path, allowed in (
            ("PATCH", "/v1/messages", "GET, POST"),
            ("OPTIONS", "/v1/messages/m", "DELETE, GET, PUT"),
            ("GET", "/v1/pause", "POST"),
            ("DELETE", "/login", "GET, HEAD, POST"),
        ):
            answer = await client.request(method, path)
            problem_of(answer, 405, "MethodNotAllowedError")
            assert answer.headers["allow"] == allowed


async def test_text_that_is_not_valid_in_utf_8_is_shown_with_escapes() -> None:
    store = MemoryStore(journal=100)
    async with Scheduler(store, dispatch=False) as scheduler, serving_api(scheduler, **ALL) as client:
        await store.apply([Put(new_op(), Envelope("m", "work", payload=b"x"), At(0))])
        async with store.work("w", ["work"]) as running:
            (claim,) = (await running.claim({"work": Demand(1)}, request=new_op().hex(), lease_ms=9_000)).claims
            await running.settle([Again("m", claim.record.revision, claim.token, 0, 1, "OSError: menu\udce9.txt")])
        for path in ("/messages", "/messages/m"):
            answer = await client.get(path)
            assert answer.status_code == 200
            assert "OSError: menu\\udce9.txt" in answer.text


MARKUP = "<script>alert(1)</script>\"'&{{7*7}}"


async def test_what_others_have_written_is_shown_as_text() -> None:
    async with service() as client:
        given = {"id": MARKUP, "payload": MARKUP, "key": MARKUP, "headers": {"x": MARKUP}}
        assert (await client.post("/v1/messages", json=WORK | given)).status_code == 201
        quoted = "".join(f"%{byte:02x}" for byte in MARKUP.encode())
        for path in (
            "/",
            "/messages",
            f"/messages/{quoted}",
            f"/messages?text={quoted}",
            f"/messages?lane={quoted}",
            f"/messages?id={quoted}",
            f"/login?back={quoted}",
            f"/?store={quoted}",
            f"/dead/1/{quoted}",
        ):
            text = (await client.get(path)).text
            assert "<script>alert" not in text, path
            assert "49" not in re.findall(r"&#39;&amp;(.{0,6})", text), path

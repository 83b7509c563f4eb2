"""docs/secure.md: the service is exactly as open, and as limited, as the page says."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path

import pytest

from aiodelay import Scheduler
from aiodelay.service import ApiLimits, Token, admin
from aiodelay.service.api import bulk, plans, sessions, streams
from aiodelay.service.api.application import ROUTERS
from aiodelay.service.api.schemas import scopes_of
from aiodelay.service.app import make_app
from aiodelay.service.config import ApiSettings, Limits
from aiodelay.service.connections import MOST_HEAD, MOST_URL, Server
from aiodelay.service.health import Health
from aiodelay.service.page import live
from aiodelay.service.page.application import ROUTES
from aiodelay.service.reading import read_configuration
from aiodelay.service.serve import listening
from tests.support.api import ALL, SECRETS, TOKENS, bearer, client_of, problem_of, serving_api, serving_app

PAGE = (Path(__file__).parents[2] / "docs" / "secure.md").read_text()
WORK = {"to": "handler:work", "payload": "p", "delay": "1h"}


def after(mark: str) -> str:
    return PAGE.partition(f"<!-- {mark}: ")[2].partition("-->\n\n")[2].partition("\n\n")[0]


@pytest.mark.asyncio
async def test_what_answers_without_a_token_is_what_the_page_lists() -> None:
    paths = {path for method, path, _ in scopes_of(ROUTERS) if method == "GET"} | {route.path for route in ROUTES}
    paths |= {"/livez", "/readyz", "/docs", "/openapi.json", "/static/page.js", "/nowhere"}
    async with Scheduler("memory://", dispatch=False) as scheduler:
        health = Health({"default": scheduler}, Limits())
        health.opening.clear()
        app = make_app(health, admin(scheduler, tokens=TOKENS, read_only=False))
        async with serving_app(app) as base, client_of(base) as client:
            answers = {path: await client.get(re.sub(r"\{\w+(:\w+)?\}", "1", path)) for path in paths}
    opened = {f"/{path.split('/')[1]}" for path, answer in answers.items() if answer.status_code == 200}
    assert opened == set(re.findall(r"`(/\w[\w.]*)`", after("open")))
    assert answers["/"].headers["location"] == "/login?back=%2F"


def test_its_limits_are_those_of_the_code() -> None:
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in after("limits").splitlines()[2:]]
    told = [int(number.replace(",", "")) for _, number, _ in rows]
    api, limits = ApiSettings(), ApiLimits()
    assert told == [
        api.max_connections,
        MOST_HEAD,
        MOST_URL,
        api.max_body,
        Limits().max_payload,
        api.body_timeout.total_seconds(),
        Server(admin(Scheduler("memory://")), most=10, still_s=100).config.timeout_keep_alive,
        api.rate,
        2 * api.rate,
        api.max_page,
        limits.max_examined,
        bulk.MOST,
        plans.PLAN_MS / 60_000,
        plans.RUNNING,
        limits.streams,
        limits.max_stream,
        streams.MOST_REFUSED,
        live.MOST_VIEWERS,
        sessions.SESSIONS,
    ]
    named = {setting.strip("`") for _, _, setting in rows if setting.startswith("`")}
    known = {f"api.{name}" for name in ApiSettings.model_fields} | {f"limits.{name}" for name in Limits.model_fields}
    assert named <= known


HEAD = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
ENDING = b"\r\n\r\n"


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (HEAD + b"a: " + b"x" * MOST_HEAD, b"HTTP/1.1 400"),  # goes on and on
        (HEAD + b"a: " + b"x" * MOST_HEAD + ENDING, b"HTTP/1.1 431"),
        (b"GET /?a=" + b"x" * MOST_URL + b" HTTP/1.1\r\nhost: localhost" + ENDING, b"HTTP/1.1 414"),
        (HEAD + b"content-length: 5\r\ntransfer-encoding: chunked" + ENDING + b"0" + ENDING, b"HTTP/1.1 400"),
        (HEAD + b"content-encoding: gzip\r\ncontent-length: 5" + ENDING, b"HTTP/1.1 415"),
    ],
    ids=["endless headers", "large headers", "long URL", "two lengths", "gzip"],
)
@pytest.mark.asyncio
async def test_a_head_beyond_the_limits_is_refused_and_the_connection_closed(request_: bytes, answer: bytes) -> None:
    server = Server(admin(Scheduler("memory://")), most=10, still_s=100)
    with listening("127.0.0.1", 0) as listener:
        running = asyncio.create_task(server.serve([listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(request_)
        async with asyncio.timeout(60):
            told = await reader.read()
        assert told.startswith(answer), told
        assert b"connection: close" in told.lower()
        writer.close()
        server.should_exit = True
        await running


def test_its_token_is_one(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0])
    (tmp_path / "x.toml").chmod(0o600)
    (token,) = read_configuration(tmp_path / "x.toml").settings().api.tokens
    assert isinstance(token, Token)


@pytest.mark.asyncio
async def test_behind_a_proxy_that_ends_tls() -> None:
    async with Scheduler("memory://", dispatch=False) as scheduler:
        proxied = {"host": "delays.example.com", "x-forwarded-proto": "https", "x-forwarded-for": "127.0.0.1"}
        own = proxied | {"origin": "https://delays.example.com", "sec-fetch-site": "same-origin"}
        async with serving_api(scheduler, **(ALL | {"tokens": TOKENS})) as client:
            scheduling = bearer(SECRETS["schedule"])
            assert (await client.post("/v1/messages", json=WORK, headers=own | scheduling)).status_code == 201
            changed = own | {"host": "127.0.0.1:8080"} | scheduling
            problem_of(await client.post("/v1/messages", json=WORK, headers=changed), 403, "CrossSiteError")
            problem_of(await client.get("/v1/counts", headers=proxied), 401, "UnauthorizedError")
        async with serving_api(scheduler, **ALL) as client:
            for host in ("delays.example.com", "localhost"):
                for name in (
                    "via",
                    "forwarded",
                    "x-forwarded-for",
                    "x-forwarded-proto",
                    "x-forwarded-host",
                    "x-real-ip",
                ):
                    answer = await client.get("/v1/counts", headers={"host": host, name: "1"})
                    problem_of(answer, 401, "UnauthorizedError")


@pytest.mark.asyncio
async def test_who_signs_in_and_changes_something_is_in_the_audit_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiodelay.audit")
    token = Token(name="ops", hash=TOKENS[0].hash, scopes=("read", "schedule", "operate"))
    async with (
        Scheduler("memory://", dispatch=False) as scheduler,
        serving_api(scheduler, **(ALL | {"tokens": [token]})) as client,
    ):

        async def send(path: str, pattern: str, **fields: str) -> str:
            page = (await client.get("/login")).text
            csrf = re.search(r'name="csrf" value="(\w+)"', page)
            assert csrf is not None
            answer = await client.post(path, data={"csrf": csrf[1]} | fields, follow_redirects=True)
            found = re.search(pattern, answer.text)
            return found[1] if found else ""

        await send("/login", "()", token="guessed")
        await send("/login", "()", token=SECRETS["read"])
        confirm = await send("/plan", r'name="confirm" value="([^"]+)"', action="pause", what="work")
        await send("/confirm", "()", confirm=confirm)
    lines = [json.loads(record.message) for record in caplog.records if record.name == "aiodelay.audit"]
    assert [(each["action"], each.get("by"), each["from"]) for each in lines] == [
        ("refused token", None, "127.0.0.1"),
        ("sign in", "ops", "127.0.0.1"),
        ("page pause", "ops", "127.0.0.1"),
    ]
    assert lines[-1] == lines[-1] | {"store": "default", "ids": ["work"], "outcomes": {"paused": 1}}
    assert SECRETS["read"] not in caplog.text

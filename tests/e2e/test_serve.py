"""The service as an operator uses it: a process, a file, HTTP, signals."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from aiodelay import Scheduler
from aiodelay.service import hash_token
from aiodelay.service.health import PROBE
from aiodelay.testing.servers import redis_programs
from tests.support.api import problem_of
from tests.support.cli import Cli
from tests.support.command import DEADLINE_S, STOOD_STILL, aiodelay
from tests.support.servers import RedisServer, start
from tests.support.service import Service, until, until_ready
from tests.support.waiting import until_sync

PAGE = (Path(__file__).parents[2] / "docs" / "operate.md").read_text()
TOKEN = "planted-secret-token-0123456789"
PASSWORD = "planted-secret-password"
PAYLOAD = "planted-secret-payload"
AWAY = f'store = "redis://:{PASSWORD}@127.0.0.1:1?connect_timeout_ms=100"\n'
SOON = {"aiodelay.service.health.AGAIN_S": 0.1}
"""So long an answer of /readyz stands, in the place of a second."""
OPEN = 'allowed_targets = ["stdout:*", "handler:*"]\n[sinks.stdout]\nurl = "stdout:"\n[api]\nread_only = false\n'


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    server = start(redis_programs()[0].program)
    yield server
    server.stop()


def post(client: httpx.Client, **message: object) -> str:
    return id_in(client.post("/v1/messages", json=message))


def id_in(answer: httpx.Response) -> str:
    assert answer.is_success, answer.text
    name: str = answer.json()["id"]
    return name


# --- from start to end ------------------------------------------------------------------------------------


def test_without_a_file(tmp_path: Path) -> None:
    environment = {"AIODELAY": "/opt/aiodelay"}  # which is no setting, and somebody else's
    with Service(tmp_path, None, environment) as service, service.client() as client:
        until_ready(client)
        assert client.get("/livez").json() == {"status": "alive"}
        answer = client.get("/readyz")
        shown = json.loads(re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[0])
        assert list(answer.json()) == list(shown)
        assert list(answer.json()["stores"]["default"]) == list(shown["stores"]["default"])
        assert answer.headers["cache-control"] == "no-store"
        assert client.post("/v1/messages", json={"to": "stdout:x", "payload": "x", "delay": "0s"}).status_code == 403
        service.send(signal.SIGTERM)
        assert service.exit_code() == 0
        assert [line["message"] for line in service.logged()][-1] == "the service has stopped"
    assert (tmp_path / "aiodelay.db").exists()


def test_its_page_and_those_who_follow_it_hold_up_no_end(tmp_path: Path) -> None:
    badge = OPEN.replace("[api]", '[api]\nenvironment = "production"')
    with Service(tmp_path, badge) as service, service.client() as client:
        until_ready(client)
        assert '<strong class="badge env live">production</strong>' in client.get("/").text
        with client.stream("GET", "/live?view=hour") as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: <hx-partial")
            service.send(signal.SIGTERM)
            assert list(lines), "the stream ends in order, and is not cut off"
        assert service.exit_code() == 0


def test_what_is_posted_is_delivered(tmp_path: Path) -> None:
    with Service(tmp_path, OPEN) as service, service.client() as client:
        until_ready(client)
        name = post(client, to="stdout:x", payload="hello", delay="100ms")
        delivered = json.loads(service.out.wait_for(name))
        assert (delivered["to"], delivered["payload"]) == ("stdout:x", "hello")
        assert client.post("/v1/messages", json={"to": "stdin:x", "payload": "", "delay": "0s"}).status_code >= 400


def test_several_stores(tmp_path: Path) -> None:
    stores = '[stores.one]\nurl = "sqlite:///one.db"\n[stores.two]\nurl = "memory://"\nallowed_targets = []\n'
    with Service(tmp_path, OPEN.replace("[api]", stores + "[api]")) as service, service.client() as client:
        until_ready(client)
        assert list(client.get("/readyz").json()["stores"]) == ["one", "two"]
        message = {"to": "stdout:x", "payload": "hello", "delay": "0s"}
        assert client.post("/v1/messages", params={"store": "one"}, json=message).is_success
        assert client.post("/v1/messages", params={"store": "two"}, json=message).status_code == 403


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with Service(tmp_path, "[api]\nport = 1\n", {}, "--port", port) as service:
            assert service.exit_code() == 1
            assert "Address already in use" in service.err.seen[-1]
    with (
        Service(tmp_path, f"[api]\nport = {port}\n", {"AIODELAY_API__HOST": "::1"}) as service,
        service.client() as client,
    ):
        assert client.base_url.host == "::1"
        assert str(client.base_url.port) != port


def test_a_store_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with Service(tmp_path, AWAY + '[limits]\nopen_timeout = "200ms"\n') as service:
        assert service.exit_code() == 5, "".join(service.err.seen)
        assert "aiodelay: store default: redis://:***@127.0.0.1:1" in service.err.seen[-1]
        assert PASSWORD not in "".join(service.err.seen)


def test_while_it_waits_for_a_store_it_lives_says_so_and_heeds_signals(tmp_path: Path) -> None:
    with Service(tmp_path, AWAY + '[limits]\nopen_timeout = "1h"\n') as service, service.client() as client:
        answer = until(client, lambda answer: "127.0.0.1:1" in answer.text)
        assert (answer.status_code, answer.json()["stores"]["default"]["phase"]) == (503, "loading")
        assert answer.json()["reasons"][0] == "default: it is being opened"
        assert PASSWORD not in answer.text
        assert client.get("/livez").status_code == 200
        service.send(signal.SIGTERM)
        assert service.exit_code() == 0
        assert len([line for line in service.err.seen if "trying again for up to 1h" in line]) == 1


def test_it_opens_once_its_store_answers(tmp_path: Path, redis: RedisServer) -> None:
    redis.kill()
    with Service(tmp_path, f'store = "{redis.url}"\n', {"AIODELAY_LIMITS__OPEN_TIMEOUT": "1h"}) as service:
        service.err.wait_for("trying again for up to 1h")
        redis.start()
        with service.client() as client:
            until_ready(client)


def test_mistakes_are_told_before_anything_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "service"
    folder.mkdir()
    (folder / "aiodelay.toml").write_text('store = "nosql://"\n[api]\nport = -1\n')
    monkeypatch.chdir(folder)
    monkeypatch.delenv("AIODELAY_STORE", raising=False)
    run = Cli("", tmp_path)("serve", "--host", "127.0.0.1", store="nosql://")
    assert run.code == 1
    assert list(folder.iterdir()) == [folder / "aiodelay.toml"]


# --- the end ----------------------------------------------------------------------------------------------


def test_a_signal_under_load_loses_nothing(tmp_path: Path) -> None:
    acknowledged: list[str] = []

    def load() -> None:
        with service.client() as own:
            while True:
                try:
                    answer = own.post("/v1/messages", json={"to": "stdout:x", "payload": "x", "delay": "50ms"})
                except httpx.HTTPError:
                    return
                if answer.status_code in (503, 504):  # the end has cut it off
                    return
                acknowledged.append(id_in(answer))

    with Service(tmp_path, OPEN + "rate = 0\n") as service, service.client() as client:
        until_ready(client)
        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        service.out.wait_for(post(client, to="stdout:x", payload="x", delay="500ms"))
        until_sync(lambda: len(acknowledged) > 20, "twenty requests are answered")
        service.send(signal.SIGTERM)
        assert service.exit_code() == 0
        for thread in threads:
            thread.join()
        complaints = [line["message"] for line in service.logged() if line["level"] in ("warning", "error")]
        assert [each for each in complaints if not STOOD_STILL.search(each)] == []
        delivered = [json.loads(line)["id"] for line in service.out.seen]
    assert len(set(delivered)) == len(delivered)
    assert set(acknowledged) <= {*delivered, *asyncio.run(pending(tmp_path / "aiodelay.db"))}


async def pending(path: Path) -> list[str]:
    async with Scheduler(f"sqlite:///{path}", dispatch=False) as scheduler:
        return [snapshot.record.id async for snapshot in scheduler.pending()]


def test_requests_that_the_end_cuts_off_are_told_so(tmp_path: Path, redis: RedisServer) -> None:
    text = f'store = "{redis.url}?timeout_ms=100000"\n{OPEN}[limits]\ndrain = "1s"\n'
    large = "x" * 20_000  # the commands of the service itself are smaller
    requests = [
        ("POST", "/v1/messages", {"to": "stdout:x", "payload": large, "delay": "1h"}),
        ("GET", "/v1/dead", None),
    ]
    periods = {"aiodelay.service.connections.REQUESTS_END_S": 1, "aiodelay.engine.subscriptions.CANCEL_S": 2}
    with (
        Service(tmp_path, text, periods=periods) as service,
        service.client() as client,
        ThreadPoolExecutor() as threads,
    ):
        until_ready(client)
        port = client.base_url.port
        assert port is not None
        os.kill(redis.pid, signal.SIGSTOP)
        try:
            asking = []
            for method, path, body in requests:
                sent = threading.Event()
                more = unread(redis.port) + (len(large) if body else 1)
                trace = partial(note_sent, sent)
                asking.append(threads.submit(client.request, method, path, json=body, extensions={"trace": trace}))
                assert sent.wait(DEADLINE_S)
                until_sync(lambda: not unread(port), f"the service has read {method} {path}")
                until_sync(partial(waits, redis.port, more), f"{method} {path} waits for Redis")
            service.send(signal.SIGTERM)
            post, get = (answer.result(DEADLINE_S) for answer in asking)
        finally:
            os.kill(redis.pid, signal.SIGCONT)
        problem = problem_of(post, 504, "OutcomeUnknownError")
        assert "repeat the request with the same id" in problem["detail"]
        problem_of(get, 503, "ClosedError")
        assert post.headers["x-content-type-options"] == "nosniff"
        assert service.exit_code() == 0
        assert not [line for line in service.logged() if "exception" in line]


def note_sent(sent: threading.Event, event: str, _: object) -> None:
    if event == "http11.send_request_body.complete":
        sent.set()


def waits(port: int, size: int) -> bool:
    return unread(port) >= size


def unread(port: int) -> int:
    """Return the number of bytes that a server at a port has not read yet."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "01")


def test_it_says_that_it_leaves_and_a_later_signal_ends_it_at_once(tmp_path: Path) -> None:
    with Service(tmp_path, '[limits]\nleave = "1h"\n') as service, service.client() as client:
        until_ready(client)
        service.send(signal.SIGTERM)
        answer = until(client, lambda answer: answer.status_code == 503)
        assert answer.json()["reasons"] == ["the service is ending"]
        assert client.get("/livez").is_success
        service.err.wait_for("a later signal ends it at once")
        assert service.end_by_a_later_signal() == -signal.SIGTERM


# --- ready, or why not ------------------------------------------------------------------------------------


def test_a_backlog_is_an_alarm_and_no_reason_not_to_be_ready(tmp_path: Path) -> None:
    asyncio.run(leave_overdue(tmp_path / "aiodelay.db"))
    periods = {"aiodelay.engine.housekeeping.STEP_S": 0.5}
    with Service(tmp_path, '[limits]\noverdue = "100ms"\n', periods=periods) as service, service.client() as client:
        service.err.wait_for("the oldest overdue message of nobody has waited")
        until(client, lambda answer: answer.is_success and answer.json()["stores"]["default"]["overdue_ms"] > 100)


async def leave_overdue(path: Path) -> None:
    async with Scheduler(f"sqlite:///{path}", dispatch=False) as scheduler:
        await scheduler.schedule(b"", to="handler:nobody", delay="0s", id="left")


def test_not_ready_before_redis_is_full_and_while_nothing_can_be_written(tmp_path: Path, redis: RedisServer) -> None:
    text = f'store = "{redis.url}"\n[limits]\nprobe_every = "0s"\nprobe_timeout = "30s"\n'
    with Service(tmp_path, text, periods=SOON) as service, service.client() as client:
        until_ready(client)
        assert client.get("/readyz").json()["stores"]["default"]["fill"] is None
        used = int(redis.command("INFO", "memory").partition(b"used_memory:")[2].split()[0])
        redis.command("CONFIG", "SET", "maxmemory", str(used))
        answer = until(client, lambda answer: "% of its memory is used, more than 90%" in answer.text)
        assert answer.status_code == 503
        assert answer.json()["stores"]["default"]["fill"] > 0.9
        redis.command("CONFIG", "SET", "maxmemory", "0")
        until_ready(client)
        redis.command("CONFIG", "SET", "min-replicas-to-write", "1")
        answer = until(client, lambda answer: answer.status_code == 503)
        assert answer.json()["stores"]["default"]["phase"] == "ready"
        redis.command("CONFIG", "SET", "min-replicas-to-write", "0")
        until_ready(client)


def test_a_probe_leaves_nothing_and_is_rare(tmp_path: Path) -> None:
    text = 'store = "sqlite:///d.db?journal=100"\n[limits]\nprobe_every = "1h"\nprobe_timeout = "1m"\n'
    with Service(tmp_path, text, periods=SOON) as service, service.client() as client:
        until_ready(client)
        ends = time.monotonic() + 0.5  # five times as long as an answer stands
        while time.monotonic() < ends:
            assert client.get("/readyz").status_code == 200
        service.send(signal.SIGTERM)
        assert service.exit_code() == 0

    async def left() -> tuple[list[str], list[str]]:
        async with Scheduler(f"sqlite:///{tmp_path / 'd.db'}?journal=100", dispatch=False) as scheduler:
            written = [entry.id for entry in await scheduler.journal(PROBE)]
            return written, [snapshot.record.id async for snapshot in scheduler.pending()]

    written, pending_now = asyncio.run(left())
    assert written == [PROBE, PROBE]
    assert pending_now == []


# --- tokens and secrets -----------------------------------------------------------------------------------


def token(name: str, secret: str) -> str:
    scopes = '["read", "schedule", "operate"]'
    return f'[[api.tokens]]\nname = "{name}"\nhash = "{hash_token(secret)}"\nscopes = {scopes}\n'


def replace_settings(folder: Path, text: str) -> None:
    """Replace the file in one step: the service may read it at any time."""
    (folder / "new.toml").write_text(text)
    (folder / "new.toml").chmod(0o600)
    (folder / "new.toml").replace(folder / "aiodelay.toml")


def test_tokens_are_exchanged_while_it_runs(tmp_path: Path) -> None:
    other = TOKEN[::-1]
    periods = {"aiodelay.service.token_file.LOOK_S": 0.1}
    with (
        Service(tmp_path, token("old", TOKEN), periods=periods) as service,
        service.client(TOKEN) as old,
        service.client(other) as new,
    ):
        until_ready(old)
        assert (old.get("/v1/counts").status_code, new.get("/v1/counts").status_code) == (200, 401)
        replace_settings(tmp_path, "[api]\ntokens = 7\n")
        service.err.wait_for("the valid tokens stay as they are")
        assert old.get("/v1/counts").status_code == 200
        replace_settings(tmp_path, token("new", other))
        service.err.wait_for("tokens that are valid now: new")
        assert (old.get("/v1/counts").status_code, new.get("/v1/counts").status_code) == (401, 200)
        (tmp_path / "aiodelay.toml").unlink()
        service.err.wait_for("does not exist any more; the valid tokens stay as they are")
        assert (old.get("/v1/counts").status_code, new.get("/v1/counts").status_code) == (401, 200)
        replace_settings(tmp_path, "")
        service.err.wait_for("tokens that are valid now: none")
        del new.headers["Authorization"]
        assert (old.get("/v1/counts").status_code, new.get("/v1/counts").status_code) == (401, 401), "it opens nothing"


def test_no_secret_is_logged_at_any_level(tmp_path: Path, redis: RedisServer) -> None:
    redis.command("CONFIG", "SET", "requirepass", PASSWORD)
    url = redis.url.replace("redis://", f"redis://:{PASSWORD}@")
    text = OPEN + token("ops", TOKEN) + '[log]\nlevel = "debug"\n'
    with Service(tmp_path, text, {"AIODELAY_STORE": url}) as service, service.client(TOKEN) as client:
        until_ready(client)
        message = {"to": "stdout:x", "payload": PAYLOAD, "delay": "0s", "headers": {"x": PAYLOAD}}
        service.out.wait_for(post(client, **message))
        client.post("/v1/messages", json=message | {"delay": "soon"})
        client.get("/v1/counts", headers={"Authorization": f"Bearer {TOKEN}x"})
        client.get(f"/v1/messages?token={TOKEN}")
        service.send(signal.SIGTERM)
        assert service.exit_code() == 0
        logged = service.logged()
    assert {"time", "level", "logger", "message"} <= set(logged[0])
    assert any(line["logger"] == "aiodelay.audit" for line in logged)
    assert "planted" not in json.dumps(logged)


def test_it_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError(name='uvicorn')")
    with aiodelay("serve", cwd=tmp_path, environment={"PYTHONPATH": str(tmp_path)}) as program:
        assert program.exit_code() == 1
        assert "pip install 'aiodelay[service]'" in program.err.seen[-1]

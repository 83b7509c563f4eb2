"""An unusable store is refused with the same error in the library, the command line, the service and over HTTP."""

from __future__ import annotations

import asyncio
import json
import socketserver
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from aiodelay import AiodelayError, Scheduler
from aiodelay.service.reading import read_configuration
from aiodelay.service.serve import run_service
from tests.support.api import ALL, problem_of, serving_api
from tests.support.cli import Cli
from tests.support.servers import RedisServer, redis_programs, start
from tests.support.slow_stores import PATIENT

PASSWORD = "hunter2"
WORK = {"to": "handler:work", "payload": "p", "delay": "1h"}


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    server = start(redis_programs()[0].program)
    yield server
    server.stop()


def library(url: str, namespace: str = "default") -> AiodelayError:
    """Return what a program is told."""

    async def use() -> None:
        async with Scheduler(url, namespace=namespace, dispatch=False):
            pass

    with pytest.raises(AiodelayError) as caught:
        asyncio.run(use())
    return caught.value


def served(url: str, namespace: str = "default") -> AiodelayError:
    """Return what ends the service."""

    async def serve() -> None:
        flags: Any = {("store",): ("", url), ("namespace",): ("", namespace), ("api", "port"): ("", 0)}
        flags["limits", "open_timeout"] = ("", "0s")
        configuration = read_configuration(flags=flags)
        await run_service(configuration.settings(), asyncio.Event(), configuration)

    with pytest.raises((ExceptionGroup, AiodelayError)) as caught:
        asyncio.run(serve())
    error: BaseException = caught.value
    while isinstance(error, ExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, AiodelayError)
    return error


def refused_alike(url: str, error: str, part: str, folder: Path, *, code: int = 1, namespace: str = "default") -> None:
    """The library, the command line and the service refuse a store by the same name, and tell no password."""
    known = library(url, namespace)
    assert (type(known).__name__, part in str(known)) == (error, True), str(known)
    cli = Cli(url, folder)
    cli.namespace = namespace
    looked, plain = cli("get", "x", "--json"), cli("get", "x")
    assert (looked.code, looked.error["error"], looked.error["detail"]) == (code, error, str(known))
    assert (plain.code, plain.err) == (code, f"aiodelay: {known}\n")
    ended = served(url, namespace)
    assert part in str(ended), str(ended)
    assert isinstance(ended, type(known)) or error == "ConfigurationError"
    checked = cli("check")
    assert checked.code == (5 if code == 5 else 1)
    told = [str(known), looked.err, plain.err, str(ended), checked.out, checked.err]
    assert PASSWORD not in "".join(told)


# --- as it is set up --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "namespace", "part"),
    [
        (f"http://me:{PASSWORD}@localhost", "default", "'http'"),
        ("nothing", "default", "a URL that begins with"),
        ("memory://?jornal=1", "default", "jornal"),
        ("sqlite:///x.db?journal=-1", "default", "journal"),
        (f"redis://:{PASSWORD}@localhost?timeout=x", "default", "timeout"),
        (f"kafka://me:{PASSWORD}@localhost/topic?acks=0", "default", "acks"),
        ("memory://", "a{b}", "namespace"),
        ("memory://", "a b", "namespace"),
        ("memory://", "x" * 65, "namespace"),
    ],
)
def test_what_is_set_wrongly(tmp_path: Path, url: str, namespace: str, part: str) -> None:
    refused_alike(url, "ConfigurationError", part, tmp_path, namespace=namespace)


def of_another_program(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (a)")
    connection.close()


def of_a_newer_aiodelay(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA application_id = 0x61696F64")
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def of_no_database(path: Path) -> None:
    path.write_text("not a database, and longer than a header of one would be" * 20)


@pytest.mark.parametrize(
    "make", [of_another_program, of_a_newer_aiodelay, of_no_database], ids=lambda each: each.__name__
)
def test_a_file_of_something_else(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x.db")
    refused_alike(f"sqlite:///{tmp_path}/x.db", "StoreMismatchError", "x.db", tmp_path)


def test_a_redis_that_cannot_keep_messages(redis: RedisServer, tmp_path: Path) -> None:
    url = f"{redis.url}?{PATIENT}"

    async def open_once() -> None:
        async with Scheduler(url, dispatch=False):
            pass

    asyncio.run(open_once())
    redis.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    refused_alike(url, "StoreMismatchError", "noeviction", tmp_path)
    redis.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    (meta,) = [key for key in redis.command("KEYS", "*").decode().split() if "meta" in key]
    redis.command("HSET", meta, "schema", "99")
    refused_alike(url, "StoreMismatchError", "schema 99", tmp_path)
    redis.command("DEL", meta)
    redis.command("REPLICAOF", "127.0.0.1", "1")
    refused_alike(url, "StoreMismatchError", "replica", tmp_path)


@contextmanager
def server_that_says(info: str) -> Iterator[str]:
    """Yield the URL of a server that answers INFO with a text, HELLO with an error, and all else with OK.

    No package has a server as old as the tests need.
    """
    answers = {b"INFO": b"$%d\r\n%s\r\n" % (len(info), info.encode()), b"HELLO": b"-ERR unknown command 'HELLO'\r\n"}

    class Answering(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while head := self.rfile.readline():
                command = [self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2] for _ in range(int(head[1:]))]
                self.wfile.write(answers.get(command[0].upper(), b"+OK\r\n"))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answering) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"redis://127.0.0.1:{server.server_address[1]}?{PATIENT}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("info", "shown"),
    [
        ("redis_version:6.0.16\r\nrole:master\r\n", "Redis 6.0.16"),
        ("redis_version:5.0.14\r\nrole:master\r\n", "Redis 5.0.14"),
        ("redis_version:7.2.4\r\nvalkey_version:7.1.9\r\nrole:master\r\n", "Valkey 7.1.9"),
    ],
    ids=["Redis 6.0", "Redis 5", "Valkey"],
)
def test_a_server_that_is_too_old(tmp_path: Path, info: str, shown: str) -> None:
    with server_that_says(info) as url:
        part = f"is {shown}; allowed: Redis 6.2 or later, Valkey 7.2 or later"
        refused_alike(url, "StoreMismatchError", part, tmp_path)


def test_a_redis_that_lets_nobody_in(redis: RedisServer, tmp_path: Path) -> None:
    redis.command("CONFIG", "SET", "requirepass", "right")
    url = f"redis://:{PASSWORD}@127.0.0.1:{redis.port}?{PATIENT}"
    error = type(library(url)).__name__
    code = 5 if error == "StoreUnavailableError" else 1
    refused_alike(url, error, "***", tmp_path, code=code)


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    url = f"redis://:{PASSWORD}@127.0.0.1:1?connect_timeout_ms=100"
    refused_alike(url, "StoreUnavailableError", "127.0.0.1:1", tmp_path, code=5)


# --- as it goes on ----------------------------------------------------------------------------------------


def test_a_store_that_becomes_full_or_goes_away(redis: RedisServer, tmp_path: Path) -> None:
    patient, hasty = f"{redis.url}?{PATIENT}", f"{redis.url}?timeout_ms=1000"
    cli = Cli(patient, tmp_path)
    schedule = ("schedule", "handler:work", "p", "--delay", "1h")
    line = json.dumps(WORK)
    ndjson = {"content-type": "application/x-ndjson"}

    async def becomes_full() -> None:
        async with (
            Scheduler(patient, dispatch=False, store_timeout="60s") as scheduler,
            serving_api(scheduler, **ALL) as client,
        ):
            assert (await client.post("/v1/messages", json=WORK)).status_code == 201
            redis.command("CONFIG", "SET", "maxmemory", "100kb")
            problem_of(await client.post("/v1/messages", json=WORK), 507, "StoreFullError")
            answer = await client.post("/v1/messages", content=line, headers=ndjson)
            assert json.loads(answer.text.splitlines()[0])["problem"]["error"] == "StoreFullError"
            ran = await asyncio.to_thread(cli, *schedule, "--json")
            assert (ran.code, ran.error["error"]) == (5, "StoreFullError")
            redis.command("CONFIG", "SET", "maxmemory", "0")

    async def goes_away() -> None:
        async with (
            Scheduler(redis.url, dispatch=False, store_timeout="1s") as scheduler,
            serving_api(scheduler, **ALL) as client,
        ):
            await asyncio.to_thread(redis.stop)
            answer = await client.get("/v1/counts")
            problem_of(answer, 503, "StoreUnavailableError")
            assert answer.headers["retry-after"] == "1"
            stored = await client.post("/v1/messages", json=WORK)
            assert stored.json()["error"] in ("StoreUnavailableError", "OutcomeUnknownError"), stored.text
            ran = await asyncio.to_thread(cli, *schedule, "--json", store=hasty)
            assert (ran.code, ran.error["error"]) == (5, "StoreUnavailableError")

    asyncio.run(becomes_full())
    asyncio.run(goes_away())

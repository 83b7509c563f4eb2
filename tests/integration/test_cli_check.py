"""`aiodelay check` on real stores: it reports each problem that the test makes, with the remedy."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis as redis_py

from aiodelay import Scheduler
from tests.support.cli import Cli, Ran
from tests.support.kafka import create_topic, new_name
from tests.support.servers import RedisServer, redis_products, replicate, start
from tests.support.tls import Certificates, tls_port_of
from tests.support.waiting import until

APP = """
from dataclasses import dataclass
from aiodelay import Scheduler, event

scheduler = Scheduler("sqlite:///{folder}/delay.db", sinks=["stdout:"])

@event("mail", aliases=("letter",))
@dataclass
class Mail:
    order: int

@scheduler.handler
async def send(event: Mail) -> None: ...
"""


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    server = start(redis_products()[0].program)
    yield server
    server.stop()


def findings(ran: Ran, level: str) -> dict[str, dict[str, Any]]:
    return {each["about"]: each for each in ran.objects if each["level"] == level}


def test_a_good_store(tmp_path: Path) -> None:
    cli = Cli(f"sqlite:///{tmp_path}/delay.db?journal=10", tmp_path)
    assert cli("schedule", "--lines").code == 0
    ran = cli("check", "--json")
    assert (ran.code, [each["level"] for each in ran.objects]) == (0, ["ok"])
    assert cli("check").out == f"ok       {cli.url}: it answers, and messages can be stored there\n"


def test_what_waits_for_nobody_is_overdue_or_dead(tmp_path: Path) -> None:
    cli = Cli(f"sqlite:///{tmp_path}/delay.db", tmp_path)
    cli("schedule", "handler:mail", "x", "--at", "2020-01-01T00:00:00Z")
    cli("pause", "sms")
    ran = cli("check", "--json")
    assert ran.code == 0, "no server, topic or layout is wrong"
    warnings, notes = findings(ran, "warning"), findings(ran, "note")
    assert warnings["mail"]["text"] == "1 pending, 1 of them overdue; no live instance serves it"
    assert "has been overdue for" in warnings["lateness"]["text"]
    assert notes["sms"] == {"level": "note", "about": "sms", "text": "it is paused", "mend": "aiodelay resume sms"}
    assert "?journal=1000" in notes[cli.url]["mend"]


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = f"app_{uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(APP.format(folder=tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield f"{name}:scheduler"
    sys.modules.pop(name, None)


@pytest.mark.parametrize("store", ["", "given"])
def test_what_this_code_cannot_read(tmp_path: Path, app: str, store: str) -> None:
    cli = Cli(f"sqlite:///{tmp_path}/delay.db", tmp_path)
    cli("schedule", "handler:mail", '{"order": 7}', "--delay", "1h")
    cli("schedule", "handler:letter", '{"order": "visa-4111"}', "--delay", "1h", "--id", "b")
    cli("schedule", "handler:sms", '{"order": 7}', "--delay", "1h")
    cli("schedule", "stdout:x", "x", "--delay", "1h", "--sink", "stdout:")
    url = cli.url
    if not store:
        cli.url = ""
    ran = cli("check", "--app", app, "--json")
    problems = findings(ran, "problem")
    assert (ran.code, sorted(problems)) == (1, ["letter", "sms"]), ran
    assert problems["letter"]["text"] == (
        "this code cannot read 1 of the next 1 messages, such as b (ValidationError)"
    ), problems
    assert 'aliases=("sms",)' in problems["sms"]["mend"]
    assert findings(ran, "ok")["sink stdout"]["text"].startswith("at least once: ")
    assert "visa-4111" not in ran.out
    assert url in findings(ran, "ok")


def test_a_redis_that_loses_messages(server: RedisServer, tmp_path: Path) -> None:
    client: Any = redis_py.Redis(port=server.port)
    cli = Cli(f"redis://127.0.0.1:{server.port}", tmp_path)
    client.config_set("appendonly", "no")
    ran = cli("check", "--json")
    warning = findings(ran, "warning")[cli.url]
    assert ran.code == 0
    assert warning["text"] == "appendonly is off; acknowledged messages are lost when the server ends"
    assert warning["mend"].startswith("CONFIG SET appendonly yes")
    assert findings(ran, "ok")["sink redis-list"]["text"].startswith("exactly once: ")
    client.config_set("maxmemory-policy", "allkeys-lru")
    ran = cli("check", "--json")
    (problem,) = findings(ran, "problem").values()
    assert (ran.code, problem["about"]) == (1, f"maxmemory-policy of {cli.url}")
    assert "CONFIG SET maxmemory-policy noeviction" in problem["mend"]
    client.config_set("maxmemory-policy", "noeviction")


def test_the_number_of_replicas_fits_the_level_of_durability(server: RedisServer, tmp_path: Path) -> None:
    def told(wanted: int) -> list[dict[str, Any]]:
        ran = Cli(f"{server.url}?durability=replicated:{wanted}", tmp_path)("check", "--json")
        found = [each for each in ran.objects if each["text"].startswith("durability=")]
        assert ran.code == int(any(each["level"] == "problem" for each in found))
        return found

    with ExitStack() as stack:
        assert told(2) == [
            {
                "level": "problem",
                "about": f"{server.url}?durability=replicated:2",
                "text": "durability=replicated:2 waits for 2 replicas, but 0 are connected; the outcome of each command"
                " is unknown",
                "mend": "start the replicas, or put durability=memory into the URL",
            }
        ]
        for number in (1, 2):
            replica = start(redis_products()[0].program)
            stack.callback(replica.stop)
            replicate(replica, server.port)
            assert told(number) == []
        (problem,) = told(3)
        assert problem["mend"] == "start the replicas, or put durability=replicated:2 into the URL"
        (warning,) = told(1)
        assert warning["level"] == "warning"
        assert "waits for 1 of 2 replicas" in warning["text"]
        assert warning["mend"] == "put durability=replicated:2 into the URL"


def test_another_layout_and_a_destination_that_takes_nothing(server: RedisServer, tmp_path: Path) -> None:
    client: Any = redis_py.Redis(port=server.port)
    cli = Cli(f"redis://127.0.0.1:{server.port}", tmp_path)
    client.set("no-list", "x")
    cli("schedule", "redis-list:no-list", "x", "--delay", "0s")

    async def play() -> None:
        async with Scheduler(cli.url) as scheduler:
            await until(scheduler.blocked, "its destination takes nothing")

    asyncio.run(play())
    warning = findings(cli("check", "--json"), "warning")["redis-list:no-list"]
    assert "it takes nothing: " in warning["text"]
    assert "1 messages wait" in warning["text"]
    (meta,) = client.keys("*meta*")
    client.hset(meta, "schema", 99)
    ran = cli("check", "--json")
    (problem,) = findings(ran, "problem").values()
    assert (ran.code, problem["text"]) == (1, "it is schema 99, 1 shards")
    client.flushall()


def test_a_store_that_does_not_answer(tmp_path: Path) -> None:
    ran = Cli("", tmp_path)("check", "redis://user:hunter2@127.0.0.1:1", "--json")
    (problem,) = findings(ran, "problem").values()
    assert (ran.code, problem["about"]) == (5, "redis://user:***@127.0.0.1:1")
    assert "hunter2" not in ran.out + ran.err


def test_why_a_redis_cannot_be_used_and_how_to_mend_it(tmp_path: Path) -> None:
    program = redis_products()[0].program
    server = start(program)
    server.command("CONFIG", "SET", "requirepass", "hunter2")
    host, check = f"127.0.0.1:{server.port}", Cli("", tmp_path)
    wrong = {
        f"redis://:secret1@{host}": ("refuses this user or password", "put the server's user and password into"),
        f"redis://{host}": ("wants a password", "put the server's user and password into"),
        f"redis://:hunter2@{host}/99": ("no database of this number", "put another number at the end of the URL"),
        f"rediss://:hunter2@{host}": ("does not speak TLS at this port", "use redis:// in place of rediss://"),
        "redis://127.0.0.1:1": ("nothing answers at this address", "start the server, or correct host and port"),
        "redis://nowhere.invalid": ("nothing answers at this address", "start the server, or correct host and port"),
    }
    try:
        told = {url: _told(check("check", url, "--json")) for url in wrong}
        assert _told(check("check", f"redis://:hunter2@{host}", "--json")) is None
    finally:
        server.stop()
    for url, (why, mend) in wrong.items():
        problem = told[url]
        assert problem is not None
        assert why in problem["text"], (url, problem)
        assert problem["mend"].startswith(mend), (url, problem)
        assert "secret1" not in str(problem)
        assert "hunter2" not in str(problem)


def _told(ran: Ran) -> dict[str, Any] | None:
    """Return the only problem, if there is one."""
    problems = findings(ran, "problem")
    assert (ran.code, len(problems)) in ((0, 0), (5, 1)), ran
    return next(iter(problems.values()), None)


@pytest.mark.asyncio
async def test_a_redis_that_speaks_tls_alone(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    async with tls_port_of(redis_products()[0].program, certificates, clients=False) as port:
        check = Cli("", tmp_path)
        plain = _told(await asyncio.to_thread(check, "check", f"redis://127.0.0.1:{port}", "--json"))
        other = _told(await asyncio.to_thread(check, "check", f"rediss://127.0.0.1:{port}", "--json"))
    assert plain is not None
    assert "the port probably expects TLS" in plain["text"], plain
    assert plain["mend"].startswith("use rediss:// in place of redis://")
    assert other is not None
    assert "certificate is not trusted" in other["text"], other
    assert "ca_certs=" in other["mend"]


def test_topics_of_kafka(kafka: str, tmp_path: Path) -> None:
    topic = new_name("check")
    cli = Cli(f"kafka://{kafka}/{topic}", tmp_path)
    (problem,) = findings(cli("check", "--json"), "problem").values()
    assert topic in problem["about"], "it is missing"
    asyncio.run(create_topic(kafka, topic, cleanup_policy="delete"))
    ran = cli("check", "--json")
    (problem,) = findings(ran, "problem").values()
    assert (ran.code, problem["about"]) == (1, f"topic {topic}")
    assert "cleanup.policy is delete" in problem["text"]
    assert f"--entity-name {topic} --alter --add-config " in problem["mend"]

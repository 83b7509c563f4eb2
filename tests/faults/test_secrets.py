"""No secret is in a log line at DEBUG, an error, a `repr`, a span, a metric or a page, on any stack."""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from aiodelay import AiodelayError, Reject, Retry, Scheduler
from aiodelay.backends.registry import open_sink, open_source, open_store
from aiodelay.cli.app import run_app
from aiodelay.service.reading import read_configuration
from tests.support.api import ALL, TOKENS, bearer, serving_api
from tests.support.api import SECRETS as API_SECRETS
from tests.support.clear_errors import HEADER, KEY, PASSWORD, PAYLOAD, chain
from tests.support.kafka import Broker, create_topic, new_name
from tests.support.servers import RedisServer, redis_programs, start
from tests.support.telemetry import Emitted
from tests.support.waiting import until

DATA = (PAYLOAD, HEADER, KEY)
"""Data of messages: only answers that return the message have them."""
LOGINS = (PASSWORD, *API_SECRETS.values())
"""Secrets that nothing has, not even an answer."""
Told = dict[str, list[str]]


class Everything(logging.Handler):
    """Keeps the whole of every log record of every logger, with its traceback and its attributes."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        shown = "".join(traceback.format_exception(error)) if error else ""
        self.told.append(f"{record.name} {record.getMessage()} {vars(record)} {shown}")


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Return every log record from now on. Also the clients' own loggers are at DEBUG."""
    root, handler = logging.getLogger(), Everything()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler.told
    root.setLevel(before)
    root.removeHandler(handler)


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    server = start(redis_programs()[0].program)
    rights = "on", "resetpass", f">{PASSWORD}", "~*", "&*", "+@all"
    assert server.command("ACL", "SETUSER", "keeper", *rights) == b"+OK\r\n"
    yield server
    server.stop()


def assert_untold(told: Told, secrets: Iterable[str]) -> None:
    """Check that no text holds a secret, and that there are texts of each kind."""
    for kind, texts in told.items():
        assert texts, f"nothing to search in {kind}"
        for text in texts:
            assert not [secret for secret in secrets if secret in text], f"{kind}: {text[:2000]}"


def errors_of(wrong: Iterable[Callable[[], object]]) -> list[str]:
    """Return every text of the errors that these calls raise."""
    found: list[str] = []
    for call in wrong:
        with pytest.raises(AiodelayError) as caught:
            call()
        found += ["".join(traceback.format_exception(caught.value))]
        found += [text for each in chain(caught.value) for text in (repr(each), str(each), repr(each.args))]
    return found


def spans_and_points(emitted: Emitted) -> Told:
    spans = [f"{span.name} {span.to_json()}" for span in emitted.spans]
    return {"spans": spans, "metrics": [f"{name} {points}" for name, points in emitted.points().items()]}


async def deliver(scheduler: Scheduler, target: str, emitted: Emitted) -> Told:
    """Deliver, refuse, retry and kill messages, and look at them over the API and on the page."""
    failed = asyncio.Event()

    @scheduler.handler(name="work", retry=Retry(attempts=2, first="1ms"))
    async def work(payload: bytes) -> Reject | None:
        if payload.endswith(b"reject"):
            return Reject("not wanted")
        if payload.endswith(b"fail"):
            failed.set()
            raise ConnectionError("no answer")
        return None

    message: dict[str, Any] = {"key": KEY.encode(), "headers": {"authorization": HEADER.encode()}}
    async with scheduler, serving_api(scheduler, **(ALL | {"tokens": TOKENS})) as client:
        for ending in (b"", b" reject", b" fail"):
            await scheduler.schedule(PAYLOAD.encode() + ending, to="handler:work", delay="1ms", **message)
        await scheduler.schedule(PAYLOAD.encode(), to=target, delay="1ms", **message)
        await scheduler.schedule(PAYLOAD.encode(), to=target, delay="1h", id="later", **message)
        await asyncio.wait_for(failed.wait(), 60)

        async def letters() -> int:
            return len([each async for each in scheduler.dead_letters()]) >= 2

        await until(letters, "two dead letters")
        wrong: list[dict[str, Any]] = [
            {"delay": "-1s"},
            {"id": ""},
            {"to": "x"},
            {"unknown": PAYLOAD},
            {"headers": {"a b": HEADER}},
        ]
        good: dict[str, Any] = {
            "to": "handler:work",
            "payload": PAYLOAD,
            "delay": "1h",
            "key": KEY,
            "headers": {"a": HEADER},
        }
        answers = [
            (await client.post("/v1/messages", json=good | change, headers=bearer(API_SECRETS["schedule"]))).text
            for change in wrong
        ]
        reader = bearer(API_SECRETS["read"])
        for path in ("/v1/stores", "/v1/counts", "/v1/journal", "/v1/load"):
            answers += [(await client.get(path, headers=reader)).text]
        messages = [(await client.get(path, headers=reader)).text for path in ("/v1/messages", "/v1/dead")]
        pages = await pages_of(client)
        sink = scheduler.sink(target.partition(":")[0])
        shown = [repr(each) for each in (scheduler, scheduler.store, scheduler.status(), sink)]
    return {"messages": messages, "pages": pages, "answers": answers, "reprs": shown, **spans_and_points(emitted)}


async def pages_of(client: httpx.AsyncClient) -> list[str]:
    """Sign in on the page with a token, and return all its pages that show no message."""
    page = (await client.get("/login")).text
    csrf = re.findall(r'name="csrf" value="(\w+)"', page)[0]
    form = {"csrf": csrf, "token": API_SECRETS["read"]}
    signed_in = await client.post("/login", data=form, follow_redirects=True)
    paths = set(re.findall(r'href="(/[^"#]*)"', signed_in.text)) - {"/logout"}
    return [signed_in.text, *[(await client.get(path)).text for path in sorted(paths)]]


@pytest.mark.asyncio
async def test_no_secret_of_a_redis_stack_is_told(redis: RedisServer, logged: list[str]) -> None:
    emitted = Emitted()
    place = f"keeper:{PASSWORD}@127.0.0.1:{redis.port}"
    sinks = [f"redis-list://{place}"]
    scheduler = Scheduler(f"redis://{place}?journal=100", sinks=sinks, telemetry=emitted.telemetry())
    told = await deliver(scheduler, "redis-list:orders", emitted)
    assert_untold(told | {"log": logged}, LOGINS)
    del told["messages"], told["pages"]
    assert_untold(told | {"log": logged}, DATA)


@pytest.mark.asyncio
async def test_no_secret_of_a_kafka_stack_is_told(own_broker: Broker, logged: list[str]) -> None:
    emitted = Emitted()
    schedules, target = new_name("schedules"), await create_topic(own_broker.bootstrap, new_name("target"))
    options = "security=SASL_PLAINTEXT&create_topic=true&partitions=1"
    url = f"kafka://keeper:{PASSWORD}@{own_broker.login}/{schedules}?{options}"
    told = await deliver(Scheduler(url, telemetry=emitted.telemetry()), f"kafka:{target}", emitted)
    assert_untold(told | {"log": logged}, LOGINS)
    del told["messages"], told["pages"]
    assert_untold(told | {"log": logged}, DATA)


PLACES = {
    "redis": "redis://u:{}@127.0.0.1:1/0?{}",
    "redis, no user": "redis://:{}@127.0.0.1:1?{}",
    "sentinel": "redis+sentinel://u:{0}@127.0.0.1:1/main?sentinel_username=u&sentinel_password={0}&{1}",
    "cluster": "redis+cluster://u:{}@127.0.0.1:1,127.0.0.1:2?{}",
    "list": "redis-list://u:{}@127.0.0.1:1?{}",
    "fan-out": "redis-fanout://u:{}@127.0.0.1:1?{}",
    "log": "redis-log://u:{}@127.0.0.1:1?{}",
    "kafka": "kafka://u:{}@127.0.0.1:1/t?security=SASL_PLAINTEXT&{}",
    "sqlite": "sqlite://u:{}@host/x?{}",
    "unknown": "nosql://u:{}@host?{}",
    "no URL": "u:{}@host?{}",
}
MISTAKES = [
    *("no_such_option=1", f"password={PASSWORD}", f"api_token={PASSWORD}&x=1"),
    *("timeout_ms=x", "timeout_ms=1&timeout_ms=1"),
]


def open_anything(name: str, url: str) -> None:
    if name in ("list", "fan-out", "log"):
        open_sink(url)
        open_source(url)
    else:
        open_store(url, namespace="default", clock=None)


def test_no_error_about_a_url_tells_its_secrets(logged: list[str]) -> None:
    urls = [(name, url.format(PASSWORD, mistake)) for name, url in PLACES.items() for mistake in MISTAKES]
    told = errors_of(partial(open_anything, *each) for each in urls)
    assert_untold({"errors": told, "log": [*logged, ""]}, LOGINS)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["redis", "sentinel", "cluster", "kafka"])
async def test_no_error_of_a_store_that_does_not_answer_tells_its_secrets(name: str, logged: list[str]) -> None:
    url = PLACES[name].format(PASSWORD, "timeout_ms=500").rstrip("&")
    scheduler = Scheduler(url, open_timeout="1s", store_timeout="500ms")
    with pytest.raises(AiodelayError) as caught:
        async with scheduler:
            pass
    texts = [repr(scheduler), repr(scheduler.store), "".join(traceback.format_exception(caught.value))]
    texts += [text for each in chain(caught.value) for text in (repr(each), str(each))]
    assert_untold({"texts": texts, "log": [*logged, ""]}, LOGINS)


SETTINGS = f"""\
allowed_targets = ["handler:work"]
[stores.a]
url = "redis://u:{PASSWORD}@127.0.0.1:1"
[sinks.orders]
url = "redis-list://u:{PASSWORD}@127.0.0.1:1"
[sinks.kafka]
url = "kafka://u:{PASSWORD}@127.0.0.1:1?security=SASL_SSL"
[[api.tokens]]
name = "shop"
hash = "{TOKENS[0].hash}"
scopes = ["read"]
"""


def test_settings_show_no_secret(tmp_path: Path, logged: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "aiodelay.toml"
    file.write_text(SETTINGS)
    file.chmod(0o600)
    configuration = read_configuration(file)
    shown = [repr(configuration), repr(configuration.settings()), *map(repr, configuration.shown())]
    for arguments in (("config", "show"), ("config", "check")):
        run_app([*arguments, "--config", f"{file}"])
    file.write_text(SETTINGS + f'[log]\nlevel = "redis://u:{PASSWORD}@host"\nformat = "u:{PASSWORD}@host"\n')
    run_app(["config", "check", "--config", f"{file}"])
    output = capsys.readouterr()
    assert_untold(
        {"reprs": shown, "out": [output.out], "err": [output.err], "log": [*logged, ""]}, [PASSWORD, TOKENS[0].hash]
    )

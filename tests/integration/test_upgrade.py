"""`aiodelay upgrade`, and older processes that meet features and layouts that they do not know."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis as redis_py
from httpx import Response

from aiodelay import Scheduler, StoreTooNewError, StoreUnavailableError, __version__
from aiodelay.backends.registry import open_store
from aiodelay.core import features
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Demand, Envelope, Put, Refused
from aiodelay.ports import Upgradable
from aiodelay.redis import RedisListSink, RedisStore
from aiodelay.sqlite import SqliteStore
from tests.support.cli import Cli
from tests.support.kafka import new_name
from tests.support.servers import Found, redis_servers
from tests.support.service import Service, until_ready
from tests.support.service import until as until_answer

NEW, NEWER = "rehearsed", "untold"


@pytest.fixture(scope="module")
def redis(shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(redis_servers()[0])


@pytest.fixture(params=["sqlite", "redis", "kafka"])
def cli(request: pytest.FixtureRequest, tmp_path: Path) -> Cli:
    urls: dict[str, Callable[[], str]] = {
        "sqlite": lambda: f"sqlite:///{tmp_path}/delay.db",
        "redis": lambda: request.getfixturevalue("redis"),
        "kafka": lambda: (
            f"kafka://{request.getfixturevalue('kafka')}/{new_name('schedules')}?create_topic=true&partitions=2"
        ),
    }
    cli = Cli(urls[request.param](), tmp_path)
    cli.namespace = "default" if request.param == "kafka" else uuid4().hex
    assert cli("schedule", "handler:mail", "x", "--delay", "1h").code == 0  # which makes the file
    return cli


@pytest.fixture
def knowing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Be a version that knows these features."""
    return lambda *names: monkeypatch.setattr(features, "KNOWN", frozenset(names))


# --- the command ------------------------------------------------------------------------------------------


def test_upgrade_lists_asks_and_switches_on(cli: Cli, knowing: Callable[..., None]) -> None:
    knowing()
    assert cli("upgrade").out == "no features are in use, and this version knows none\n"
    knowing(NEW)
    off = {"feature": NEW, "switched_on_by": None, "known": True}
    assert cli("upgrade", "--list", "--json").objects == [off]
    refused = cli("upgrade")
    assert refused.code == 2
    assert f"switch on {NEW}, after which older versions claim nothing from " in refused.err
    assert "give --yes" in refused.err
    assert cli("upgrade", "--list").out.split() == ["feature", "state", NEW, "off"]

    done = cli("upgrade", "--yes")
    assert (done.code, done.out.split()[:3]) == (0, ["feature", "state", NEW])
    assert f"on, by aiodelay {__version__}" in done.out
    on = off | {"switched_on_by": __version__}
    assert cli("upgrade", "--json", store=cli.url).objects == [on], "nothing is left to ask for"

    knowing(NEWER)
    refused = cli("upgrade", "--yes")
    assert refused.code == 1
    assert f"uses {NEW} (switched on by aiodelay {__version__})" in refused.err
    assert f"on, by aiodelay {__version__}; unknown here" in cli("upgrade", "--list").out


def test_upgrade_leaves_features_off_that_a_store_switches_on_when_it_needs_them(cli: Cli) -> None:
    assert cli("upgrade").out.split() == ["feature", "state", "append", "off", "limits", "off"]


def test_upgrade_takes_the_url_of_the_store(tmp_path: Path, knowing: Callable[..., None]) -> None:
    url = f"sqlite:///{tmp_path}/other.db"
    cli = Cli("", tmp_path)
    assert cli("upgrade", url).code == 5, "no such file"
    assert cli("schedule", "handler:mail", "x", "--delay", "1h", store=url).code == 0
    knowing(NEW)
    assert cli("upgrade", url, "--yes").code == 0


def test_a_store_in_memory_has_no_other_versions(tmp_path: Path) -> None:
    refused = Cli("memory://", tmp_path)("upgrade")
    assert (refused.code, refused.out) == (1, "")
    assert "memory:// records no features" in refused.err


def test_check_tells_of_features(cli: Cli, knowing: Callable[..., None]) -> None:
    if cli.url.startswith("kafka:"):
        pytest.skip("without --own, check reads no topic")
    knowing(NEW)
    (note,) = [each for each in cli("check", "--json").objects if "features" in each["text"]]
    assert (note["level"], note["text"]) == ("note", f"features that are not switched on: {NEW}")
    assert note["mend"].startswith("aiodelay upgrade")
    assert cli("upgrade", "--yes").code == 0
    assert not [each for each in cli("check", "--json").objects if "features" in each["text"]]
    knowing()
    ran = cli("check", "--json")
    (problem,) = [each for each in ran.objects if each["level"] == "problem"]
    assert (ran.code, problem["about"]) == (1, cli.url)
    assert problem["text"].startswith(f"it uses {NEW} (switched on by aiodelay {__version__}), which ")
    assert problem["mend"].startswith("upgrade this process")


def test_a_scheduler_of_an_older_version_does_not_open(cli: Cli, knowing: Callable[..., None]) -> None:
    knowing(NEW)
    assert cli("upgrade", "--yes").code == 0
    knowing()

    async def play() -> None:
        async with Scheduler(cli.url, namespace=cli.namespace, dispatch=False) as scheduler:
            await scheduler.schedule(b"x", delay="1h", to="handler:mail")
        async with Scheduler(cli.url, namespace=cli.namespace):
            raise AssertionError("it has opened")

    with pytest.raises(StoreTooNewError, match=NEW):
        asyncio.run(play())


def test_a_service_of_an_older_version_is_not_ready_after_the_switch(
    tmp_path: Path, knowing: Callable[..., None]
) -> None:
    with Service(tmp_path, 'store = "sqlite:///delay.db"\n') as service, service.client() as client:
        until_ready(client)
        knowing(NEW)
        assert Cli(f"sqlite:///{tmp_path}/delay.db", tmp_path)("upgrade", "--yes").code == 0
        answer = until_answer(client, has_ended)
        assert answer.status_code == 503
        assert f"uses {NEW} (switched on by aiodelay {__version__})" in answer.json()["reasons"][0]
        assert NEW in service.err.wait_for("serves no more claims")


def has_ended(answer: Response) -> bool:
    """Return whether the store of a service has ended. Before that, a slow machine may miss a probe."""
    return bool(answer.json()["stores"]["default"]["phase"] == "ended")


# --- what is moved by the store itself --------------------------------------------------------------------


@pytest.mark.asyncio
async def test_redis_moves_nothing_by_rules_that_it_does_not_know(redis: str, knowing: Callable[..., None]) -> None:
    client: Any = redis_py.Redis.from_url(redis)
    key = f"list-{uuid4().hex}"
    async with RedisStore(redis, namespace=uuid4().hex) as store:
        await store.apply([Put(new_op(), Envelope("m", "redis-list", key, payload=b"x"), After(0))])
        await store.switch_on([NEW])
        with store.transferring(RedisListSink(redis)) as moves:
            with pytest.raises(StoreTooNewError, match=NEW):
                await moves.transfer(Demand(10))
            assert client.llen(key) == 0
            knowing(NEW)
            assert (await moves.transfer(Demand(10))).moved == 1
    assert client.llen(key) == 1


@pytest.mark.asyncio
async def test_a_feature_of_one_namespace_is_none_of_another(redis: str, tmp_path: Path) -> None:
    for url in (redis, f"sqlite:///{tmp_path}/delay.db"):
        one, other = (open_store(url, namespace=uuid4().hex, clock=None) for _ in range(2))
        async with one, other:
            assert isinstance(one, Upgradable)
            assert isinstance(other, Upgradable)
            await one.switch_on([NEW])
            assert await other.features() == {}
            async with other.work("worker", ["mail"]) as work:
                await work.claim({"mail": Demand(1)}, request="1", lease_ms=15_000)


# --- a layout that changes while a process has the store open ---------------------------------------------


@pytest.mark.asyncio
async def test_sqlite_changes_nothing_in_a_file_of_a_newer_layout(tmp_path: Path) -> None:
    path, put = tmp_path / "delay.db", Put(new_op(), Envelope("m", "mail"), After(0))

    def set_version(version: int) -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA user_version = {version}")

    async with SqliteStore(path) as store, store.work("worker", ["mail"]) as work:
        set_version(features.SQLITE_LAYOUT + 1)
        (refused,) = await store.apply([put])
        assert isinstance(refused, Refused)
        assert refused.reason == "unavailable"
        assert "has layout 2 now, and aiodelay" in refused.detail
        with pytest.raises(StoreTooNewError, match="has layout 2 now"):
            await work.claim({"mail": Demand(1)}, request="1", lease_ms=15_000)
        assert "has layout 2 now" in work.status().why
        with pytest.raises(StoreTooNewError, match="has layout 2 now"):
            await store.pause("mail")
        set_version(features.SQLITE_LAYOUT)
        assert not isinstance((await store.apply([put]))[0], Refused)
        claimed = await work.claim({"mail": Demand(1)}, request="2", lease_ms=15_000)
        assert len(claimed.claims) == 1
        assert work.status().phase == "ready"


@pytest.mark.asyncio
async def test_redis_changes_nothing_in_a_namespace_of_another_layout(redis: str) -> None:
    namespace, put = uuid4().hex, Put(new_op(), Envelope("m", "mail"), After(0))
    client: Any = redis_py.Redis.from_url(redis)
    meta = f"{{{namespace}:00}}:meta"
    async with RedisStore(redis, namespace=namespace) as store, store.work("worker", ["mail"]) as work:
        client.hset(meta, "schema", 2)
        before = {key: client.type(key) for key in client.keys(f"{{{namespace}:00}}:*")}
        (refused,) = await store.apply([put])
        assert isinstance(refused, Refused)
        assert refused.reason == "unavailable"
        assert "has layout 2 now, and aiodelay" in refused.detail
        with pytest.raises(StoreTooNewError, match="has layout 2 now"):
            await work.claim({"mail": Demand(1)}, request="1", lease_ms=15_000)
        assert "has layout 2 now" in work.status().why
        with pytest.raises((StoreTooNewError, StoreUnavailableError), match="has layout 2 now"):
            await store.pause("mail")
        assert {key: client.type(key) for key in client.keys(f"{{{namespace}:00}}:*")} == before
        client.hset(meta, "schema", features.REDIS_LAYOUT)
        assert not isinstance((await store.apply([put]))[0], Refused)
        claimed = await work.claim({"mail": Demand(1)}, request="2", lease_ms=15_000)
        assert work.status().phase == "ready"
        (claim,) = claimed.claims
        assert claim.record.id == "m"

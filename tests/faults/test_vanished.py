"""Data deleted or replaced under a running process: the log, an alarm, the status and `check` report it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis as redis_py

from aiodelay import Alarm, Scheduler, StoreUnavailableError
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Envelope, Put, SourcePosition
from aiodelay.engine import data_watch
from aiodelay.engine.sending import command_sender
from tests.support.cli import Cli
from tests.support.servers import Found, redis_servers
from tests.support.service import Service, until_ready
from tests.support.service import until as until_answer
from tests.support.waiting import until

GONE, REPLACED, TORN = "are gone: somebody deleted them", "other keys have taken their place", "somebody deleted a key"


class Place:
    """A store, and what somebody does to its data.

    Args:
        url: Of the store.
        damage: Deletes or replaces its data.
        said: What is told of it.
        repair: Brings the data back; None where nothing can.
        told_elsewhere: What `check` says, in another process.
        code: The exit code of `check`: 5 if the store cannot be used at all.
    """

    def __init__(
        self,
        url: str,
        damage: Callable[[], object],
        said: str,
        told_elsewhere: str,
        repair: Callable[[], object] | None = None,
        *,
        code: int = 1,
    ) -> None:
        self.url, self.damage, self.said, self.told_elsewhere, self.repair = url, damage, said, told_elsewhere, repair
        self.namespace, self.code = "default", code


@pytest.fixture(params=["deleted", "replaced"])
def sqlite_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    path, away = tmp_path / "delay.db", tmp_path / "away"
    away.mkdir()

    def delete() -> None:
        for each in tmp_path.glob("delay.db*"):
            each.rename(away / each.name)

    def restore() -> None:
        for each in away.iterdir():
            each.rename(tmp_path / each.name)

    def replace() -> None:
        delete()
        path.touch()

    url, elsewhere = f"sqlite:///{path}", "was deleted or replaced, but a process still keeps its messages"
    if request.param == "deleted":
        return Place(url, delete, "there is no file", "no such file", restore, code=5)
    return Place(url, replace, "another file has taken the place", elsewhere)


@pytest.fixture(params=redis_servers(), ids=lambda found: found.name)
def redis_url(request: pytest.FixtureRequest, shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(request.param)


@pytest.fixture(params=["all", "meta", "messages", "due", "lanes", "replaced", "pauses", "positions"])
def redis_place(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Place]:
    namespace = uuid4().hex
    client: Any = redis_py.Redis.from_url(redis_url)
    tag = f"{{{namespace}:00}}:"
    kept: dict[bytes, bytes] = {}

    def delete(*names: str) -> None:
        for name in names:
            kept[name.encode()] = client.dump(f"{tag}{name}")
            client.delete(f"{tag}{name}")

    def delete_all() -> None:
        client.delete(*client.keys(f"{tag}*"))

    def restore() -> None:
        for name, value in kept.items():
            client.restore(tag.encode() + name, 0, value, replace=True)

    elsewhere = "open, and reports that the keys"
    found = {
        "all": Place(redis_url, delete_all, GONE, elsewhere),
        "meta": Place(redis_url, lambda: delete("meta"), GONE, elsewhere, restore),
        "messages": Place(redis_url, lambda: delete("msg"), TORN, TORN, restore),
        "due": Place(redis_url, lambda: delete("due:1"), TORN, TORN, restore),
        "lanes": Place(redis_url, lambda: delete("lanes"), TORN, TORN, restore, code=5),
        "pauses": Place(redis_url, lambda: delete("holds"), "1 pauses are stored", TORN, restore),
        "positions": Place(redis_url, lambda: delete("src"), "1 positions of sources are stored", TORN, restore),
        "replaced": Place(redis_url, lambda: client.hset(f"{tag}meta", "uuid", "another"), REPLACED, elsewhere),
    }[request.param]
    found.namespace = namespace
    yield found
    client.close()


async def is_told(place: Place, caplog: pytest.LogCaptureFixture, folder: Path) -> None:
    """Play: open, schedule, damage; then the alarm, the log, the status and `check` tell."""
    alarms: list[Alarm] = []
    cli = Cli(place.url, folder)
    cli.namespace = place.namespace
    scheduler = Scheduler(place.url, namespace=place.namespace, on_alarm=alarms.append, dispatch=False)
    async with scheduler:
        await scheduler.schedule(b"x", to="handler:mail", delay="1h")
        await scheduler.pause("mail")
        put = Put(new_op(), Envelope("boxed", "mail", payload=b"x"), After(3_600_000))
        await scheduler.opened_store().apply([put], source=SourcePosition("box", 0, 5))
        await asyncio.sleep(0.3)  # several looks: nothing is told of data that are there
        assert (alarms, scheduler.status().why) == ([], "")
        place.damage()
        await until(lambda: alarms, "the alarm")
        assert [(each.kind, each.is_over) for each in alarms] == [("vanished", False)]
        assert place.said in alarms[0].reason
        assert place.said in scheduler.status().why
        levels = [each.levelno for each in caplog.records if place.said in each.getMessage()]
        assert levels == [logging.ERROR], "it is told once"
        ran = await asyncio.to_thread(cli, "check", "--json")
        problems = [each for each in ran.objects if each["level"] == "problem"]
        assert place.told_elsewhere in problems[0]["text"], problems
        assert ran.code == place.code, problems
        if place.repair is not None:
            place.repair()
            await until(lambda: len(alarms) == 2, "its end")
            assert (alarms[1].is_over, scheduler.status().why) == (True, "")


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_watch, "CHECK_S", 0.05)
    monkeypatch.setattr(data_watch, "ANSWER_S", 5.0)


@pytest.mark.usefixtures("_soon")
def test_a_file_that_is_deleted_or_replaced(
    sqlite_place: Place, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    asyncio.run(is_told(sqlite_place, caplog, tmp_path))
    assert not list(tmp_path.glob("*-vanished")), "the note is gone with its process"


@pytest.mark.asyncio
async def test_s2_a_file_that_was_deleted_or_replaced_takes_no_command(
    sqlite_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_sender, "LAST_REPEAT_MS", 0)  # what is refused is not sent again
    async with Scheduler(sqlite_place.url, dispatch=False, store_timeout="60s") as scheduler:
        await scheduler.schedule(b"x", to="handler:mail", delay="1h", id="before")
        sqlite_place.damage()
        with pytest.raises(StoreUnavailableError, match="this process still writes into the"):
            await scheduler.schedule(b"x", to="handler:mail", delay="1h", id="refused")
        with pytest.raises(StoreUnavailableError, match="this process still writes into the"):
            await scheduler.cancel("before")
        if sqlite_place.repair is not None:
            sqlite_place.repair()
            await scheduler.schedule(b"x", to="handler:mail", delay="1h", id="after")
            assert {each.record.id async for each in scheduler.pending()} == {"before", "after"}


@pytest.mark.usefixtures("_soon")
def test_keys_that_are_deleted_or_replaced(
    redis_place: Place, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    asyncio.run(is_told(redis_place, caplog, tmp_path))


def test_the_service_is_not_ready_within_its_usual_time(tmp_path: Path) -> None:
    with Service(tmp_path, 'store = "sqlite:///delay.db"\n') as service, service.client() as client:
        until_ready(client)
        (tmp_path / "delay.db").unlink()
        answer = until_answer(client, lambda answer: "there is no file" in answer.text)
        assert answer.status_code == 503
        assert "the store's data have vanished" in service.err.wait_for("vanished")

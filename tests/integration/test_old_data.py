"""Old data of SQLite, of Redis and of an export: this version reads them and continues as the old version did.

tests/fixtures/README.md says who wrote the data. A difference means that stored bytes are written or read otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aiodelay.core.record_format import FIELDS
from aiodelay.testing.conformance import Stage
from tests.support.cli import Cli
from tests.support.old_data.answers import CHAPTERS, FIXTURES, LATER_FIELDS, answered, answers, told_of
from tests.support.old_data.redis import OldRedis, of_the_store
from tests.support.old_data.sqlite import OldSqlite, rows_of
from tests.support.old_data.story import JOURNAL
from tests.support.servers import Found, redis_servers

LATER_COLUMNS = {"debounced_ms", "appended", "appended_due_ms", "holder"}
LATER_TABLES = ("features", "limits", "limited", "limited_keys", "superseded_keys")
LATER_SCHEMA = {
    *LATER_TABLES,
    "limited_tickets",
    "counted",
    "counted_superseded",
    "messages",
    "leases",
    "messages_appended",
    "schedule_insert",
    "schedule_delete",
}
"""What has another definition since the old version wrote its file."""
SQLITE, REDIS, EXPORT = FIXTURES / "sqlite", FIXTURES / "redis", FIXTURES / "export"


@pytest.fixture
def file(tmp_path: Path) -> OldSqlite:
    return OldSqlite(SQLITE, tmp_path)


@pytest.fixture(params=redis_servers(), ids=lambda found: found.name)
def keys(request: pytest.FixtureRequest, shared_redis: Callable[[Found], str]) -> OldRedis:
    return OldRedis(REDIS, shared_redis(request.param))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_file_of_sqlite_is_read_and_goes_on_as_before(file: OldSqlite, chapter: str) -> None:
    assert asyncio.run(answers(file, told_of(SQLITE), chapter)) == answered(SQLITE, chapter)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_keys_of_redis_are_read_and_go_on_as_before(keys: OldRedis, chapter: str) -> None:
    assert asyncio.run(answers(keys, told_of(REDIS), chapter)) == answered(REDIS, chapter)


def test_lists_topics_and_logs_of_redis_are_read_as_before(keys: OldRedis) -> None:
    assert asyncio.run(keys.ends(told_of(REDIS))) == answered(REDIS, "ends")


def test_a_file_of_sqlite_is_written_as_before(file: OldSqlite, tmp_path: Path) -> None:
    """The same story leaves the same rows, save for random values; the old file lacks the later tables."""

    async def tell_again() -> None:
        async with Stage(file, journal=JOURNAL) as stage:
            await file.tell(stage)
            file.copy_to(tmp_path / "new.db")

    asyncio.run(tell_again())
    new, old = dict(rows_of(tmp_path / "new.db", without=LATER_COLUMNS)), dict(rows_of(SQLITE / "delay.db"))
    assert [new.pop(table) for table in LATER_TABLES] == [[]] * len(LATER_TABLES)
    for rows in (new, old):
        rows["schema"] = [each for each in rows["schema"] if each[1] not in LATER_SCHEMA]
    assert new == old


def test_keys_of_redis_are_written_as_before(keys: OldRedis) -> None:
    async def tell_again() -> None:
        async with Stage(keys, journal=JOURNAL) as stage:
            await keys.tell(stage)
            new.update(of_the_store(keys.keys()))

    keys.clear()
    new: dict[bytes, Any] = {}
    asyncio.run(tell_again())
    old = of_the_store(keys.old_keys())
    assert new.keys() == old.keys()
    for key in old:
        assert new[key] == old[key], key


def test_another_namespace_of_a_file_and_of_a_server_is_read_too(file: OldSqlite, keys: OldRedis) -> None:
    async def payload(old: OldSqlite | OldRedis) -> bytes:
        await old.restore()
        async with old.shop() as shop:
            found = await shop.get("plain")
            assert found is not None
            return found.record.envelope.payload

    assert [asyncio.run(payload(each)) for each in (file, keys)] == [b"of the shop"] * 2


@pytest.mark.parametrize("fixture", [SQLITE, REDIS], ids=lambda path: path.name)
def test_every_field_of_a_record_is_in_the_data(fixture: Path) -> None:
    looked = answered(fixture, "look")
    records = [each["record"] for name in ("messages", "dead") for each in looked[name]]
    missing = {
        field.name for field in FIELDS if not any(reduce(_inner, field.path.split("."), record) for record in records)
    }
    assert missing == LATER_FIELDS


def _inner(value: Any, name: str) -> Any:  # noqa: ANN401 - of JSON
    return (value or {}).get(name)


# --- an export --------------------------------------------------------------------------------------------


def lines_of(path: Path, *left_out: str) -> list[dict[str, Any]]:
    """Return an export's lines, without the first one, which names the store.

    Also without what depends on the time of day, and without keys of later fields.
    """
    lines = [msgspec.json.decode(line, type=dict[str, Any]) for line in path.read_bytes().splitlines()]
    return [
        {name: value for name, value in line.items() if name not in ("state", "debounced_since", *left_out)}
        for line in lines[1:]
    ]


def test_an_export_of_an_old_file_is_the_same(file: OldSqlite, tmp_path: Path) -> None:
    asyncio.run(file.restore())
    ran = Cli(file.url, tmp_path)("export", "--output", f"{tmp_path / 'new.jsonl'}")
    assert ran.code == 0, ran
    assert lines_of(tmp_path / "new.jsonl") == lines_of(EXPORT / "export.jsonl")


def test_an_old_export_is_imported_whole(tmp_path: Path) -> None:
    cli = Cli(f"sqlite:///{tmp_path / 'new.db'}", tmp_path)
    forgotten = ("given_up", "is_cancelled", "is_last_attempt")  # an import makes a dead letter anew
    old = lines_of(EXPORT / "export.jsonl", *forgotten)
    ran = cli("import", f"{EXPORT / 'export.jsonl'}", "--json")
    assert (ran.code, ran.object["stored"], ran.object["is_whole"]) == (0, len(old) - 1, True)
    assert cli("export", "--output", f"{tmp_path / 'new.jsonl'}").code == 0
    assert sorted(map(str, lines_of(tmp_path / "new.jsonl", *forgotten))) == sorted(map(str, old))

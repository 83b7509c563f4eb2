"""SQLite files and URLs that the store cannot use: each is refused at the opening."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from aiodelay import ConfigurationError, Scheduler, StoreMismatchError, StoreUnavailableError
from aiodelay.sqlite import SqliteStore, open_store
from tests.support.clear_errors import PASSWORD, PAYLOAD, Bad, Pay, assert_clear, assert_no_secret
from tests.support.disks import IN_MEMORY


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="aiodelay-", dir=IN_MEMORY) as name:
        yield Path(name)


FORMS = "sqlite:///relative/file.db, sqlite:////absolute/file.db"


@pytest.mark.parametrize(
    ("url", "field", "value", "allowed"),
    [
        ("sqlite:", "url", "sqlite:", FORMS),
        ("sqlite://", "url", "sqlite://", FORMS),
        ("sqlite:///", "url", "sqlite:///", FORMS),
        ("sqlite:///folder/", "url", "sqlite:///folder/", FORMS),
        ("sqlite:///:memory:", "url", "sqlite:///:memory:", FORMS),
        ("sqlite://host/x.db", "url", "sqlite://host/x.db", FORMS),
        ("sqlite:///x.db#y", "url", "sqlite:///x.db#y", FORMS),
        ("sqlite:///a%00b.db", "url", "sqlite:///a%00b.db", FORMS),
        ("sqlite:///\ud800.db", "url", r"sqlite:///\ud800.db", FORMS),
        (f"sqlite://u:{PASSWORD}@host/x.db", "url", "sqlite://u:***@host/x.db", FORMS),
        ("sqlite:///x.db?mode=ro", "option of sqlite:///x.db?mode=ro", "'mode'", "journal"),
        (f"sqlite:///x.db?key={PASSWORD}", "option of sqlite:///x.db?key=***", "'key'", "journal"),
        ("sqlite:///x.db?journal=-1", "journal in sqlite:///x.db?journal=-1", "'-1'", "from 0 to 10000000"),
    ],
)
def test_bad_url(url: str, field: str, value: str, allowed: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_store(url, namespace="default", clock=None)
    assert_clear(caught.value, Bad(ConfigurationError, field, value, allowed))


def text_file(path: Path) -> None:
    path.write_text(PAYLOAD * 1000)


def database_of_another(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE customers (card TEXT)")
        connection.execute("INSERT INTO customers VALUES (?)", (PAYLOAD,))
    connection.close()


def application_of_another(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA application_id = 7")
        connection.execute("CREATE TABLE messages (card TEXT)")  # a name that we use too
    connection.close()


def empty_file_of_another(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA application_id = 7")
    connection.close()


def empty_file_with_a_version_of_another(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 1")
    connection.close()


def of_a_newer_version(path: Path) -> None:
    async def make() -> None:
        async with SqliteStore(path):
            pass

    asyncio.run(make())
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def folder_there(path: Path) -> None:
    path.mkdir()


def no_folder(path: Path) -> None:
    path.parent.rmdir()


async def open_and_schedule(path: Path) -> None:
    async with Scheduler(SqliteStore(path), dispatch=False) as scheduler:
        await scheduler.schedule(Pay(), delay="1s")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (text_file, "file is not a database"),
        (database_of_another, "another program's database"),
        (application_of_another, "another program's database"),
        (empty_file_of_another, "another program's database"),
        (empty_file_with_a_version_of_another, "another program's database"),
        (of_a_newer_version, "schema version is 99 in "),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_file_of_another(
    make: Callable[[Path], None], said: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    path = folder / "delay.db"
    make(path)
    before = path.read_bytes()
    with pytest.raises(StoreMismatchError) as caught:
        asyncio.run(open_and_schedule(path))
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert_no_secret(caught.value, caplog.text)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("make", "said"), [(folder_there, "cannot be opened"), (no_folder, "there is no directory")])
def test_file_that_cannot_be(make: Callable[[Path], None], said: str, folder: Path) -> None:
    path = folder / "inner" / "delay.db"
    path.parent.mkdir()
    make(path)
    with pytest.raises(StoreUnavailableError) as caught:
        asyncio.run(open_and_schedule(path))
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value.__cause__, sqlite3.OperationalError)

"""Follow journals without opening the store: exact numbers, reported trimming, and no writes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiodelay.backends.registry import open_store
from aiodelay.core.values import JournalEntry
from aiodelay.errors import StoreUnavailableError, UnsupportedByStoreError
from aiodelay.ports import JournalReader, Store
from tests.support.journals import note
from tests.support.stores import SHARED_STORES, empty_store


@pytest.fixture(params=SHARED_STORES, ids=str)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty store that keeps 200 entries."""
    with empty_store(request.param, tmp_path, "?journal=200") as url:
        yield url


def followed(url: str, namespace: str = "default") -> Store:
    return open_store(url, namespace=namespace, clock=None)


async def read(reader: JournalReader, span: range, trimmed: list[range]) -> list[JournalEntry]:
    return [entry async for entries in reader.entries(0, span, trimmed.append) for entry in entries]


def test_entries_are_read_from_any_place_to_any_other(url: str) -> None:
    async def play() -> None:
        await note(url, 1, 50)
        gone = list[range]()
        async with followed(url).journal_reader() as reader:
            assert await reader.spans() == {0: range(1, 51)}
            entries = await read(reader, range(1, 51), gone)
            assert [(each.number, each.id, each.event, each.lane) for each in entries] == [
                (n, f"m{n}", "stored", "work") for n in range(1, 51)
            ]
            assert await read(reader, range(7, 9), gone) == entries[6:8]
            assert await read(reader, range(9, 9), gone) == []
        assert gone == []
        async with open_store(url, namespace="default", clock=None) as store:
            assert entries == list(await store.journal(limit=100))

    asyncio.run(play())


def test_what_was_trimmed_before_or_is_not_there_is_told_and_left_out(url: str) -> None:
    async def play() -> None:
        await note(url, 1, 1000)
        async with followed(url).journal_reader() as reader:
            span = (await reader.spans())[0]
            assert span.stop == 1001
            assert 700 < span.start <= 801  # Redis trims by nodes of 100
            gone = list[range]()
            entries = await read(reader, range(1, 1001), gone)
            assert gone == [range(1, span.start)]
            assert [each.number for each in entries] == [*span]
            assert await read(reader, range(3, 5), gone) == []
            assert gone[1:] == [range(3, 5)]

    asyncio.run(play())


def test_a_namespace_of_which_nothing_is_known_is_empty(url: str) -> None:
    async def play() -> None:
        await note(url, 1, 3)
        async with followed(url, "other").journal_reader() as reader:
            assert await reader.spans() == {0: range(1, 1)}

    asyncio.run(play())


def test_a_store_without_a_journal_or_without_a_file_is_told(tmp_path: Path) -> None:
    file = tmp_path / "none.db"
    for url in (f"sqlite:///{file}", "redis://127.0.0.1", "kafka://127.0.0.1/schedules"):
        with pytest.raises(UnsupportedByStoreError, match="journal is off"):
            followed(url).journal_reader()

    async def play(url: str) -> None:
        async with followed(url).journal_reader() as reader:
            await reader.spans()

    with pytest.raises(StoreUnavailableError, match=r"none\.db"):
        asyncio.run(play(f"sqlite:///{file}?journal=1"))
    assert not file.exists()
    with pytest.raises(StoreUnavailableError, match=r"redis://127\.0\.0\.1:1"):
        asyncio.run(play("redis://127.0.0.1:1?journal=1"))

from __future__ import annotations

import asyncio
import pickle
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from example_backend import LogStore

from aiodelay import OutcomeUnknownError, Scheduler, StoreMismatchError, StoreUnavailableError
from aiodelay.ports.clock import Clock
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.conformance import StoreConformance


class TestLogStore(StoreConformance):
    """Every rule of docs/guarantees.md."""

    numbers = count()

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_store(self, clock: VirtualClock, *, journal: int = 0) -> LogStore:
        return LogStore(self.folder / f"{next(self.numbers)}.log", clock=clock, journal=journal)

    def reopen(self, store: LogStore, clock: Clock) -> LogStore:  # type: ignore[override]  # only a LogStore
        return LogStore(store.path, clock=clock)


async def schedule(url: str, message_id: str) -> list[str]:
    """Schedule another message. Return the ids of all pending messages."""
    async with Scheduler(url, sinks=["stdout:"], dispatch=False) as scheduler:
        await scheduler.schedule(b"x", to="stdout:x", delay="1h", id=message_id)
        return sorted([snapshot.record.id async for snapshot in scheduler.pending()])


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"log:///{tmp_path}"


def test_used_by_url_and_found_again(url: str) -> None:
    assert asyncio.run(schedule(url, "a")) == ["a"]
    assert asyncio.run(schedule(url, "b")) == ["a", "b"]


@pytest.mark.parametrize("missing", [1, 3, 30, 60, 120])
def test_a_last_entry_that_was_not_written_to_its_end_is_cut_off(url: str, tmp_path: Path, missing: int) -> None:
    asyncio.run(schedule(url, "a"))
    log = tmp_path / "default.log"
    log.write_bytes(log.read_bytes()[:-missing])
    assert asyncio.run(schedule(url, "b")) == ["b"]
    assert asyncio.run(schedule(url, "c")) == ["b", "c"]


def test_one_process_at_a_time(url: str) -> None:
    async def twice() -> None:
        async with Scheduler(url, dispatch=False):
            with pytest.raises(StoreUnavailableError, match="another process has it open"):
                await schedule(url, "a")

    asyncio.run(twice())


def test_a_log_of_another_version_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        before.setattr("example_backend.store.HEADER", "aiodelay 0.0.1")
        asyncio.run(schedule(url, "a"))
    with pytest.raises(StoreMismatchError, match=r"of aiodelay 0\.0\.1"):
        asyncio.run(schedule(url, "b"))


def test_a_log_that_asks_for_more_than_messages_is_refused_and_left_as_it_is(url: str, tmp_path: Path) -> None:
    asyncio.run(schedule(url, "a"))
    log = tmp_path / "default.log"
    log.write_bytes(before := log.read_bytes() + pickle.dumps(Path))
    with pytest.raises(StoreMismatchError, match="Path"):
        asyncio.run(schedule(url, "b"))
    assert log.read_bytes() == before


def test_a_write_that_fails_is_told_and_nothing_is_answered_after_it(url: str, tmp_path: Path) -> None:
    async def fill() -> None:
        async with Scheduler(url, sinks=["stdout:"], dispatch=False, store_timeout="100ms") as scheduler:
            with file_size_limited(tmp_path / "default.log", more=10), pytest.raises(OutcomeUnknownError):
                await scheduler.schedule(b"x", to="stdout:x", delay="1h", id="b")
            with pytest.raises(StoreUnavailableError, match="a write failed; open it again"):
                await scheduler.schedule(b"x", to="stdout:x", delay="1h", id="c")

    assert asyncio.run(schedule(url, "a")) == ["a"]
    asyncio.run(fill())
    assert asyncio.run(schedule(url, "d")) == ["a", "d"]


@contextmanager
def file_size_limited(path: Path, *, more: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

"""Every step in every state of a message: SQLite and Redis answer as the rulebook does.

`core/rules.py` is the rulebook. SQLite carries it out in SQL, with ways of its own for many puts and ends at once.
Redis has the same rules in Lua.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from uuid import uuid4

import pytest

from aiodelay.redis import RedisStore
from aiodelay.sqlite import SqliteStore
from aiodelay.testing.clock import VirtualClock
from tests.support.disks import IN_MEMORY
from tests.support.servers import redis_servers, serving
from tests.support.vector_store import MakeStore, play, told
from tests.support.vectors import Case, cases_of, states

JOURNAL = 1_000_000
DEEPER = 6


@cache
def cases(*, depth: int = 4) -> Sequence[Case]:
    """Return a case for every step in every state that can be reached in so many steps.

    They are a million objects: the garbage collector passes over them while they are made, and afterwards.
    """
    gc.disable()
    try:
        return cases_of(states(depth=depth, detailed=2))
    finally:
        gc.freeze()
        gc.enable()


@cache
def cases_with_journals() -> Sequence[Case]:
    return cases_of(states(depth=4, detailed=1), has_journal=True, every=11)


def check(make_store: MakeStore, played: Sequence[Case], *, has_journal: bool = False, packs: bool = False) -> None:
    differences = asyncio.run(play(make_store, played, has_journal=has_journal, packs=packs))
    print(f"{len(played)} cases")
    assert not differences, told(differences)


def test_there_are_tens_of_thousands_of_cases() -> None:
    assert len(cases()) > 20_000


# --- SQLite -----------------------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="aiodelay-", dir=IN_MEMORY) as name:
        yield Path(name)


def on_sqlite(folder: Path, journal: int = 0) -> MakeStore:
    def make(clock: VirtualClock) -> SqliteStore:
        return SqliteStore(folder / "delay.db", namespace=uuid4().hex, clock=clock, journal=journal)

    return make


def test_sqlite_answers_as_the_rulebook_does(folder: Path) -> None:
    check(on_sqlite(folder), cases()[1::4])


def test_sqlite_answers_several_commands_in_one_call_as_the_rulebook_does(folder: Path) -> None:
    check(on_sqlite(folder), cases()[2::8], packs=True)


def test_sqlite_journals_as_the_rulebook_does(folder: Path) -> None:
    check(on_sqlite(folder, JOURNAL), cases_with_journals(), has_journal=True)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_sqlite_answers_as_the_rulebook_does_in_deeper_states(folder: Path) -> None:
    check(on_sqlite(folder), cases(depth=DEEPER))


# --- Redis ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def redis(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as url:
        yield f"{url}?timeout_ms=60000"


def on_redis(url: str) -> MakeStore:
    return lambda clock: RedisStore(url, namespace=uuid4().hex, clock=clock)


def test_redis_answers_as_the_rulebook_does(redis: str) -> None:
    check(on_redis(redis), cases()[::4])


def test_redis_answers_several_commands_in_one_call_as_the_rulebook_does(redis: str) -> None:
    check(on_redis(redis), cases()[2::8], packs=True)


def test_redis_journals_as_the_rulebook_does(redis: str) -> None:
    check(on_redis(f"{redis}&journal={JOURNAL}"), cases_with_journals(), has_journal=True)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_redis_answers_as_the_rulebook_does_in_deeper_states(redis: str) -> None:
    check(on_redis(redis), cases(depth=DEEPER))

"""F33: unreadable data of another program in the file become dead letters, and other messages are delivered.

Also: a file that is not ours, damaged, or of a newer version is refused before anything is written.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from aiodelay import Message, Scheduler, StoreMismatchError
from tests.support.judging import url_of

GARBAGE = {
    "headers that are no JSON": "headers = '{'",
    "headers that are no object": "headers = '[1, 2]'",
    "headers that are no base64": """headers = '{"a": "?"}'""",
    "an encoding nobody knows": "encoding = 'pickle'",
    "a payload that is text": "payload = 'text'",
    "a key that is a number": "key = 7",
    "an attempt that is text": "attempt = 'two'",
    "a revision that is a fraction": "revision = 0.5",
    "a version that is negative": "version = -1",
    "a version that is text": "version = 'x'",
    "a late policy nobody knows": "late = 9",
    "a rule that is no JSON": "rule = '}'",
    "a trace that is a number": "trace = 5",
    "live occurrences that are no numbers": """live = '["a"]'""",
    "an op that is text": "op = 'op'",
    "an address that is not UTF-8": "address = CAST(x'ff' AS TEXT)",
}


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.asyncio
async def test_f33_a_row_that_cannot_be_read_ends_as_a_dead_letter_and_stops_nobody(
    tmp_path: Path, garbage: str
) -> None:
    path = tmp_path / "delay.db"
    async with Scheduler(url_of(path), dispatch=False) as scheduler:
        for i in range(5):
            await scheduler.schedule(f"{i}".encode(), to="handler:work", delay="1ms", id=f"m-{i}")
    execute(path, f"UPDATE messages SET {GARBAGE[garbage]} WHERE id = 'm-2'")
    delivered: list[bytes] = []

    scheduler = Scheduler(url_of(path))

    @scheduler.handler(name="work")
    async def work(payload: bytes) -> None:
        delivered.append(payload)

    async with scheduler:
        await scheduler.run_until_idle()
        letters = [letter async for letter in scheduler.dead_letters()]
    assert sorted(delivered) == [b"0", b"1", b"3", b"4"]
    assert [(letter.record.id, letter.reason) for letter in letters] == [("m-2", "undecodable")]
    column = GARBAGE[garbage].split(" ", 1)[0]
    assert column in (letters[0].record.last_error or "")


@pytest.mark.asyncio
async def test_f33_rows_that_cannot_be_read_in_bulk_are_passed_in_steps(tmp_path: Path) -> None:
    """More of them than one claim looks at stand before a message that can be read."""
    path = tmp_path / "delay.db"
    async with Scheduler(url_of(path), dispatch=False) as scheduler:
        bad = (Message(b"", to="handler:work", delay="1ms", id=f"m-{i}") for i in range(1_500))
        await scheduler.schedule_many(bad)
        await scheduler.schedule(b"good", to="handler:work", delay="2ms", id="good")
    execute(path, "UPDATE messages SET headers = '{' WHERE id <> 'good'")
    delivered: list[bytes] = []
    scheduler = Scheduler(url_of(path))

    @scheduler.handler(name="work")
    async def work(payload: bytes) -> None:
        delivered.append(payload)

    async with scheduler:
        await scheduler.run_until_idle()
        counts = await scheduler.counts()
    assert delivered == [b"good"]
    assert counts["work"].dead == 1_500


def newer(path: Path) -> None:
    execute(path, "PRAGMA user_version = 99")


def foreign(path: Path) -> None:
    execute(path, "PRAGMA application_id = 1")


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[:64] = b"\xff" * 64
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "says"), [(newer, "99"), (foreign, "another program"), (damaged, "that SQLite can read")]
)
@pytest.mark.asyncio
async def test_f33_a_file_of_another_version_or_program_is_refused_and_left_alone(
    tmp_path: Path, harm: Callable[[Path], None], says: str
) -> None:
    path = tmp_path / "delay.db"
    async with Scheduler(url_of(path), dispatch=False) as scheduler:
        await scheduler.schedule(b"", to="handler:work", delay="1h")
    harm(path)
    before = path.read_bytes()
    with pytest.raises(StoreMismatchError, match=says):
        async with Scheduler(url_of(path)):
            pass
    assert path.read_bytes() == before


def execute(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(statement)

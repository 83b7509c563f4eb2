"""`aiodelay check-history`: what it prints, and its exit codes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aiodelay import Scheduler
from aiodelay.testing import history as h
from tests.support.cli import ran


async def recorded(folder: Path, *, delay: str) -> tuple[str, str]:
    """Schedule one message in a recorded scheduler. Return the file of the history, and the URL of the store."""
    url = f"sqlite:///{folder / 'shop.db'}"
    scheduler = Scheduler(url)

    @scheduler.handler(name="work")
    async def work(payload: bytes) -> None: ...

    path = folder / "history.jsonl"
    with h.History(path, "shop") as history:
        h.record(scheduler, history)
        async with scheduler:
            await scheduler.schedule(b"x", to="handler:work", id="order-7", delay=delay)
            if delay == "0s":
                await scheduler.run_until_idle()
    return str(path), url


@pytest.mark.parametrize("delay", ["0s", "1h"])
def test_a_history_that_keeps_all_promises(tmp_path: Path, delay: str) -> None:
    path, url = asyncio.run(recorded(tmp_path, delay=delay))
    checked = ran("check-history", path, "--store", url, "--lateness", "1m")
    assert checked.code == 0, checked.out
    assert "0 violations" in checked.lines[0]
    assert not any(line.startswith(("S2", "L2")) for line in checked.lines)


def test_a_lost_message_is_shown_with_its_events(tmp_path: Path) -> None:
    path, _ = asyncio.run(recorded(tmp_path, delay="1h"))
    (tmp_path / "other").mkdir()
    _, empty = asyncio.run(recorded(tmp_path / "other", delay="0s"))
    checked = ran("check-history", path, "--store", empty)
    assert checked.code == 1
    at = next(i for i, line in enumerate(checked.lines) if line.startswith("S2: order-7 "))
    assert ["asks to schedule order-7" in checked.lines[at + 1], "is answered: stored" in checked.lines[at + 2]] == [
        True
    ] * 2
    assert checked.lines[at + 3].endswith("in the end the store holds: none of these messages")
    summary, violation = ran("check-history", path, "--store", empty, "--json").objects
    assert summary["violations"] == 1
    assert (violation["rule"], violation["ids"], len(violation["evidence"])) == ("S2", ["order-7"], 3)


def test_without_a_store_it_says_what_is_not_decided(tmp_path: Path) -> None:
    path, _ = asyncio.run(recorded(tmp_path, delay="1h"))
    checked = ran("check-history", path)
    assert checked.code == 0
    assert "S2 is not decided: the history does not say what the store held in the end" in checked.lines


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "cannot read {path}: No such file or directory"),
        ("", "{path} has no events: record a scheduler, as docs/testing.md shows"),
        ('{"event":"unknown"}', "{path} is no history: Invalid value 'unknown' - at `$.event`"),
        *(
            (event % '"process":"p","at_ns":7,"wall_ms":1}', "{path} is no history: an event of 'p' at 7 ns does not")
            for event in (
                '{"event":"returned","call":1,"outcome":"ok",%s',
                '{"event":"claimed","call":1,"now_ms":1,"claims":[],%s',
                '{"event":"ran","delivery_id":"a/1/1","attempt":1,"result":"ok",%s',
                '{"event":"run","id":"a","delivery_id":"a","attempt":1,"lane":"x","digest":"d",%s',
                '{"event":"run","id":"a","delivery_id":"a/1/9223372036854775808","attempt":1,"lane":"x","digest":"d",%s',
                '{"event":"claiming","call":1,"process":"p","at_ns":6,"wall_ms":1}\n{"event":"settled","call":1,"outcomes":[],%s',
            )
        ),
    ],
)
def test_a_file_without_a_history_is_refused(tmp_path: Path, content: str | None, error: str) -> None:
    path = tmp_path / "history.jsonl"
    if content is not None:
        path.write_text(content)
    checked = ran("check-history", str(path))
    assert (checked.code, checked.out) == (2, "")
    assert error.format(path=path) in checked.err

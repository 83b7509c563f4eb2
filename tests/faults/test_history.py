"""`record` on real stores: a kill, messages that a store moves, lists, topics, and a blind tombstone."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import run

import pytest

from aiodelay import Scheduler
from aiodelay.backends.kafka.client import Outgoing, Transactions
from aiodelay.backends.kafka.pending import precedence
from aiodelay.testing import history as h
from tests.support.cli import ran
from tests.support.importing import import_path
from tests.support.kafka import create_topic, new_name
from tests.support.processes import ROOT
from tests.support.servers import redis_products, start
from tests.support.waiting import until

PROGRAM = """
import asyncio, os, signal, sys
from msgspec.structs import replace
from aiodelay import Scheduler
from aiodelay.backends.kafka.client import Outgoing, Transactions
from aiodelay.backends.kafka.pending import precedence
from aiodelay.testing.history import History, record

store, path, name = sys.argv[1:]
scheduler = Scheduler(store)
scheduler._options = replace(scheduler._options, lease_ms=60_000)  # no lease lapses before the heir works

@scheduler.handler(name="work")
async def work(payload: bytes) -> None:
    if name == "victim":
        os.kill(os.getpid(), signal.SIGKILL)

async def main() -> None:
    record(scheduler, History(path, name))
    async with scheduler:
        if name == "victim":
            for number in range(3):
                await scheduler.schedule(b"", to="handler:work", id=f"m{number}", delay="0s")
        await scheduler.run_until_idle()

asyncio.run(main())
"""


def test_a_killed_process_explains_what_runs_again_and_a_closed_one_does_not(tmp_path: Path) -> None:
    url, path = f"sqlite:///{tmp_path / 'shop.db'}", tmp_path / "history.jsonl"
    codes = []
    for name in ("victim", "heir"):
        arguments = [sys.executable, "-c", PROGRAM, url, str(path), name]
        codes.append(
            run(arguments, cwd=ROOT, env={"PYTHONPATH": import_path(str(ROOT))}, timeout=90, check=False).returncode
        )
    assert codes == [-9, 0]
    assert h.check_file(path).duplicates == 1
    checked = ran("check-history", str(path), "--store", url)
    assert checked.code == 0, checked.out
    with h.History(path, "victim") as history:
        history.write(h.Process(what="closed"))
    checked = ran("check-history", str(path), "--store", url)
    assert checked.code == 1, checked.out
    assert any(line.startswith(("B1", "S7")) for line in checked.lines)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    server = start(redis_products()[0].program)
    yield server.url
    server.stop()


@pytest.mark.asyncio
async def test_messages_that_redis_moves_into_a_list_are_recorded_where_a_handler_takes_them(
    redis_url: str, tmp_path: Path
) -> None:
    path, to = tmp_path / "history.jsonl", f"redis-list:{new_name('list')}"
    scheduler = Scheduler(redis_url, namespace=new_name("n"))

    @scheduler.handler(name="work", source=to)
    async def work(payload: bytes) -> None: ...

    report = await recorded(scheduler, path, to, runs=5)
    report.verify()
    assert report.undecided["S2"] == "the store itself has moved messages of redis-list, and does not name them"


@pytest.mark.asyncio
async def test_records_that_a_handler_reads_from_a_topic_are_recorded(kafka: str, tmp_path: Path) -> None:
    path, topic = tmp_path / "history.jsonl", await create_topic(kafka, new_name())
    scheduler = Scheduler("memory://", sinks=[f"kafka://{kafka}"], sources=[f"kafka://{kafka}"])

    @scheduler.handler(name="work", source=f"kafka:{topic}?group={topic}")
    async def work(payload: bytes) -> None: ...

    (await recorded(scheduler, path, f"kafka:{topic}", runs=10)).verify()  # five by the sink, five by the handler


async def recorded(scheduler: Scheduler, path: Path, to: str, *, runs: int) -> h.Report:
    """Schedule five messages to a place that a handler reads, and check the history."""
    with h.History(path, "p") as history:
        h.record(scheduler, history)
        async with scheduler:
            for number in range(5):
                await scheduler.schedule(b"%d" % number, to=to, id=f"m{number}", delay="50ms")
            await until(lambda: succeeded(path) == runs, f"{runs} successful runs")
            await scheduler.run_until_idle()
        async with scheduler:
            history.write(await h.content_of(scheduler.store))
    report = h.check_file(path)
    print("\n".join(report.lines()))
    return report


def succeeded(path: Path) -> int:
    return sum(attempt.result == "ok" for attempt in h.Story(h.read(path)).attempts)


@pytest.mark.asyncio
@pytest.mark.parametrize("is_blind", [False, True], ids=["real", "blind"])
async def test_a_blind_tombstone_of_kafka_is_found_out(
    kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_blind: bool
) -> None:
    """Negative control: a tombstone that ends whatever version of its key was written before it."""
    path, url = tmp_path / "history.jsonl", f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=1"
    owner, user = Scheduler(url), Scheduler(url, dispatch=False)
    replaced = asyncio.Event()

    @owner.handler(name="work")
    async def work(payload: bytes) -> None: ...

    begin = Transactions.begin

    async def overtaken(self: Transactions, outgoing: Sequence[Outgoing]) -> list[int]:
        """Replace the message while the transaction is under way that ends it."""
        if not replaced.is_set() and any(each.key == b"m" and each.value is None for each in outgoing):
            replaced.set()
            await user.schedule(b"new", to="handler:work", id="m", delay="1h" if is_blind else "2s")
        return await begin(self, outgoing)

    monkeypatch.setattr(Transactions, "begin", overtaken)
    if is_blind:
        monkeypatch.setattr(precedence, "is_unread", lambda seen, read_to: False)
    with h.History(path, "owner") as of_owner, h.History(path, "user") as of_user:
        h.record(owner, of_owner)
        h.record(user, of_user)
        async with owner, user:
            await owner.schedule(b"old", to="handler:work", id="m", delay="100ms")
            await replaced.wait()
            if not is_blind:
                await until(lambda: succeeded(path) == 2, "both versions have run")
            await until(lambda: is_empty(owner), "nothing waits")
            of_owner.write(await h.content_of(owner.store))
    report = h.check_file(path)
    print("\n".join(report.lines()))
    assert {violation.rule for violation in report.violations} == ({"S2"} if is_blind else set())


async def is_empty(scheduler: Scheduler) -> bool:
    await asyncio.sleep(0.05)  # counting at once would take all the time of the loop
    return not await scheduler.counts()

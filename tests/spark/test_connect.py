"""Jobs run by the commands in docs/spark, as clients of a Spark Connect server that have no Java."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aiodelay import Scheduler
from tests.integration.test_redis_fred84 import enqueue
from tests.spark.connect import EACH, SHELL, Client
from tests.spark.messages import stored
from tests.spark.test_engine import Topics, check_none_early, ids, now_ms
from tests.spark.test_kills import wait_until
from tests.spark.test_migrate import CALM, CUTOVER, FAR, Delivered, Traffic
from tests.spark.test_takeover import DUE_MS, send_etf1
from tests.support.journals import note
from tests.support.kafka import new_name
from tests.support.processes import ROOT
from tests.support.servers import RedisServer, redis_products, start

pytestmark = pytest.mark.timeout(600)

ONE_BY_ONE = pytest.param(EACH, id="one-by-one", marks=pytest.mark.nightly)
"""A process for each line, which takes three times as long."""
ROUNDS = 20
PAGES = ROOT / "docs" / "spark"
WRITTEN = 2026
"""When the pages were: what they have in the next year, or in two years, is as far ahead whenever this runs."""


@pytest.fixture
def client(connect: Client) -> Client:
    """A client of the server, in a folder that has nothing but the examples."""
    for each in connect.folder.iterdir():
        shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
    (connect.folder / "examples").symlink_to(ROOT / "examples")
    return connect


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A server with nothing in it: the pages' lines name no namespace."""
    server = start(redis_products()[0].program)
    yield server
    server.stop()


def block(page: str, after: str = "", **places: str) -> str:
    """Return a page's next block of shell after a text, with other places than those that it names."""
    text = (PAGES / page).read_text("utf-8")
    found = re.search(r"```sh\n(.*?)```", text[text.index(after) :], re.DOTALL)
    assert found is not None
    return placed(found[1], **places)


def placed(lines: str, **places: str) -> str:
    for name, place in places.items():
        assert name in lines
        lines = lines.replace(name, place)
    years = datetime.now(UTC).year - WRITTEN
    return re.sub(r"\b202[78](?=-)", lambda found: f"{int(found[0]) + years}", lines)


def told(summary: Mapping[str, Any]) -> dict[str, int]:
    return {name: n for name, n in summary["counts"].items() if n}


@pytest.mark.parametrize("aiodelay", [pytest.param(SHELL, id="at-once"), ONE_BY_ONE])
def test_every_job_runs_by_its_line_on_the_example_data(client: Client, aiodelay: str) -> None:
    summaries = {each["job"]: each for each in client.ran(block("README.md", "## Every job once"), aiodelay)}
    assert {job: told(each) for job, each in summaries.items()} == {
        "backfill": {"accepted": 1000, "stored": 1000},
        "simulate": {"messages": 1000},
        "snapshot": {"messages": 1000},
        "reconcile": {"drift": 1, "same": 999},
        "repair": {"rescheduled": 1},
        "archive": {"batches": 1},
        "compact": {},
        "replay": {"accepted": 2, "stored": 2},
        "report": {"delivered": 2},
        "cold put": {"accepted": 100, "put": 100},
        "cold cancel": {"ended": 1},
        "promote": {"stored": 99},
        "migrate": {"copied": 99, "moved": 99, "same": 99},
    }
    assert summaries["archive"]["facts"]["days"]
    for job in ("backfill", "reconcile", "repair", "replay"):
        assert summaries[job]["facts"]["tombstone_window"] == "1d"
    assert "Delivery report" in (client.folder / "report.html").read_text("utf-8")
    assert "Dispatch simulation" in (client.folder / "next-week" / "simulate.html").read_text("utf-8")


@pytest.mark.nightly  # in process: test_promote and test_cold
@pytest.mark.parametrize("aiodelay", [pytest.param(SHELL, id="at-once"), ONE_BY_ONE])
def test_what_is_two_years_ahead_is_put_promoted_and_delivered_by_the_lines_of_the_page(
    client: Client, redis: RedisServer, aiodelay: str
) -> None:
    store = {"redis://localhost": redis.url}
    *lines, deliver = block("cold.md", **store).splitlines()
    put, cancelled, promoted = client.ran("\n".join(lines), aiodelay)
    assert (put["counts"]["put"], cancelled["counts"]["ended"], promoted["rows"]) == (1000, 2, 0)
    (now,) = re.findall(r"`(--now 2028-\S+)`", (PAGES / "cold.md").read_text("utf-8"))
    (promoted,) = client.ran(f"{lines[-1]} {placed(now)}", aiodelay)
    assert told(promoted) == {"stored": 998}
    client.ran(f"aiodelay fire {' '.join(stored(redis.url, 'default'))} --store {redis.url}\n{deliver}", aiodelay)
    assert not stored(redis.url, "default")
    pq.write_table(pa.table({"id": ["order-0000000", "order-0000007"]}), client.folder / "withdrawn")
    (cancelled,) = client.ran(block("cold.md", "## Cancel", **store), aiodelay)
    assert told(cancelled) == {"promoted": 2, "ended": 1, "hot_ended": 1, "hot_barred": 1}
    load = next((client.folder / "cold" / "facts").glob("load=*"))
    kept, over = {*load.iterdir()}, load / "due_day=2025-01-01"
    over.mkdir()
    subprocess.run(block("cold.md", "## Layout"), shell=True, check=True, cwd=client.folder)
    assert {*load.iterdir()} == kept


@pytest.mark.nightly  # waits for 20 seconds; in process: test_promote
def test_what_was_put_two_years_ago_is_delivered_at_its_time(client: Client) -> None:
    now = datetime.now(UTC)
    due = now + timedelta(seconds=20)
    (put, promoted) = client.ran(f"""
        python examples/spark/orders.py orders --rows 3 --first {due.isoformat()} --span-s 1
        map='id=order_id,due_at=remind_at,payload=struct(*)'
        then={(now - timedelta(days=730)).isoformat()}
        aiodelay spark cold put --from parquet:orders --map "$map" --to handler:remind --tier cold --now $then
        then={(now - timedelta(days=3)).isoformat()}
        aiodelay spark promote --tier cold --store sqlite:///delay.db --now $then
        python examples/spark/remind.py sqlite:///delay.db --orders 3
    """)
    assert datetime.now(UTC) > due + timedelta(seconds=2 / 3)
    assert (put["counts"]["put"], told(promoted)) == (3, {"stored": 3})


@pytest.mark.nightly  # in process: test_migrate
def test_a_store_is_migrated_live_by_the_line_of_the_page(client: Client, redis: RedisServer, kafka: str) -> None:
    second = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true"
    places = {"redis://old": redis.url, "kafka://new:9092/schedules?create_topic=true": second}
    places |= {"2027-01-01T00:00:00Z": CUTOVER.isoformat(), "s3a://bucket/migration": "migration"}
    line = block("migrate.md", **places)

    async def live() -> Mapping[str, Any]:
        delivered = Delivered()
        async with (
            delivered.by("first", Scheduler(redis.url)) as a,
            delivered.by("second", Scheduler(second)) as b,
        ):
            traffic = Traffic(a, b)
            for number in range(CALM):
                await traffic.schedule(f"calm{number}", FAR, b"calm")
            with client.running(line) as process:
                for number in range(ROUNDS):
                    if number == ROUNDS // 2:
                        await asyncio.to_thread(wait_until, process, (client.folder / "migration").exists)
                    assert process.poll() is None
                    await traffic.play(number)
                    await asyncio.sleep(0.1)  # messages change at all times of a pass
                output, _ = await asyncio.to_thread(process.communicate)
            assert process.returncode == 0, client.errors[-5_000:]
            await traffic.check_each_once(delivered)
            summary: Mapping[str, Any] = json.loads(output)
            return summary

    summary = asyncio.run(live())
    counts = summary["counts"]
    assert (summary["rejected"], counts["left"], counts["drift"]) == (0, 0, 0)
    assert counts["same"] >= counts["moved"] >= CALM


@pytest.mark.nightly  # in process: test_migrate
def test_other_schedulers_are_taken_over_by_the_lines_of_the_page(
    client: Client, redis: RedisServer, kafka: str
) -> None:
    topic = send_etf1(kafka)
    enqueue(redis, 1, DUE_MS)
    places = {
        "redis://old": redis.url,
        "redis://new": redis.url,
        "kafka://old:9092/schedules": f"kafka://{kafka}/{topic}",
    }
    fred84, etf1 = client.ran(block("migrate.md", "## Other schedulers", **places))
    assert told(fred84) == told(etf1) == {"stored": 1, "same": 1}


@pytest.mark.nightly  # in process: test_simulate
def test_simulate_runs_by_its_lines(client: Client, redis: RedisServer) -> None:
    async def schedule() -> None:
        async with Scheduler(redis.url, dispatch=False) as scheduler:
            await scheduler.schedule(b"", to="redis-list:orders", delay="1h")

    asyncio.run(schedule())
    client.ran("python examples/spark/orders.py orders --rows 100")
    of_store, of_files = client.ran(block("simulate.md", **{"redis://localhost": redis.url}))
    assert (told(of_store), told(of_files)) == ({"messages": 1}, {"messages": 100, "overdue": 100})
    for folder in ("next-week", "january"):
        assert (client.folder / folder / "simulate.html").exists()


@pytest.mark.nightly  # in process: test_engine
def test_the_engine_delivers_by_its_line(client: Client, kafka: str) -> None:
    topics = Topics(kafka)
    line = block("engine.md", **{"kafka://localhost:9092/schedules": topics.url})
    with client.running(f"{line} --trigger 2s") as process:
        topics.send(topics.put("first", 0))
        topics.read(topics.out, 1, is_going=lambda: process.poll() is None)
        topics.send(*(topics.put(f"m{n}", now_ms() + 2_000) for n in range(50)))
        found = topics.read(topics.out, 51, is_going=lambda: process.poll() is None)
        wait_until(process, lambda: delivered_by(client) == 51)  # its batch is committed
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate()
    assert process.returncode == 0, client.errors
    summary = json.loads(output)
    assert (summary["job"], summary["rejected"], summary["counts"]["delivered"]) == ("engine", 0, 51)
    assert summary["facts"]["lateness_ms"]["max"] > 0
    check_none_early(found)
    assert ids(found) == sorted(["first", *(f"m{n}" for n in range(50))])


def test_an_interrupted_archive_job_tells_what_it_did(client: Client) -> None:
    url, folder = f"sqlite:///{client.folder / 'delay.db'}?journal=1000", client.folder / "events"
    commits = folder / "_checkpoint" / "commits"
    with client.running(f"aiodelay spark archive --store {url} --to {folder} --every 1s") as process:
        for number in range(2):
            before = len(list(commits.glob("[0-9]*")))
            asyncio.run(note(url, 1 + 30 * number, 30))
            wait_until(process, lambda: len(list(commits.glob("[0-9]*"))) > before)  # noqa: B023 - it ends here
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate()
    assert process.returncode == 0, client.errors[-5_000:]
    summary = json.loads(output)
    assert summary["job"] == "archive"
    assert summary["rows"] in (30, 60), "what the second batch came to may not have been told yet"


def delivered_by(client: Client) -> int:
    lines = [json.loads(line) for line in client.errors.splitlines(keepends=True) if re.match(r'\{"batch".*\n', line)]
    return sum(line["delivered"] for line in lines)

from __future__ import annotations

import asyncio
import inspect
import json
import re
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from aiodelay import Scheduler
from examples import outbox
from tests.support.command import PYTEST, Program
from tests.support.servers import Found, redis_servers, serving

# What an example's log may say.
EXPECTED = re.compile(
    r"attempt \d+ at \S+ failed|is given up|is rejected|no instance reads it|alarm is over|records go to|"
    "replication factor is 1|has waited|missed|of its messages were returned|it stood still|did not reach the server|"
    "; trying again|works again after|a transaction is open at|closing (the store and sinks took|cancels tasks)"
)
RETURNED = re.compile("of its messages were returned")
"""Such messages are delivered again: a process stood still, or was killed, while they were in flight."""
PATIENT = "?timeout_ms=60000"
"""For the URL of a server that may stand still."""
EXAMPLES = Path(__file__).parents[2] / "examples"


def output_of(name: str, *arguments: str, cwd: Path) -> list[str]:
    return output_and_complaints(name, *arguments, cwd=cwd)[0]


def output_and_complaints(name: str, *arguments: str, cwd: Path) -> tuple[list[str], list[str]]:
    with Program(str(EXAMPLES / name), *arguments, cwd=cwd) as program:
        assert program.exit_code() == 0, program.err.seen
        complaints = program.complaints()
        assert [line for line in complaints if not EXPECTED.search(line)] == []
        return program.out.seen, complaints


def assert_prints(expected: list[str], name: str, *arguments: str, cwd: Path) -> None:
    """Check what several processes print, in any order. Only messages that were returned may be handled again."""
    said, complaints = output_and_complaints(name, *arguments, cwd=cwd)
    if any(map(RETURNED.search, complaints)):
        assert set(said) == set(expected)
    else:
        assert sorted(said) == sorted(expected)


def with_longer_periods(name: str, periods: Mapping[str, str], folder: Path) -> str:
    """Copy an example, and replace its periods, so that a process may stand still for some seconds without harm."""
    text = (EXAMPLES / name).read_text()
    for short, long in periods.items():
        assert short in text, short
        text = text.replace(short, long)
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize("found", redis_servers(), ids=lambda found: found.name)
def test_payment_reminders(tmp_path: Path, found: Found) -> None:
    periods = {"DAY = timedelta(seconds=0.8)": "DAY = timedelta(seconds=3.5)", 'timeout="5s"': 'timeout="1m"'}
    example = with_longer_periods("payment_reminders.py", periods, tmp_path)
    with serving(found) as url:
        said = output_of(example, url + PATIENT, cwd=tmp_path)
        again = output_of(example, url + PATIENT, cwd=tmp_path)
    assert sorted(again) == sorted(said)
    assert said[:6] == [
        *[f"order {order} is placed" for order in (1, 2, 3, 4)],
        "waiting: 4",
        "order 2 is paid (its reminder: cancelled, its end: not_found)",
    ]
    assert sorted(said[6:9]) == [
        "order 3 is paid (its reminder: not_found, its end: cancelled)",
        "to ann@example.com: please pay order 1 (attempt 2)",
        "to cyd@example.com: veuillez payer la commande 3 (attempt 2)",
    ]
    assert said[9:] == [
        "order 1 is given up",
        "remind-4 was rejected: the customer has no address",
    ]


def test_payment_reminders_resume_from_their_file(tmp_path: Path) -> None:
    with Program(str(EXAMPLES / "payment_reminders.py"), "sqlite:///shop.db", cwd=tmp_path) as program:
        program.out.wait_for("^to ann@example.com")
    assert (tmp_path / "shop.db").exists()
    assert "order 1 is given up" in output_of("payment_reminders.py", "sqlite:///shop.db", cwd=tmp_path)


def test_recurring(tmp_path: Path) -> None:
    said = output_of("recurring.py", cwd=tmp_path)
    assert said[0] == "At 09:00 on Monday (Europe/Paris); skipped while an earlier occurrence is being retried:"
    assert all(re.fullmatch(r"  Mon \d\d \w{3} \d{4}, 09:00 CES?T", line) for line in said[1:4])
    beats = [line for line in said[4:] if line.startswith("beat, ")]
    assert all(re.fullmatch(r"beat, due \d\d:\d\d:\d\d\.\d{6}, \d+ ms late", line) for line in beats)
    assert len(beats) >= 3, "a further one may be under way when it is cancelled"
    beat, weekly = (line for line in said[4:] if line not in beats)
    assert beat in ("beat: cancelled", "beat: in_flight")
    assert weekly == "weekly-sales: cancelled"


@pytest.mark.parametrize(
    "options",
    [pytest.param((), marks=pytest.mark.nightly), ("-p", "no:randomly")],
    ids=["at random", "in order"],
)
def test_testing_with_virtual_time(tmp_path: Path, options: tuple[str, ...]) -> None:
    file = "testing_with_virtual_time.py"
    shutil.copy(EXAMPLES / file, tmp_path)  # away from our settings of pytest
    with Program(*PYTEST, *options, file, cwd=tmp_path) as program:
        assert program.exit_code() == 0, program.out.seen
        assert re.search(r"5 passed in [0-9.]+s", program.out.seen[-1])


@pytest.mark.parametrize("found", redis_servers(), ids=lambda found: found.name)
def test_three_roles(tmp_path: Path, found: Found) -> None:
    expected = [
        "5 orders are placed, the last of them is paid",
        "moving exactly once",
        *[f"order {order}: customer {order} is notified" for order in range(1, 6)],
        *[f"order {order}: payment checked at attempt {3 if order == 2 else 1}" for order in range(1, 5)],
    ]
    with serving(found) as url:
        assert_prints(expected, "three_roles.py", url + PATIENT, cwd=tmp_path)


@pytest.mark.parametrize("found", redis_servers(), ids=lambda found: found.name)
def test_fan_out(tmp_path: Path, found: Found) -> None:
    orders = range(1, 7)
    expected = [
        "6 orders are published",
        *[f"{consumer}: order {order} at attempt 1" for consumer in ("billing", "mail") for order in orders],
        *[f"shipping: order {order} at attempt {2 if order == 3 else 1}" for order in orders],
        *["billing has 0 orders waiting", "shipping has 0 orders waiting"] * 2,
        "mail has 6 orders waiting",
        "mail has 0 orders waiting",
        "the topic keeps 0 of 6 orders",
    ]
    with serving(found) as url:
        assert_prints(expected, "fan_out.py", url + PATIENT, cwd=tmp_path)


@pytest.mark.parametrize("found", redis_servers(), ids=lambda found: found.name)
def test_topic_log(tmp_path: Path, found: Found) -> None:
    expected = [
        "6 orders are appended",
        *[f"{consumer}: order {order}" for consumer in ("billing", "report") for order in range(1, 7)],
        "the cursor of billing is at 6",
        *["report: order 5", "report: order 6", *["the cursor of report is at 6"] * 2],
        "order 7 has index 7, and 5 orders are dropped",
        *["billing: order 6, after 5 that it has missed", "billing: order 7", "the cursor of billing is at 7"],
    ]
    with serving(found) as url:
        assert_prints(expected, "topic_log.py", url + PATIENT, cwd=tmp_path)


def test_delay_box(tmp_path: Path, kafka: str) -> None:
    with serving(redis_servers()[0]) as url:
        said = output_of("delay_box.py", kafka, url + PATIENT, cwd=tmp_path)
    assert said[0] == "the shop has asked 5 times"
    told = [re.fullmatch(r"shop is told: (.*) \((\d+\.\d) s later\)", line) for line in said]
    waited = {line[1]: float(line[2]) for line in told if line}
    assert waited.keys() == {"order 1 is not paid", "order 2 is not paid", '{"order": 3, "paid": false}'}
    assert waited["order 2 is not paid"] >= 2
    assert waited["order 1 is not paid"] >= 6
    assert {line for line in said if line.startswith("refused")} == {
        "refused: its countdown is a text, not a number of seconds",
        "refused: its topic salaries is not allowed",
    }
    assert len(said) == 6


def test_publish_at_noon(tmp_path: Path, kafka: str) -> None:
    said = output_of("publish_at_noon.py", kafka, cwd=tmp_path)
    assert said[0] == "the editors have scheduled three videos, and withdrawn one of them"
    scheduling = [line for line in said[1:] if " is o" not in line]
    assert re.fullmatch(r"the programme of the day comes next at 1[01]:00 UTC, then each day", scheduling.pop(1))
    assert scheduling == ["vid5: cancelled", "the programme: cancelled"]
    read = [line for line in said if " is o" in line]
    assert sorted(read) == [
        "vid1 is online: video 1, final cut",
        "vid3 is online: video 3",
        "vid4 is offline",
        "vid4 is online: video 4",
    ]
    assert read.index("vid4 is online: video 4") < read.index("vid4 is offline")


@pytest.mark.parametrize("found", [None, *redis_servers()], ids=lambda found: found.name if found else "sqlite")
def test_outbox(tmp_path: Path, found: Found | None) -> None:
    example = with_longer_periods("outbox.py", {"delay=timedelta(seconds=2)": "delay=timedelta(seconds=10)"}, tmp_path)
    with nullcontext("sqlite:///delay.db") if found is None else serving(found) as url:
        patient = url if found is None else url + PATIENT
        said = output_of(example, "sqlite+aiosqlite:///shop.db", patient, cwd=tmp_path)
    assert said == [
        "order 1 is placed",
        "order 2 is placed",
        "order 3 is not placed, and nobody reminded: there is no product 3",
        "order 2 is paid",
        "please pay order 1",
    ]


def test_outbox_goes_on_after_a_kill(tmp_path: Path) -> None:
    urls = "sqlite+aiosqlite:///shop.db", "sqlite:///delay.db"
    with Program(str(EXAMPLES / "outbox.py"), *urls, cwd=tmp_path) as program:
        program.out.wait_for("^order 2 is placed")
    said = [*program.out.seen, *output_of("outbox.py", *urls, cwd=tmp_path)]
    assert "order 1 was placed before" in said
    said += output_of("outbox.py", *urls, cwd=tmp_path)
    assert said.count("please pay order 1") == 1


@pytest.mark.parametrize("how", ["--namespace", "AIODELAY_NAMESPACE"])
def test_spark_reminders_are_those_of_a_namespace(tmp_path: Path, how: str) -> None:
    url = f"sqlite:///{tmp_path}/delay.db"

    async def schedule(namespace: str, order: int) -> None:
        row = {"order_id": f"order-{order}", "customer": "Ann", "total_cents": 1250}
        due = row | {"remind_at": "2026-01-01T00:00:00Z"}
        async with Scheduler(url, namespace=namespace, dispatch=False) as scheduler:
            await scheduler.schedule(json.dumps(due).encode(), to="handler:remind", delay="0s")

    asyncio.run(schedule("default", 1))
    asyncio.run(schedule("shop", 2))
    option = ["--namespace", "shop"] if how.startswith("-") else []
    program_file = str(EXAMPLES / "spark" / "remind.py")
    with Program(program_file, url, *option, cwd=tmp_path, environment={how: "shop"}) as program:
        assert program.exit_code() == 0, program.err.seen
        assert program.out.seen == ["order-2: Ann has to pay 12.50"]


@pytest.mark.parametrize("part", [outbox.Outbox, outbox.schedule, outbox.move_rows], ids=lambda part: part.__name__)
def test_the_page_about_the_outbox_shows_the_example(part: Any) -> None:  # noqa: ANN401 - a class, a function
    assert inspect.getsource(part) in (EXAMPLES.parent / "docs" / "outbox.md").read_text()


def test_no_example_is_forgotten() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "delay_box.py",
        "fan_out.py",
        "outbox.py",
        "payment_reminders.py",
        "publish_at_noon.py",
        "recurring.py",
        "testing_with_virtual_time.py",
        "three_roles.py",
        "topic_log.py",
    }


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_the_list_of_examples_says_how_each_is_run(path: Path) -> None:
    (line,) = re.findall(r"^Run it: (.*?)(?:    .*)?$", path.read_text(), re.MULTILINE)
    assert f"| [{path.stem}]({path.name}) | `{line}` |" in (EXAMPLES / "README.md").read_text()

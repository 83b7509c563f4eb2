from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from aiodelay import Scheduler
from tests.support.cli import Cli
from tests.support.command import DEADLINE_S, STOOD_STILL, Program, absolute_path, aiodelay
from tests.support.servers import redis_servers, serving
from tests.support.waiting import until_sync

EVENT = re.compile(
    r"(?P<time>\d\d:\d\d:\d\d\.\d{3})  (?P<verb>scheduled|delivered|retry|cancelled|replaced|dead letter) +"
    r"(?P<what>[\w:]+) +(?P<id>\S+)? +(?P<note>.+)"
)
SCREENS = {
    "/": "contains p99",
    "/messages": "RenewContract",
    "/recurring": "Heartbeat",
    "/dead": "CardExpiredError",
    "/sinks": "log",
    "/instances": "RenewContract",
}
"""Of the page, each with something that it shows."""
OF_TOPICS = {"/consumers": "ledger"}
"""On a store with topics beside it."""
EACH_KIND = (
    "  scheduled  ",
    "  retry  ",
    "  cancelled  ",
    "  replaced  ",
    "  dead letter  ",
    "  delivered  .*, every 1s$",
    "  delivered +log:audit ",
    r"  delivered  .*  attempt 3, due \d+ ms ago$",
)
"""Lines of all that can happen. The first comes at the start, each of the others again and again."""
SUMMARY = re.compile(r"scheduled \d+ │")
"""Printed every few seconds, so how many there are depends on the machine."""
LATE = re.compile(r"late (\d+) ms(?! \(was due before)")
COUNTED = {
    "delivered": "delivered",
    "retry": "retried",
    "cancelled": "cancelled",
    "replaced": "replaced",
    "dead letter": "dead",
}


class Told(NamedTuple):
    """The demo's output, taken apart."""

    first: str
    events: list[re.Match[str]]
    others: list[str]
    summary: str

    @property
    def verbs(self) -> Counter[str]:
        return Counter(event["verb"] for event in self.events)

    def counts(self) -> dict[str, int]:
        return {name: int(number) for name, number in re.findall(r"(\w+) (\d+)(?= │|$)", self.summary)}


def taken_apart(lines: list[str]) -> Told:
    first, *middle, summary = lines
    told = [line for line in middle if not SUMMARY.match(line) and not STOOD_STILL.search(line)]
    matches = [(line, EVENT.fullmatch(line)) for line in told]
    return Told(
        first, [found for _, found in matches if found], [line for line, found in matches if not found], summary
    )


def assert_summary_agrees(told: Told) -> None:
    counts = told.counts()
    assert {name: counts[name] for name in COUNTED.values()} == {
        name: told.verbs[verb] for verb, name in COUNTED.items()
    }
    late = sorted(int(found[1]) for event in told.events if (found := LATE.search(event["note"])))
    if not late:
        assert "lateness" not in told.summary
        return
    percentiles = [late[-(-len(late) * percent // 100) - 1] for percent in (50, 99)]
    assert told.summary.endswith(f"lateness p50 {percentiles[0]} ms p99 {percentiles[1]} ms")


def assert_quiet_end(program: Program, folder: Path) -> Told:
    assert program.exit_code() == 0
    assert program.complaints() == []
    assert list(folder.iterdir()) == [], "the temporary file is gone"
    return taken_apart(program.out.seen)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the demo puts its temporary file."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.fixture
def demo(tmp_path: Path, folder: Path) -> Iterator[Program]:
    with aiodelay("demo", cwd=tmp_path, environment={"TMPDIR": str(folder)}) as program:
        yield program


def wait_for_all(program: Program, patterns: Iterable[str]) -> None:
    """Wait until each pattern has matched a line, in any order."""
    missing = set(patterns)
    while missing:
        line = program.out.wait_for("|".join(missing))
        missing = {pattern for pattern in missing if not re.search(pattern, line)}


def test_all_that_can_happen_is_shown(tmp_path: Path, folder: Path) -> None:
    with aiodelay("demo", "--seconds", "600", cwd=tmp_path, environment={"TMPDIR": str(folder)}) as program:
        wait_for_all(program, EACH_KIND)
        program.send(signal.SIGTERM)
        told = assert_quiet_end(program, folder)
    assert re.fullmatch(
        r"aiodelay \d+\.\d+\S* │ store sqlite, a temporary file │ page http://127\.0\.0\.1:\d+"
        r" │ stops after 600 s, or with Ctrl-C",
        told.first,
    )
    assert told.others == []
    assert told.verbs.keys() == {*COUNTED, "scheduled"}
    assert_summary_agrees(told)
    counts = told.counts()
    assert counts["pending"] >= 200
    assert counts["scheduled"] >= counts["pending"] + counts["cancelled"] + counts["dead"]


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGTERM],  # SIGINT ends the demo with a page below
    ids=["SIGINT", "SIGTERM"],
)
def test_a_signal_ends_it_in_order(demo: Program, folder: Path, number: int) -> None:
    assert demo.out.wait_for("").endswith("│ Ctrl-C to stop")
    demo.out.wait_for("  delivered  ")
    assert list(folder.iterdir()), "the temporary file is there"
    demo.send(number)
    told = assert_quiet_end(demo, folder)
    assert_summary_agrees(told)


@pytest.mark.parametrize("store", [pytest.param(None, marks=pytest.mark.nightly), "redis"])
def test_every_screen_of_its_page_has_something_on_it(store: str | None, tmp_path: Path, folder: Path) -> None:
    arguments = [] if store is None else ["--store", store]
    with aiodelay("demo", *arguments, cwd=tmp_path, environment={"TMPDIR": str(folder)}) as program:
        found = re.search(r"page (http://\S+)", program.out.wait_for("^aiodelay "))
        assert found is not None
        program.out.wait_for("  dead letter  ")
        screens = SCREENS if store is None else SCREENS | OF_TOPICS
        with httpx.Client(base_url=found[1], timeout=DEADLINE_S, trust_env=False) as client:
            pages = {path: client.get(path) for path in screens}
        assert {path: page.status_code for path, page in pages.items()} == dict.fromkeys(pages, 200)
        for path, page in pages.items():
            assert screens[path] in page.text, path
            assert 'class="empty"' not in page.text, path
        program.send(signal.SIGINT)
        told = assert_quiet_end(program, folder)
    if store is not None:
        assert f" store {redis_servers()[0]}" in told.first
        remain = [line for line in told.others if "remain" in line]
        assert remain == [], "nothing remains of a server that was started for the demo"
    assert_summary_agrees(told)


def test_a_summary_comes_every_few_seconds(demo: Program) -> None:
    summary = demo.out.wait_for("^scheduled [0-9]+ │")
    assert "pending" in summary
    assert "lateness p50" in summary


def test_it_ends_quietly_when_the_reader_goes_away(tmp_path: Path, folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "aiodelay", "demo"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": absolute_path(os.environ.get("PYTHONPATH", "")), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(DEADLINE_S) == 0
        assert process.stderr.read() == b""
    assert list(folder.iterdir()) == []


def test_what_is_kept_is_resumed(tmp_path: Path) -> None:
    with aiodelay("demo", "--no-page", "--keep", "kept.db", cwd=tmp_path) as program:
        program.out.wait_for("  scheduled  ")
        program.send(signal.SIGTERM)
        assert program.exit_code() == 0
        *_, remain, summary = program.out.seen
    found = re.fullmatch(r"(\d+) pending messages remain in kept\.db; the same command resumes them", remain)
    assert found is not None
    assert re.search(rf"pending {found[1]}\b", summary)
    fired = asyncio.run(fire_a_contract(tmp_path / "kept.db"))
    with aiodelay("demo", "--no-page", "--keep", "kept.db", cwd=tmp_path) as program:
        program.out.wait_for("^aiodelay .* store sqlite, kept.db")
        assert program.out.wait_for("") == f"resuming {found[1]} pending messages"
        program.out.wait_for(f"  delivered  .*{fired} ")


async def fire_a_contract(file: Path) -> str:
    """Make a message of the demo due now, which is due in minutes to months. Return the end of its id."""
    async with Scheduler(f"sqlite:///{file}", namespace="aiodelay-demo", dispatch=False) as scheduler:
        (contract,) = [snapshot.record.id async for snapshot in scheduler.pending("RenewContract", limit=1)]
        assert await scheduler.fire(contract) == "fired"
    return contract[-8:]


def test_what_is_kept_outlives_kill_9(tmp_path: Path) -> None:
    with aiodelay("demo", "--no-page", "--keep", "kept.db", cwd=tmp_path) as program:
        program.out.wait_for("  scheduled  ")
        program.out.wait_for("  delivered  ")
        program.send(signal.SIGKILL)
    with aiodelay("demo", "--no-page", "--keep", "kept.db", "--seconds", "1", cwd=tmp_path) as program:
        program.out.wait_for(r"^resuming 2\d\d pending messages")
        assert program.exit_code() == 0


def test_any_store_will_do_and_no_page_is_needed(tmp_path: Path) -> None:
    with aiodelay("demo", "--no-page", "--store", "memory://", "--seconds", "1", cwd=tmp_path) as program:
        assert program.exit_code() == 0
        told = taken_apart(program.out.seen)
    assert "│ store memory:// │" in told.first
    assert "page" not in told.first
    assert told.others == [], "nothing remains of a store that survives nothing"
    assert_summary_agrees(told)


def test_no_server_outlives_a_killed_demo(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"TMPDIR": str(folder), "DOCKER_HOST": "unix:///nowhere/docker.sock", "AIODELAY_TEST_REDIS_URL": ""}
    with aiodelay("demo", "--no-page", "--store", "redis", cwd=tmp_path, environment=environment) as demo:
        demo.out.wait_for("  delivered  ")
        (server_folder,) = folder.glob("aiodelay-redis-*")
        monkeypatch.chdir(server_folder)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(DEADLINE_S)
            connection.connect("redis.sock")
            connection.sendall(b"PING\r\n")  # accepted: a connection that still waits for that would be reset
            assert connection.recv(7) == b"+PONG\r\n"
            demo.send(signal.SIGKILL)
            assert connection.recv(1) == b""
    until_sync(lambda: not server_folder.exists(), f"{server_folder} is removed", DEADLINE_S)


def test_what_remains_on_a_redis_server_is_resumed(tmp_path: Path) -> None:
    with serving(redis_servers()[0]) as url:
        for resumed in (False, True):
            with aiodelay("demo", "--no-page", "--store", url, cwd=tmp_path) as program:
                program.out.wait_for("  delivered  " if resumed else "  scheduled  ")
                program.send(signal.SIGTERM)
                assert program.exit_code() == 0
                assert program.complaints() == []
                assert any(line.startswith("resuming 2") for line in program.out.seen) == resumed
                assert f"pending messages remain in {url}, namespace aiodelay-demo" in program.out.seen[-2]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        (
            ["--store", "nowhere://x"],
            1,
            "aiodelay: scheme of store nowhere://x is 'nowhere'; allowed: kafka:, memory:, redis:",
        ),
        (["--store", "sqlite:////no/such/folder/x.db"], 5, "/no/such/folder"),
        (["--store", "redis://user:secret@127.0.0.1:1"], 5, "redis://user:***@127.0.0.1:1 is unavailable"),
        (["--store", "redis", "--keep", "x.db"], 2, "--store and --keep both say where messages are kept"),
        (["--store", "memory://", "--keep", "x.db"], 2, "--store and --keep both say where messages are kept"),
        (["--seconds", "0"], 2, "--seconds"),
        (["--keep", "."], 2, "--keep"),
        (["--secnds", "3"], 2, "--seconds"),
    ],
)
def test_what_it_cannot_do_is_said_on_stderr(tmp_path: Path, arguments: list[str], exit_code: int, text: str) -> None:
    run = Cli("", tmp_path)("demo", *arguments)
    assert run.code == exit_code
    assert text in run.err
    assert "Traceback" not in run.err
    assert exit_code == 2 or len(run.err.splitlines()) == 1


def test_a_process_says_it_on_stderr_too(tmp_path: Path) -> None:
    with aiodelay("demo", "--store", "nowhere://x", cwd=tmp_path) as program:
        assert program.exit_code() == 1
        assert [line[:35] for line in program.err.seen] == ["aiodelay: scheme of store nowhere:/"]
        assert program.out.seen == []


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are POSIX")
def test_a_terminal_keeps_the_summary_in_its_last_lines(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "aiodelay", "demo", "--store", "memory://", "--no-page"],
        cwd=tmp_path,
        env={
            **{name: value for name, value in os.environ.items() if name != "NO_COLOR"},
            "PYTHONPATH": absolute_path(os.environ.get("PYTHONPATH", "")),
            "TERM": "xterm",
            "COLUMNS": "80",
        },
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    coloured, replaced = b"\x1b[32mdelivered\x1b[0m", b"\r\x1b[1A\x1b[J"  # two lines of summary, replaced in place
    written = bytearray()
    while coloured not in written or replaced not in written:
        written += os.read(ours, 4096)
    process.send_signal(signal.SIGTERM)
    written += read_to_the_end(ours)
    assert process.wait(DEADLINE_S) == 0
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == b""
    assert re.search(r"\x1b\[Jscheduled \d+ │ [^\n]* lateness p50 \d+ ms p99 \d+ ms\r\n$", written.decode())


def read_to_the_end(terminal: int) -> bytes:
    read = bytearray()
    try:
        while chunk := os.read(terminal, 4096):
            read += chunk
    except OSError:
        pass  # how Linux says that the other end was closed
    finally:
        os.close(terminal)
    return bytes(read)

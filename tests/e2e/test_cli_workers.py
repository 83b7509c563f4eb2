"""`aiodelay run --workers N --reload`: several processes as one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from aiodelay import Message, Scheduler
from tests.support.cli import Cli
from tests.support.command import DEADLINE_S, Program, aiodelay
from tests.support.service import text_at
from tests.support.waiting import until_sync

APP = """
import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from aiodelay import Scheduler

scheduler = Scheduler("{store}", drain="2m")


@dataclass
class Work:
    pass


@scheduler.handler(concurrency=1)
async def work(event: Work) -> None:
    print(f"{name} started in {{os.getpid()}}\\n", end="", flush=True)  # in one piece: processes share the output
    {body}
    print(f"{name} finished in {{os.getpid()}}\\n", end="", flush=True)
"""


@dataclass
class Work:
    pass


SLOW_REMOVAL = """
import time

remove = asyncio.SelectorEventLoop.remove_signal_handler


def remove_slowly(loop: asyncio.SelectorEventLoop, number: int) -> bool:
    removed = remove(loop, number)
    time.sleep(0.2)  # from here on, a signal ends the process silently
    return removed


asyncio.SelectorEventLoop.remove_signal_handler = remove_slowly
"""
WAIT_FOR_GO = "while not Path('go').exists(): await asyncio.sleep(0.01)"


def write_app(
    folder: Path, *, name: str = "work", takes_s: float = 0.01, store: str = "sqlite:///app.db", body: str = ""
) -> None:
    body = body or f"await asyncio.sleep({takes_s})"
    (folder / "app.py").write_text(APP.format(name=name, body=body, store=store))


async def schedule(folder: Path, messages: int) -> None:
    async with Scheduler(f"sqlite:///{folder}/app.db", dispatch=False) as scheduler:
        await scheduler.schedule_many(Message(Work(), delay="1ms") for _ in range(messages))


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Program]:
    with aiodelay("run", "app:scheduler", *options, cwd=folder) as program:
        try:
            yield program
        finally:
            program.end_at_once()


def pid_in(line: str) -> int:
    return int(line.rpartition(" ")[2])


def wait_until_gone(pid: int) -> None:
    until_sync(lambda: not Path(f"/proc/{pid}").exists(), f"process {pid} has ended", DEADLINE_S)


def dispatching(program: Program, workers: int) -> None:
    for _ in range(workers):
        program.err.wait_for("app:scheduler is dispatching")


def draining(program: Program, workers: int) -> None:
    for _ in range(workers):
        program.err.wait_for("draining; a later signal ends it at once")


def assert_drained(program: Program) -> None:
    """Check that what was started has finished, and that more of the 10 messages were left."""
    started, finished = (sum(word in line for line in program.out.seen) for word in ("started", "finished"))
    assert 0 < started == finished < 10


def test_workers_share_the_work_and_drain_together(tmp_path: Path) -> None:
    write_app(tmp_path, body=WAIT_FOR_GO)
    with running(tmp_path, "--workers", "2") as program:
        dispatching(program, 2)
        asyncio.run(schedule(tmp_path, 10))
        pids = {pid_in(program.out.wait_for("work started in")) for _ in range(2)}
        program.send(signal.SIGTERM)
        draining(program, 2)
        (tmp_path / "go").touch()
        assert program.exit_code() == 0
    assert len(pids) == 2
    assert_drained(program)
    assert sum("app:scheduler has stopped" in line for line in program.err.seen) == 2
    for pid in pids:
        wait_until_gone(pid)


def test_a_worker_that_was_killed_is_started_again(tmp_path: Path) -> None:
    write_app(tmp_path, takes_s=60)
    with running(tmp_path, "--workers", "2") as program:
        dispatching(program, 2)
        asyncio.run(schedule(tmp_path, 1))
        os.kill(pid_in(program.out.wait_for("work started in")), signal.SIGKILL)
        program.err.wait_for("a worker ended with exit code -9; aiodelay starts it again in 0.5 s")
        dispatching(program, 1)


def test_a_later_signal_ends_all_at_once(tmp_path: Path) -> None:
    write_app(tmp_path, takes_s=3600)
    asyncio.run(schedule(tmp_path, 2))
    with running(tmp_path, "--workers", "2") as program:
        pids = [pid_in(program.out.wait_for("work started in")) for _ in range(2)]
        assert [os.getpgid(pid) for pid in pids] == pids, "Ctrl-C must reach them once, through the first process"
        program.send(signal.SIGINT)
        draining(program, 2)
        assert program.is_running()
        assert program.end_by_a_later_signal(signal.SIGINT) == -signal.SIGINT
        assert any("a later SIGINT has come: the process ends at once" in line for line in program.err.seen)
    assert not any("has stopped" in line for line in program.err.seen), "nobody drained"
    for pid in pids:
        wait_until_gone(pid)


def test_it_says_that_it_ends_at_once_however_many_signals_come(tmp_path: Path) -> None:
    write_app(tmp_path, takes_s=3600)
    with (tmp_path / "app.py").open("a") as app:
        app.write(SLOW_REMOVAL)
    asyncio.run(schedule(tmp_path, 2))
    with running(tmp_path, "--workers", "2") as program:
        pids = [pid_in(program.out.wait_for("work started in")) for _ in range(2)]
        program.send(signal.SIGTERM)
        draining(program, 2)
        assert program.end_by_many_later_signals() == -signal.SIGTERM
    assert sum("a later SIGTERM has come: the process ends at once" in line for line in program.err.seen) == 1
    for pid in pids:
        wait_until_gone(pid)


def test_signals_that_follow_soon_are_one(tmp_path: Path) -> None:
    write_app(tmp_path, body=WAIT_FOR_GO)
    with (tmp_path / "app.py").open("a") as app:
        app.write("from aiodelay.cli import crew\ncrew.SAME_S = 60\n")
    asyncio.run(schedule(tmp_path, 2))
    with running(tmp_path, "--workers", "2") as program:
        for _ in range(2):
            program.out.wait_for("work started in")
        program.send(signal.SIGTERM)
        draining(program, 2)
        program.send(signal.SIGTERM)
        program.send(signal.SIGINT)
        (tmp_path / "go").touch()
        assert program.exit_code() == 0
    assert sum("work finished in" in line for line in program.out.seen) == 2
    assert not any("the process ends at once" in line for line in program.err.seen)


@pytest.mark.parametrize("options", [["--workers", "2"], ["--reload"]], ids=" ".join)
def test_what_a_killed_supervisor_leaves_behind_drains_and_ends(tmp_path: Path, options: list[str]) -> None:
    write_app(tmp_path, body=WAIT_FOR_GO)
    with aiodelay("run", "app:scheduler", *options, cwd=tmp_path) as program:
        workers = 2 if options[0] == "--workers" else 1
        dispatching(program, workers)
        asyncio.run(schedule(tmp_path, 10))
        pids = [pid_in(program.out.wait_for("work started in")) for _ in range(workers)]
        program.send(signal.SIGKILL)
        try:
            draining(program, workers)
            (tmp_path / "go").touch()
            for pid in pids:
                wait_until_gone(pid)
            assert program.exit_code() == -signal.SIGKILL
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert_drained(program)


def test_reload_starts_anew_when_the_program_changes_and_outlives_its_mistakes(tmp_path: Path) -> None:
    write_app(tmp_path, name="first")
    with running(tmp_path, "--reload") as program:
        dispatching(program, 1)
        asyncio.run(schedule(tmp_path, 1))
        program.out.wait_for("first finished")
        (tmp_path / "app.py").write_text("scheduler = (")
        program.err.wait_for(r"app\.py changed; restarting")
        program.err.wait_for("a worker ended with exit code 1; aiodelay starts it again when a file changes")
        write_app(tmp_path, name="second")
        dispatching(program, 1)
        asyncio.run(schedule(tmp_path, 1))
        program.out.wait_for("second finished")
        program.send(signal.SIGTERM)
        assert program.exit_code() == 0


def test_reload_lets_handlers_finish_first(tmp_path: Path) -> None:
    write_app(tmp_path, name="first", takes_s=2)
    with running(tmp_path, "--reload") as program:
        dispatching(program, 1)
        asyncio.run(schedule(tmp_path, 1))
        program.out.wait_for("first started")
        write_app(tmp_path, name="second")
        program.out.wait_for("first finished")
        dispatching(program, 1)


@pytest.mark.parametrize(("workers", "text"), [("0", "Must be >= 1"), ("two", "unable to convert")])
def test_a_number_of_workers_that_is_none(tmp_path: Path, workers: str, text: str) -> None:
    run = Cli("", tmp_path)("run", "app:scheduler", "--workers", workers)
    assert run.code == 2
    assert text in run.err + run.out


def test_workers_need_a_store_that_they_share(tmp_path: Path) -> None:
    write_app(tmp_path, store="memory://")
    with aiodelay("run", "app:scheduler", "--workers", "2", cwd=tmp_path) as program:
        assert program.exit_code() == 1
    assert program.err.seen[-1].startswith("aiodelay: memory:// lives in one process; --workers needs a store that")


def test_a_program_that_is_not_there_is_not_tried_again(tmp_path: Path) -> None:
    with aiodelay("run", "nosuch:scheduler", "--workers", "2", cwd=tmp_path) as program:
        assert program.exit_code() == 1
    assert "no module 'nosuch'" in program.err.seen[-1]


def test_each_worker_has_a_port_for_prometheus(tmp_path: Path) -> None:
    write_app(tmp_path)
    with aiodelay("run", "app:scheduler", "--workers", "2", "--metrics-port", "0", cwd=tmp_path) as program:
        ports = {program.err.wait_for("metrics for Prometheus at").rpartition(" at ")[2] for _ in range(2)}
        assert len(ports) == 2
        for url in ports:
            until_sync(lambda url=url: "aiodelay_destination_served{" in text_at(url), "it tells of the store")  # type: ignore[misc]


def test_a_port_for_prometheus_without_a_port_for_each_worker_is_refused(tmp_path: Path) -> None:
    write_app(tmp_path)
    with aiodelay("run", "app:scheduler", "--workers", "2", "--metrics-port", "65535", cwd=tmp_path) as program:
        assert program.exit_code() == 2
        assert "leaves no port for the last of 2 workers" in "\n".join(program.err.seen)


def test_a_port_for_prometheus_beside_a_provider_of_the_program_is_refused(tmp_path: Path) -> None:
    write_app(tmp_path)
    app = (tmp_path / "app.py").read_text()
    own = "from opentelemetry import metrics\nfrom opentelemetry.sdk.metrics import MeterProvider\n"
    (tmp_path / "app.py").write_text(f"{own}metrics.set_meter_provider(MeterProvider())\n{app}")
    with aiodelay("run", "app:scheduler", "--metrics-port", "0", cwd=tmp_path) as program:
        assert program.exit_code() == 1
        assert "the program sets a meter provider itself" in "\n".join(program.err.seen)

from __future__ import annotations

import asyncio
import inspect
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
from cyclopts import App

from aiodelay import Scheduler, Snapshot
from aiodelay.cli.app import app
from aiodelay.cli.commands import COMMANDS, name_of, overview
from tests.support.cli import Cli
from tests.support.command import Program, aiodelay

APP = """
import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from aiodelay import Scheduler

scheduler = Scheduler("sqlite:///app.db", drain="{drain}")


@dataclass
class Work:
    pass


@scheduler.handler
{kind} work(event: Work) -> None:
    print("started", flush=True)
    {body}
    print("finished", flush=True)
"""
WAIT_FOR_GO = "while not Path('go').exists(): await asyncio.sleep(0.01)"
NEVER_END = "await asyncio.Event().wait()"
BLOCK = "time.sleep(3600)"
GO_ON = """
from aiodelay.engine import subscriptions

subscriptions.CANCEL_S = 0.4


async def go_on() -> None:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass
"""


@dataclass
class Work:
    pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    asyncio.run(schedule(tmp_path))
    return tmp_path


async def schedule(folder: Path) -> None:
    async with Scheduler(f"sqlite:///{folder}/app.db", dispatch=False) as scheduler:
        await scheduler.schedule(Work(), delay="1ms", id="work")


async def stored(folder: Path) -> Snapshot | None:
    async with Scheduler(f"sqlite:///{folder}/app.db", dispatch=False) as scheduler:
        return await scheduler.get("work")


def write_app(folder: Path, body: str, *, drain: str = "1h", kind: str = "async def") -> None:
    (folder / "app.py").write_text(APP.format(body=body, drain=drain, kind=kind))


@contextmanager
def started(folder: Path) -> Iterator[Program]:
    with aiodelay("run", "app:scheduler", cwd=folder) as program:
        program.out.wait_for("^started$")
        yield program


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_lets_a_handler_finish(folder: Path, number: int) -> None:
    write_app(folder, WAIT_FOR_GO)
    with started(folder) as program:
        program.send(number)
        program.err.wait_for("draining")
        (folder / "go").touch()
        program.out.wait_for("^finished$")
        assert program.exit_code() == 0
        assert program.err.seen[-1].endswith("app:scheduler has stopped")
    assert asyncio.run(stored(folder)) is None


def test_a_handler_that_never_ends_is_cut_after_the_drain_time(folder: Path) -> None:
    write_app(folder, NEVER_END, drain="100ms")
    with started(folder) as program:
        program.send(signal.SIGTERM)
        assert program.exit_code() == 0
        assert "finished" not in program.out.seen
        assert "Traceback" not in "\n".join(program.err.seen)
    given_back = asyncio.run(stored(folder))
    assert given_back is not None
    assert given_back.state == "overdue"
    assert given_back.record.attempt == 0


def test_a_plain_handler_that_never_ends_is_left_behind_in_its_thread(folder: Path) -> None:
    write_app(folder, BLOCK, drain="100ms", kind="def")
    with started(folder) as program:
        program.send(signal.SIGTERM)
        assert program.exit_code() == 0
        assert program.err.seen[-1].endswith("although these handlers still run: aiodelay Work_0")
    assert asyncio.run(stored(folder)) is not None


def test_a_handler_that_cannot_be_cancelled_is_left_behind(folder: Path) -> None:
    write_app(folder, "await asyncio.create_task(go_on())", drain="100ms")
    with (folder / "app.py").open("a") as app:
        app.write(GO_ON)
    with started(folder) as program:
        program.send(signal.SIGTERM)
        assert program.exit_code() == 0
        assert program.err.seen[-1].endswith("although these handlers still run: aiodelay Work")
    left = asyncio.run(stored(folder))
    assert left is not None
    assert left.state == "in_flight"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_later_signal_ends_it_at_once_and_it_says_so(folder: Path, number: signal.Signals) -> None:
    write_app(folder, NEVER_END)
    with started(folder) as program:
        program.send(signal.SIGTERM)
        program.err.wait_for("draining; a later signal ends it at once")
        assert program.end_by_a_later_signal(number) == -number
        said = f"a later {number.name} has come: the process ends at once; messages in flight are delivered again"
        assert program.err.seen[-1].endswith(said)
    assert asyncio.run(stored(folder)) is not None


def test_signals_that_follow_soon_are_one(folder: Path) -> None:
    write_app(folder, "await asyncio.to_thread(Path('go').read_text)")
    with (folder / "app.py").open("a") as app:
        app.write("from aiodelay.cli import signals\nsignals.SAME_S = 60\n")
    os.mkfifo(folder / "go")
    with started(folder) as program:
        program.send(signal.SIGTERM)
        program.send(signal.SIGTERM)
        program.send(signal.SIGINT)
        (folder / "go").write_text("")
        program.out.wait_for("^finished$")
        assert program.exit_code() == 0
    assert asyncio.run(stored(folder)) is None


def test_signals_end_it_while_a_handler_blocks_the_event_loop(folder: Path) -> None:
    write_app(folder, BLOCK)
    with started(folder) as program:
        assert program.end_at_once() == -signal.SIGTERM


def test_quiet_says_nothing_and_verbose_more(folder: Path) -> None:
    write_app(folder, "pass")
    said: dict[str, list[str]] = {}
    for option in ("-q", "--verbose"):
        with aiodelay("run", "app:scheduler", option, cwd=folder) as program:
            program.out.wait_for("^finished$")
            program.send(signal.SIGTERM)
            assert program.exit_code() == 0
            said[option] = program.complaints()
        asyncio.run(schedule(folder))
    assert said["-q"] == []
    assert any("is dispatching" in line for line in said["--verbose"])


def test_an_application_keeps_its_own_logging(folder: Path) -> None:
    write_app(folder, "pass")
    with (folder / "app.py").open("a") as app:
        app.write("import logging\nlogging.basicConfig(level='INFO', format='mine: %(message)s')\n")
    with aiodelay("run", "app:scheduler", cwd=folder) as program:
        program.err.wait_for("^mine: app:scheduler is dispatching")


TARGETS = [
    ("app", 2, r"'app' names no scheduler: write MODULE:OBJECT, such as shop:scheduler"),
    (":scheduler", 2, r"':scheduler' names no scheduler: write MODULE:OBJECT, such as shop:scheduler"),
    ("./app:scheduler", 2, r"'./app:scheduler' names no scheduler: write MODULE:OBJECT, such as shop:scheduler"),
    ("ap:scheduler", 1, r"no module 'ap' in \S+, and none is installed; did you mean 'app'\?"),
    ("no.such:scheduler", 1, r"no module 'no' in \S+, and none is installed"),
    ("app:schedular", 1, r"app:schedular does not exist: no 'schedular'; did you mean 'scheduler'\?"),
    ("app:x", 1, r"app:x does not exist: no 'x'; app has scheduler"),
    ("app:work", 1, r"app:work is a function, not a Scheduler; app has scheduler"),
    ("wrong:scheduler", 1, r"while importing wrong: scheme of store nowhere:// is 'nowhere'; allowed: .*"),
]


def test_a_target_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    write_app(tmp_path, "pass")
    (tmp_path / "wrong.py").write_text("from aiodelay import Scheduler\nscheduler = Scheduler('nowhere://')\n")
    code = f"""
from aiodelay.cli.app import run_app
for target in {[target for target, _, _ in TARGETS]}:
    print(run_app(["run", target]))
"""
    with Program("-c", code, cwd=tmp_path) as program:
        assert program.exit_code() == 0
        assert program.out.seen == [str(exit_code) for _, exit_code, _ in TARGETS]
        for line, (target, _, pattern) in zip(program.err.seen, TARGETS, strict=True):
            assert re.fullmatch(f"aiodelay: {pattern}", line), target
    with aiodelay("run", "app", cwd=tmp_path) as program:
        assert program.exit_code() == 2
        assert len(program.err.seen) == 1


def test_a_module_that_imports_what_is_not_there_shows_where(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("import nowhere_to_be_found\n")
    with aiodelay("run", "app:scheduler", cwd=tmp_path) as program:
        assert program.exit_code() == 1
        assert program.err.seen[-1] == "ModuleNotFoundError: No module named 'nowhere_to_be_found'"


def test_without_cyclopts_a_line_says_what_to_install(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['cyclopts'] = None; sys.argv = ['aiodelay', 'run']"
    code = f"{hidden}; from aiodelay.cli import main; main()"
    with Program("-c", code, cwd=tmp_path) as program:
        assert program.exit_code() == 2
        assert program.err.seen == [
            "aiodelay: the command line needs the package cyclopts; install it with: pip install 'aiodelay[cli]'"
        ]


AWAY = """
from aiodelay import Scheduler

scheduler = Scheduler("redis://127.0.0.1:1?connect_timeout_ms=500", open_timeout="{open_timeout}")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("options", [[], ["--workers", "2"]], ids=["alone", "workers"])
def test_a_signal_ends_it_while_it_waits_for_its_store(tmp_path: Path, number: int, options: list[str]) -> None:
    (tmp_path / "app.py").write_text(AWAY.format(open_timeout="1h"))
    with aiodelay("run", "app:scheduler", *options, cwd=tmp_path) as program:
        for _ in range(2 if options else 1):
            program.err.wait_for("redis://127.0.0.1:1.* is unavailable: .*; trying again for up to 1h")
        program.send(number)
        assert program.exit_code() == 0
        assert program.err.seen[-1].endswith("app:scheduler has stopped")
        assert "Traceback" not in "\n".join(program.err.seen)


def test_a_store_that_does_not_answer_in_time_ends_it(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(AWAY.format(open_timeout="200ms"))
    with aiodelay("run", "app:scheduler", cwd=tmp_path) as program:
        assert program.exit_code() == 5
        said = [line for line in program.err.seen if "trying again" in line]
        assert len(said) <= 1, "not at each attempt; at none if the first has taken all the time"
        assert program.err.seen[-1].startswith("aiodelay: redis://127.0.0.1:1")


BACKENDS = {"aiodelay.sqlite", "aiodelay.redis", "aiodelay.kafka", "redis", "aiokafka", "fastapi", "pyspark"}


def test_help_loads_no_client(tmp_path: Path) -> None:
    asked = [["--help"], [], ["schedule", "--help"], ["import", "etf1", "--help"]]
    code = f"""
import sys
from aiodelay.cli import main
for arguments in {asked}:
    sys.argv = ["aiodelay", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code
    print("loaded", *sorted({BACKENDS} & sys.modules.keys()))
"""
    with Program("-c", code, cwd=tmp_path) as program:
        assert program.exit_code() == 0
        said = [line for line in program.out.seen if line.startswith(("loaded", "Usage: aiodelay"))]
    assert said[1::2] == ["loaded"] * len(asked)
    assert all(line.startswith("Usage") for line in said[::2])


def test_the_overview_is_of_all_commands_in_the_words_of_each() -> None:
    for place, _, line in COMMANDS:
        module, _, function = place.partition(":")
        found = getattr(import_module(f"aiodelay.cli.{module}"), function)
        own = (found.help if isinstance(found, App) else inspect.getdoc(found)) or ""
        assert own.split()[:2] == line.split()[:2], place
        assert f"\n  {name_of(place)} " in overview()
        assert name_of(place) in app


@pytest.mark.parametrize("argument", ["version", "--version"])
def test_the_version_is_told(tmp_path: Path, argument: str) -> None:
    run = Cli("", tmp_path)(argument)
    assert run.code == 0
    assert re.fullmatch(r"\d+\.\d+\S*", run.lines[0])


if sys.platform == "win32":
    pytestmark = pytest.mark.skip(reason="signals are POSIX")

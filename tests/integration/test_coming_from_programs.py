"""docs/coming-from-*.md: the programs of both sides run as the pages show them, on a Redis server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from aiodelay.testing.servers import redis_servers, serving
from benchmarks.peers.environments import CACHE, MissingPeerError, environment
from benchmarks.peers.sides import Peer
from tests.support.coming_from import OURS, PEERS, Shown
from tests.support.importing import import_path
from tests.support.waiting import until_sync

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]  # a report comes each minute; pip installs libraries
WITHIN_S = 240.0


@pytest.fixture
def redis_url() -> Iterator[str]:
    with serving(redis_servers()[0]) as url:
        yield url


@contextmanager
def running(command: str, folder: Path, variables: Mapping[str, str]) -> Iterator[None]:
    """Run a command with all processes that it starts, and kill them at the end of the block."""
    with (folder / "printed").open("ab") as printed:
        process = subprocess.Popen(
            command.split(),
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def check(program: Shown, folder: Path, redis_url: str, variables: Mapping[str, str]) -> None:
    """Run the commands of a program, until they have printed all lines of the page."""
    here = ("redis://localhost", redis_url)
    (folder / program.file).write_text(program.code.replace(*here), encoding="utf-8")

    def printed() -> list[str]:
        return (folder / "printed").read_text(encoding="utf-8", errors="replace").splitlines()

    def missing() -> list[str]:
        """Return the lines that no command has printed. Celery prints a line as the end of a line of its log."""
        return [line for line in program.lines if not any(each.endswith(line) for each in printed())]

    with ExitStack() as stack:
        for command in program.commands:
            stack.enter_context(running(command.replace(*here), folder, variables))
        with suppress(AssertionError):
            until_sync(lambda: not missing(), "the lines of the page", WITHIN_S)
    assert missing() == [], printed()


@pytest.mark.parametrize("program", OURS, ids=lambda program: program.library)
def test_our_program_prints_the_lines_below_it(program: Shown, tmp_path: Path, redis_url: str) -> None:
    path = os.pathsep.join([f"{Path(sys.executable).parent}", os.environ["PATH"]])
    check(program, tmp_path, redis_url, {"PATH": path, "PYTHONPATH": import_path()})


@pytest.mark.parametrize("program", PEERS, ids=lambda program: program.library)
def test_the_program_of_another_library_prints_the_lines_below_it(
    program: Shown, tmp_path: Path, redis_url: str
) -> None:
    peer = Peer(program.library, best="", cancel="", redelivery="", is_node=program.file.endswith(".cjs"))
    try:
        there = environment(peer, CACHE)
    except MissingPeerError as error:
        pytest.skip(f"{peer.name} cannot be installed here: {error}")
    programs = [] if peer.is_node else [f"{Path(there.command[0]).parent}"]
    check(program, tmp_path, redis_url, {**there.variables, "PATH": os.pathsep.join([*programs, os.environ["PATH"]])})

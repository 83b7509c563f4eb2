"""The commands of the CLI as processes: on a terminal, in a pipe, and with a slow writer."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.cli import Cli
from tests.support.waiting import until_sync

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are POSIX")

COMMAND = [sys.executable, "-m", "aiodelay"]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(f"sqlite:///{tmp_path}/delay.db", tmp_path)


def environment(cli: Cli) -> dict[str, str]:
    return {**os.environ, "AIODELAY_STORE": cli.url, "TERM": "xterm", "COLUMNS": "100"}


class Terminal:
    """A program whose stdin, stdout and stderr are a terminal."""

    def __init__(self, process: subprocess.Popen[bytes], ours: int) -> None:
        self.process, self._ours, self.seen = process, ours, b""

    def wait_for(self, wanted: bytes) -> None:
        ends = time.monotonic() + 40
        while wanted not in self.seen:
            assert time.monotonic() < ends, self.seen
            if select.select([self._ours], [], [], 0.1)[0]:
                self.seen += os.read(self._ours, 65_536)

    def type(self, text: bytes) -> None:
        os.write(self._ours, text)

    def ended(self) -> int:
        """Return the exit code; read on until then, since a terminal that nobody reads blocks who writes to it."""
        ends = time.monotonic() + 40
        while self.process.poll() is None:
            assert time.monotonic() < ends, self.seen
            if select.select([self._ours], [], [], 0.1)[0]:
                with suppress(OSError):  # the program has closed its side
                    self.seen += os.read(self._ours, 65_536)
        return self.process.returncode


@contextmanager
def terminal(cli: Cli, arguments: Sequence[str], *, stdin: int | None = None) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    given = theirs if stdin is None else stdin
    with subprocess.Popen(
        [*COMMAND, *arguments], stdin=given, stdout=theirs, stderr=theirs, env=environment(cli)
    ) as process:
        os.close(theirs)
        try:
            yield Terminal(process, ours)
        finally:
            process.kill()
    os.close(ours)


@pytest.mark.parametrize(("answer", "code", "left"), [(b"y\n", 0, 0), (b"n\n", 1, 1), (b"\n", 1, 1)])
def test_on_a_terminal_it_asks_before_it_destroys(cli: Cli, answer: bytes, code: int, left: int) -> None:
    cli("schedule", "handler:mail", "x", "--delay", "1h", "--id", "a")
    with terminal(cli, ["cancel", "a"]) as shown:
        shown.wait_for(b"cancel a? [y/N] ")
        shown.type(answer)
        assert shown.ended() == code
    assert len(cli("list", "--json").objects) == left


def test_lines_are_stored_as_they_come_and_a_terminal_shows_how_many(cli: Cli) -> None:
    line = '{{"to": "handler:mail", "payload": "x", "delay": "1h", "id": "m{}"}}\n'
    reads, writes = os.pipe()
    with terminal(cli, ["schedule", "--lines"], stdin=reads) as shown:
        os.close(reads)
        os.write(writes, "".join(line.format(i) for i in range(500)).encode())
        shown.wait_for(b"500 stored, 0 refused")
        assert len(cli("list", "--json", "--limit", "1000").objects) == 500, "before the writer has ended"
        os.write(writes, (line.format("x") * 3 + "{\n" + line.format("last").rstrip()).encode())
        os.close(writes)
        shown.wait_for(b"504 stored, 1 refused\r\n")
        assert shown.ended() == 1
    assert b"line 504: message is not a JSON object" in shown.seen
    assert cli("get", "mlast").code == 0


def test_a_reader_that_has_enough_ends_it_quietly(cli: Cli) -> None:
    lines = [f'{{"to": "handler:mail", "payload": "{i}", "delay": "1h"}}' for i in range(2_000)]
    assert cli("schedule", "--lines", stdin="\n".join(lines).encode()).code == 0
    script = f"{' '.join(COMMAND)} list --json --limit 2000 | head -n 1; echo ${{PIPESTATUS[0]}}"
    run = subprocess.run(
        ["bash", "-c", script], env=environment(cli), capture_output=True, text=True, check=False, timeout=60
    )
    first, code = run.stdout.splitlines()
    assert json.loads(first)["state"] == "scheduled"
    assert (code, run.stderr) == ("0", "")


@pytest.mark.parametrize(
    ("command", "first"),
    [(["schedule", "--lines"], b"\n"), (["import"], b'{"kind": "export", "export": "x", "format": 1}\n')],
)
def test_ctrl_c_ends_a_command_that_waits_for_a_slow_writer(cli: Cli, command: list[str], first: bytes) -> None:
    reads, writes = os.pipe()
    with subprocess.Popen([*COMMAND, *command], stdin=reads, stderr=subprocess.PIPE, env=environment(cli)) as process:
        for line in (first, b"\n"):  # after the second line, it has nothing to do but to read on
            os.write(writes, line)
            until_sync(lambda: not select.select([reads], [], [], 0)[0], "it has read the line")
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(30) == 130
        finally:
            process.kill()
            os.close(reads)
            os.close(writes)
        assert process.stderr is not None
        assert process.stderr.read() == b""


def _waits_in_a_thread(pid: int) -> bool:
    """Return whether a process has more than one thread, and all of them sleep."""
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return len(states) > 1 and set(states) == {"S"}


def test_ctrl_c_ends_a_question(cli: Cli) -> None:
    cli("schedule", "handler:mail", "x", "--delay", "1h", "--id", "a")
    with terminal(cli, ["cancel", "a"]) as shown:
        shown.wait_for(b"cancel a? [y/N] ")
        until_sync(lambda: _waits_in_a_thread(shown.process.pid), "it waits for the answer")
        shown.process.send_signal(signal.SIGINT)
        assert shown.ended() == 130
    assert len(cli("list", "--json").objects) == 1


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("schedule handler:m x --delay 1h --id a >&-", 0),
        ("--help >&-", 0),
        ("schedule --lines <&-", 0),
        ("cancel a <&-", 2),
    ],
)
def test_a_standard_stream_may_be_closed(cli: Cli, command: str, code: int) -> None:
    script = f"{' '.join(COMMAND)} {command}"
    run = subprocess.run(
        ["bash", "-c", script], env=environment(cli), capture_output=True, text=True, check=False, timeout=60
    )
    assert (run.returncode, "Traceback" in run.stderr) == (code, False), run.stderr


def test_an_export_is_utf_8_in_every_locale(cli: Cli) -> None:
    assert cli("schedule", "handler:mail", "größe 漢字", "--delay", "1h").code == 0
    latin = {**environment(cli), "PYTHONIOENCODING": "latin-1"}
    run = subprocess.run([*COMMAND, "export"], env=latin, capture_output=True, check=False, timeout=60)
    assert (run.returncode, json.loads(run.stdout.splitlines()[1])["payload"]) == (0, "größe 漢字"), run.stderr


def test_ctrl_c_ends_it_with_130(cli: Cli) -> None:
    with terminal(cli, ["schedule", "--lines"]) as shown:
        shown.wait_for(b"0 stored")
        shown.process.send_signal(signal.SIGINT)
        assert shown.ended() == 130
    assert b"Traceback" not in shown.seen

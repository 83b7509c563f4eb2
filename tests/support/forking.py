"""A fork server: it imports the programs of tests once, and forks a process for each start of a program.

A new interpreter needs half a second of processor time to import aiodelay and its clients; a fork needs 10 ms, and the
tests start hundreds of processes. A forked process is a full process, with its own memory, pipes, signals and end.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO

import msgspec

from .importing import import_path

__all__ = ["ForkedProcess", "fork_server"]

ROOT = Path(__file__).parents[2]
START_S = 60.0


class Request(msgspec.Struct, frozen=True):
    """A request to start a module as `python -m` does. Its standard input, output and error come with the request."""

    module: str
    arguments: list[str]
    environment: dict[str, str]


class Answer(msgspec.Struct, frozen=True):
    """A process was forked (no `code`), or has ended with `code`: the exit code, or minus the number of a signal."""

    pid: int
    code: int | None = None


# --- the test's side --------------------------------------------------------------------------------------


class ForkedProcess:
    """A process that the server has forked, with the methods of `subprocess.Popen` that tests need."""

    def __init__(self, pid: int, stdin: IO[str], stdout: IO[str]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._code: int | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process. Return the exit code."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        assert self._code is not None
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it is known to have ended."""
        with self._lock:
            if self._code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)

    def has_ended(self, code: int) -> None:
        with self._lock:
            self._code = code
        self._ended.set()


class ForkServer:
    """The client of the fork server in the test process. Any thread may start processes."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forking", str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": import_path(str(ROOT))},
                pass_fds=[theirs.fileno()],
            )
        self._socket = ours
        self._lock = threading.Lock()
        self._forked: list[Answer] = []
        self._changed = threading.Condition()
        self._processes: dict[int, ForkedProcess] = {}
        self._ended: dict[int, int] = {}
        self._reader = threading.Thread(target=self._read, name="reads the fork server", daemon=True)
        self._reader.start()
        atexit.register(self.close)

    def start(
        self, module: str, arguments: Sequence[str], *, environment: Mapping[str, str], errors: IO[bytes]
    ) -> ForkedProcess:
        """Start a module with arguments and exactly these environment variables. Its standard error goes to a file."""
        request = Request(module, list(arguments), dict(environment))
        line = msgspec.json.encode(request) + b"\n"
        (in_read, in_write), (out_read, out_write) = os.pipe(), os.pipe()
        theirs = array.array("i", [in_read, out_write, errors.fileno()])
        with self._lock:
            sent = self._socket.sendmsg([line], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, theirs)])
            self._socket.sendall(line[sent:])
            pid = self._next_pid()
        os.close(in_read)
        os.close(out_write)
        process = ForkedProcess(pid, os.fdopen(in_write, "w"), os.fdopen(out_read))
        with self._changed:
            if pid in self._ended:
                process.has_ended(self._ended.pop(pid))
            else:
                self._processes[pid] = process
        return process

    def _next_pid(self) -> int:
        with self._changed:
            if not self._changed.wait_for(lambda: self._forked, START_S):
                raise AssertionError(f"the fork server did not answer within {START_S:.0f} s")
            return self._forked.pop().pid

    def _read(self) -> None:
        decode = msgspec.json.Decoder(Answer).decode
        with self._socket.makefile("rb") as answers:
            for line in answers:
                self._note(decode(line))

    def _note(self, answer: Answer) -> None:
        with self._changed:
            if answer.code is None:
                self._forked.append(answer)
                self._changed.notify_all()
            elif process := self._processes.pop(answer.pid, None):
                process.has_ended(answer.code)
            else:  # race: the process has ended before `start` recorded it
                self._ended[answer.pid] = answer.code

    def close(self) -> None:
        """End the server by closing its socket."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()
        self._reader.join()
        self._socket.close()


@cache
def fork_server() -> ForkServer:
    """Return the fork server of this process. It starts at the first use and ends with this process."""
    return ForkServer()


# --- the server's side ------------------------------------------------------------------------------------


class Server:
    """The fork server: it forks a process for each request, and reports the end of each process."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._wake_read, self._wake_write = os.pipe()
        for each in (self._wake_read, self._wake_write):
            os.set_blocking(each, False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the test, which then closes the socket
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # a handler, so that Python writes to `_wake_write`
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def serve(self) -> Request | None:
        """Fork a process for each request. Return the request in the new process, or None in the server at its end."""
        waited_for: list[socket.socket | int] = [self._socket, self._wake_read]
        while True:
            ready, _, _ = select.select(waited_for, [], [])
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                self._tell_ends()
            if self._socket in ready:
                line, files = self._receive()
                if not line:
                    return None
                request = msgspec.json.decode(line, type=Request)
                with contextlib.suppress(Exception):  # the forked process reports it
                    importlib.import_module(request.module)
                if self._fork(files):
                    return request

    def _receive(self) -> tuple[bytes, list[int]]:
        line, files, _, _ = socket.recv_fds(self._socket, 1 << 16, 3)
        while line and not line.endswith(b"\n"):
            more = self._socket.recv(1 << 16)
            line = line + more if more else b""
        return line, files

    def _fork(self, files: list[int]) -> bool:
        """Fork. Return whether this is the new process."""
        gc.freeze()  # the new process does not write to frozen objects when it collects, so it shares their memory
        pid = os.fork()
        if pid:
            for each in files:
                os.close(each)
            self._tell(Answer(pid))
            return False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, each in enumerate(files):
            os.dup2(each, number)
        for each in (*files, self._wake_read, self._wake_write):
            os.close(each)
        self._socket.close()
        return True

    def _tell_ends(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                self._tell(Answer(pid, os.waitstatus_to_exitcode(status)))

    def _tell(self, answer: Answer) -> None:
        with contextlib.suppress(OSError):  # race: the test process has closed the socket
            self._socket.sendall(msgspec.json.encode(answer) + b"\n")


def run(request: Request) -> None:
    """Run a module in this new process, as `python -m` does in a new interpreter."""
    os.environ.clear()
    os.environ.update(request.environment)
    sys.argv[1:] = request.arguments
    sys.modules.pop(request.module, None)  # it was imported before the fork; now it runs as `__main__`
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        asked = Server(connection).serve()
    if asked is not None:
        run(asked)

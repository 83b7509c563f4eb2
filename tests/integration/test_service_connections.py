"""Connections to the service on real sockets: idle ones are closed, and their number is limited."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from unittest import mock

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from aiodelay.service import connections
from aiodelay.service.connections import Server
from aiodelay.service.serve import listening
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

STILL_S = 1.0
SOON_S = 0.2
"""So long a connection may stand still that is expected to end for it."""
TICK_S = 0.1
WITHIN_S = 60.0
HEAD = b"GET /hello HTTP/1.1\r\nhost: localhost\r\n"
PART = b"x" * 65_536


async def hello(request: Request) -> Response:
    del request
    return PlainTextResponse("hello")


async def slow(request: Request) -> Response:
    del request
    await asyncio.sleep(2 * STILL_S)  # longer than a connection may stand still
    return PlainTextResponse("at last")


async def endless(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        try:
            while True:
                yield PART
                await asyncio.sleep(0)
        finally:
            request.app.state.ended.set()

    return StreamingResponse(parts())


@pytest.fixture(autouse=True)
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the server look after its connections ten times as often as once a second."""
    monkeypatch.setattr(connections, "TICKS", 1)


class TickingServer(Server):
    """The service's server. For its idle connections, time passes only from tick to tick.

    So a process that stands still, with the clients of these tests in it, makes no connection idle.
    """

    _ticks = 0

    def _end_idle_connections(self) -> None:
        self._ticks += 1
        with mock.patch.object(asyncio.get_running_loop(), "time", return_value=self._ticks * TICK_S):
            super()._end_idle_connections()


@asynccontextmanager
async def serving(most: int = 100, still_s: float = SOON_S) -> AsyncIterator[tuple[int, Starlette]]:
    """An app behind the service's server: its port, and the app."""
    app = Starlette(routes=[Route("/hello", hello), Route("/slow", slow), Route("/endless", endless)])
    app.state.ended = asyncio.Event()
    server = TickingServer(app, most=most, still_s=still_s)
    with listening("127.0.0.1", 0) as listener:
        running = asyncio.create_task(server.serve([listener]))
        try:
            yield listener.getsockname()[1], app
        finally:
            server.should_exit = True
            await running


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """Read until the other side ends, or breaks off."""
    found = b""
    with suppress(ConnectionResetError):
        async with asyncio.timeout(WITHIN_S):
            while read := await reader.read(65_536):
                found += read
    return found


async def drip(writer: asyncio.StreamWriter, text: bytes) -> None:
    """Send a text byte by byte, for ever."""
    while True:
        for byte in text:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)  # the pace of the attack: each byte by itself, none of them late


async def test_connections_send_at_once() -> None:
    with listening("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("before", [b"", HEAD + b"\r\n"], ids=["first", "next"])
async def test_headers_that_come_byte_by_byte_are_not_waited_for(before: bytes) -> None:
    async with serving() as (port, _), connected(port) as (reader, writer):
        writer.write(before + HEAD)
        dripping = asyncio.create_task(drip(writer, b"a: b\r\n"))
        answer = await rest_of(reader)
        dripping.cancel()
        assert answer.count(b"HTTP/1.1 200") == bool(before)


async def test_who_connects_and_says_nothing_is_not_kept() -> None:
    async with serving() as (port, _), connected(port) as (reader, _writer):
        assert await rest_of(reader) == b""


async def test_an_answered_connection_is_kept_for_the_next_request() -> None:
    async with serving() as (port, _), connected(port) as (reader, writer):
        for _ in range(2):
            writer.write(HEAD + b"\r\n")
            assert await reader.readuntil(b"hello")
            await asyncio.sleep(5 * SOON_S)  # longer than a connection may stand still in a request


async def test_an_answered_connection_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEPT_S", SOON_S)
    async with serving(still_s=10 * WITHIN_S) as (port, _), connected(port) as (reader, writer):
        writer.write(HEAD + b"\r\n")
        assert (await rest_of(reader)).endswith(b"hello")


async def test_the_rest_of_a_body_that_nobody_reads_is_not_waited_for() -> None:
    async with serving() as (port, _), connected(port) as (reader, writer):
        writer.write(b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n")
        dripping = asyncio.create_task(drip(writer, b"x"))
        answer = await rest_of(reader)
        dripping.cancel()
        assert answer.startswith(b"HTTP/1.1 404")


async def test_who_does_not_read_the_answer_is_let_go() -> None:
    async with serving() as (port, app), connected(port) as (_, writer):
        writer.write(b"GET /endless HTTP/1.1\r\nhost: localhost\r\n\r\n")
        async with asyncio.timeout(WITHIN_S):
            await app.state.ended.wait()


async def test_who_reads_slowly_and_who_waits_for_a_slow_answer_are_served() -> None:
    async with (
        serving(still_s=STILL_S) as (port, _),
        connected(port) as (reader, writer),
        connected(port) as (other, asking),
    ):
        writer.write(b"GET /endless HTTP/1.1\r\nhost: localhost\r\n\r\n")
        asking.write(b"GET /slow HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        for _ in range(15):
            assert len(await reader.readexactly(50 * len(PART))) == 50 * len(PART)
            await asyncio.sleep(0.1)  # a slow reader
        assert (await rest_of(other)).endswith(b"at last")


async def is_answered(port: int) -> bool:
    async with connected(port) as (reader, writer):
        writer.write(HEAD + b"connection: close\r\n\r\n")
        return b"hello" in await rest_of(reader)


@pytest.fixture
def _files() -> Iterator[None]:
    """Let this process have as many files open as the test needs."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("_files")
async def test_probes_are_answered_while_a_thousand_connections_say_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "aiodelay.service")
    async with serving(most=300, still_s=10 * WITHIN_S) as (port, _), AsyncExitStack() as stack:
        for number in range(1_000):
            _, writer = await stack.enter_async_context(connected(port))
            writer.write(HEAD[: number % len(HEAD)])
            if number % 100 == 99:
                assert await is_answered(port), number
        await until(lambda: any("idle connections were closed" in each for each in caplog.messages), "it is logged")


async def test_a_connection_that_is_being_answered_gives_way_to_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "aiodelay.service")
    async with (
        serving(most=2, still_s=10 * WITHIN_S) as (port, _),
        connected(port) as (reader, writer),
        connected(port) as (idle, asking),
    ):
        writer.write(b"GET /endless HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert await reader.readexactly(len(PART))
        asking.write(HEAD + b"\r\n")
        assert b"hello" in await idle.readuntil(b"hello")
        assert await is_answered(port), "the one that has been answered gives way"
        assert await rest_of(idle) == b""
        async with connected(port) as (other, also):
            also.write(b"GET /endless HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert await other.readexactly(len(PART))
            assert not await is_answered(port), "two are being answered"
            assert await reader.readexactly(len(PART)), "those that are there go on"
        await until(lambda: len(caplog.messages) >= 2, "both are logged")
    assert set(caplog.messages) == {
        "1 idle connections were closed to accept new connections: api.max_connections is 2",
        "1 connections were refused: api.max_connections is 2",
    }

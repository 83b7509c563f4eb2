"""A TCP proxy between a client and a server that loses or delays data as a test says."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Literal, TypeAlias

import anyio.from_thread

__all__ = ["Mode", "Proxy", "proxied", "proxied_by_thread"]

Mode: TypeAlias = Literal["pass", "lose answers", "lose requests", "black hole", "refuse", "lossy"]
Look: TypeAlias = Callable[[int, bytes, bool], Awaitable[None]]
"""A function that sees each piece of data: connection number, data, is it an answer? It may wait or raise `OSError`."""
LOSSES = 0.05


class Proxy:
    """A proxy that passes bytes on, or treats them as `mode` says. `mode` may change at any time.

    - `lose answers`: requests reach the server, and the connection is cut at the answer.
    - `lose requests`: the connection is cut at the request.
    - `black hole`: nothing passes, and connections stay open.
    - `refuse`: new connections are cut at once.
    - `lossy`: in both directions, one piece in twenty is cut short and its connection is cut.

    The method `freeze` makes a black hole of the existing connections, for ever. The function `look` decides about
    single requests and answers: if it raises an `OSError`, the piece is lost and its connection is cut.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._loop = asyncio.get_running_loop()
        self.mode: Mode = "pass"
        self.delay_answers_s = 0.0
        self.look: Look | None = None
        self.port = 0
        self.connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.made = self._frozen = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections.add(writer)
        try:
            if self.mode != "refuse":
                await self._connect(reader, writer)
        except (OSError, ExceptionGroup, asyncio.CancelledError):  # the connection ends with the proxy
            pass
        finally:
            self.connections.discard(writer)
            self._tasks.discard(task)
            writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.made += 1
        number = self.made
        server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._copy(number, reader, server_writer, "lose requests"))
                tasks.create_task(self._copy(number, server_reader, writer, "lose answers"))
        finally:
            server_writer.close()

    async def _copy(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cut_by: Mode
    ) -> None:
        while data := await reader.read(65536):
            if self.mode == cut_by:
                break
            if self.look is not None:
                await self.look(number, data, cut_by == "lose answers")
            while self.mode == "black hole" or number <= self._frozen:  # noqa: ASYNC110 - a test may set it at any time
                await asyncio.sleep(0.01)
            if cut_by == "lose answers":
                await asyncio.sleep(self.delay_answers_s)
            if self.mode == "lossy" and random.random() < LOSSES:
                writer.write(data[: random.randrange(len(data))])
                break
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError

    def freeze(self) -> None:
        """Pass nothing more on the existing connections, and leave them open. New connections work."""
        self._frozen = self.made

    def cut(self) -> None:
        """Cut all connections. Any thread may call this."""
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        for writer in self.connections:
            writer.close()

    def point_to(self, port: int, *, cut: bool = True) -> None:
        """Connect new connections to another server. With `cut`, cut existing connections. Any thread may call this."""
        self._port = port
        if cut:
            self.cut()

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def proxied(port: int, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[Proxy]:
    """Run a proxy in front of a server. With `tls`, the proxy speaks TLS and the server does not."""
    proxy = Proxy(host, port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, ssl=tls)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.stop()


@contextmanager
def proxied_by_thread(port: int) -> Iterator[Proxy]:
    """Run a proxy in a thread, for tests without an event loop."""
    with anyio.from_thread.start_blocking_portal() as portal, portal.wrap_async_context_manager(proxied(port)) as proxy:
        yield proxy

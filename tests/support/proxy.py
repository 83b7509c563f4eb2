"""A TCP proxy between a client and a server that loses what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Literal, TypeAlias

__all__ = ["Proxy", "proxied"]

Mode: TypeAlias = Literal["pass", "lose answers", "lose requests", "black hole", "refuse"]


class Proxy:
    """Passes bytes on, or does with them what `mode` says; `mode` may change at any time.

    `lose answers`: requests reach the server, and the connection is cut at its answer. `lose requests`: it is cut at
    the request. `black hole`: nothing passes, and connections stay open. `refuse`: new connections are cut at once.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self.mode: Mode = "pass"
        self.port = 0
        self.connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections.add(writer)
        try:
            if self.mode != "refuse":
                await self._connect(reader, writer)
        except (OSError, ExceptionGroup, asyncio.CancelledError):  # it ends with the proxy
            pass
        finally:
            self.connections.discard(writer)
            self._tasks.discard(task)
            writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._copy(reader, server_writer, "lose requests"))
                tasks.create_task(self._copy(server_reader, writer, "lose answers"))
        finally:
            server_writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cut_by: Mode) -> None:
        while data := await reader.read(65536):
            if self.mode == cut_by:
                break
            while self.mode == "black hole":  # noqa: ASYNC110 - as a test sets it
                await asyncio.sleep(0.01)
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError

    def cut(self) -> None:
        """Cut all connections."""
        for writer in self.connections:
            writer.close()

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def proxied(port: int, host: str = "127.0.0.1") -> AsyncIterator[Proxy]:
    """Serve a proxy in front of a server."""
    proxy = Proxy(host, port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.stop()

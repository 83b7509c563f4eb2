"""For BA1 and BA2: the API and a bare route in a process of its own, and a light HTTP client.

Usage: python -m benchmarks.api_server <store's URL> <namespace>; prints its port.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from aiodelay import Scheduler
from aiodelay.operations.json_shapes import read_message
from aiodelay.service import ApiLimits, admin
from aiodelay.service.api.bodies import Json

from .harness import check

__all__ = ["BARE", "calls", "post", "running_api"]

ROOT = Path(__file__).parents[1]
BARE = "/bare"
ANSWER = {"id": "m", "outcome": "stored", "due": "2027-01-01T00:00:00.000Z", "revision": 1_795_279_631_915}


async def serve(url: str, namespace: str) -> None:
    """Serve the API and the bare route until this process is killed."""
    bare = FastAPI(openapi_url=None)

    @bare.post(BARE, status_code=201)
    async def only_read(request: Request) -> Response:
        read_message(await request.body())
        return Json(ANSWER, 201)

    async with Scheduler(url, namespace=namespace, dispatch=False) as scheduler:
        limits = ApiLimits(rate=0)
        api = admin(scheduler, read_only=False, allowed_targets=["handler:*"], limits=limits)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await (bare if scope["path"] == BARE else api)(scope, receive, send)

        with socket.create_server(("127.0.0.1", 0)) as listening:
            print(listening.getsockname()[1], flush=True)
            server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
            await server.serve(sockets=[listening])


@contextmanager
def running_api(url: str, namespace: str = "default") -> Iterator[int]:
    """Run the API of a store during a block, and yield its port."""
    command = [sys.executable, "-m", "benchmarks.api_server", url, namespace]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def request_of(path: str, body: bytes, type_: str = "application/json") -> bytes:
    """Return the bytes of a request."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {type_}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def post(port: int, path: str, body: bytes, type_: str) -> bytes:
    """Send one request on a connection of its own; return the last 100 bytes of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_of(path, body, type_).replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1))
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    check(answer.startswith(b"HTTP/1.1 200"), repr(answer[:200]))
    return answer[-100:]


async def calls(port: int, path: str, bodies: list[bytes], connections: int) -> None:
    """Send requests over several connections, one at a time on each."""
    left = iter([request_of(path, body) for body in bodies])

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for request in left:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            check(head.startswith(b"HTTP/1.1 201"), repr(head[:200]))
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
            await reader.readexactly(int(length))
        writer.close()
        await writer.wait_closed()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(connections):
            tasks.create_task(one())


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))

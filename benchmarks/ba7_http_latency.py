"""BA7: the time of consecutive GETs on one connection to the service, compared with a bare uvicorn app.

Usage: python -m benchmarks.ba7_http_latency. This command serves the bare app and prints the app's port.
"""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import uvicorn
from starlette.types import Receive, Scope, Send

from .harness import Benchmark, Goal, Plan, Row, check, in_turn

__all__ = ["BENCHMARK"]

ROOT = Path(__file__).parents[1]
CALLS = 3_000
GOAL = Goal("at most", 1.5)
BODY = b'{"status":"alive"}'
SETTINGS = 'store = "memory://"\n[api]\nrate = 0\n'
PATHS = ("/livez", "/readyz", "/v1/counts")


async def bare(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer as `/livez` does."""
    del scope, receive
    headers = [(b"content-length", str(len(BODY)).encode()), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": BODY})


async def serve_bare() -> None:
    """Serve the bare app until killed."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        print(f"listening on http://127.0.0.1:{listening.getsockname()[1]}", file=sys.stderr, flush=True)
        config = uvicorn.Config(bare, http="h11", log_config=None, lifespan="off")
        await uvicorn.Server(config).serve(sockets=[listening])


@contextmanager
def running(*arguments: str) -> Iterator[int]:
    """Run a server in another process during a block, and yield its port."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "aiodelay.toml")
        settings.write_text(SETTINGS)
        command = [sys.executable, "-m", *arguments, *(["--config", str(settings)] if "serve" in arguments else [])]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stderr is not None
            try:
                line = next(line for line in process.stderr if "listening on" in line)
                yield int(re.findall(r"http://[^:\s]+:(\d+)", line)[0])
            finally:
                process.kill()


def p50_ms(port: int, path: str, n: int) -> float:
    """Return the median time of `n` GETs on one connection."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
        took = [_timed_get(connection, request) for _ in range(n)]
    return 1000 * median(took)


def _timed_get(connection: socket.socket, request: bytes) -> float:
    began = time.perf_counter()
    connection.sendall(request)
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += connection.recv(65_536)
    head, _, body = answer.partition(b"\r\n\r\n")
    check(head.startswith(b"HTTP/1.1 200"), repr(answer[:200]))
    left = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]) - len(body)
    while left:
        left -= len(connection.recv(left))
    return time.perf_counter() - began


def run(plan: Plan) -> list[Row]:
    n = plan.size(CALLS)
    with running("benchmarks.ba7_http_latency") as bare_port, running("aiodelay", "serve", "--port", "0") as port:
        for each, path in ((bare_port, "/"), *((port, path) for path in PATHS)):
            _until_answered(each, path)
        sides = {"bare": lambda: p50_ms(bare_port, "/", n)}
        sides |= {path: lambda path=path: p50_ms(port, path, n) for path in PATHS}  # type: ignore[misc]
        took = in_turn(plan, sides)
    return [_row(path, took[path], took["bare"]) for path in PATHS]


def _until_answered(port: int, path: str) -> None:
    """Wait until the store is open. The first request also loads the modules that it needs."""
    while True:
        try:
            p50_ms(port, path, 1)
        except Exception:  # noqa: BLE001 - the server is not ready yet
            time.sleep(0.05)
        else:
            return


def _row(path: str, ours: Sequence[float], theirs: Sequence[float]) -> Row:
    values = tuple(mine / other for mine, other in zip(ours, theirs, strict=True))
    beside = f"{median(ours):.2f} ms, bare {median(theirs):.2f} ms"
    goal = GOAL if path == PATHS[0] else None
    what = f"HTTP: p50 of the time of GET {path}, one connection"
    return Row("BA7", what, "x time of a bare uvicorn app", values, goal, beside)


BENCHMARK = Benchmark("BA7", "single requests on one connection", run)

if __name__ == "__main__":
    asyncio.run(serve_bare())

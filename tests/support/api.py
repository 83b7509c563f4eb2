"""Serve the HTTP API on a free port, in the loop of the test, and make clients for it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp

from aiodelay import Scheduler
from aiodelay.service import Token, admin, hash_token
from aiodelay.service.connections import KEPT_S

from .waiting import until

__all__ = ["ALL", "SECRETS", "TOKENS", "bearer", "client_of", "problem_of", "serving_api", "serving_app"]

ALL: dict[str, Any] = {"read_only": False, "allowed_targets": ["handler:*"]}
SECRETS = {"read": "secret-of-the-reader", "schedule": "secret-of-the-scheduler", "operate": "secret-of-the-operator"}
TOKENS = [Token(name=f"{scope}er", hash=hash_token(secret), scopes=(scope,)) for scope, secret in SECRETS.items()]  # type: ignore[arg-type]


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def client_of(base: str, **options: Any) -> httpx.AsyncClient:  # noqa: ANN401 - options of httpx
    return httpx.AsyncClient(base_url=base, timeout=30, trust_env=False, **options)


@asynccontextmanager
async def serving_app(app: ASGIApp) -> AsyncIterator[str]:
    """Serve an ASGI app. Yield its address."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        options: dict[str, Any] = {"timeout_graceful_shutdown": 5, "timeout_keep_alive": KEPT_S}
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", **options))
        running = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            await until(lambda: server.started, "uvicorn has started")
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running


@asynccontextmanager
async def serving_api(
    schedulers: Scheduler | Mapping[str, Scheduler],
    **options: Any,  # noqa: ANN401 - options of several functions
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve the API of open schedulers. Yield a client of it."""
    async with serving_app(admin(schedulers, **options)) as base, client_of(base) as client:
        yield client


def problem_of(response: httpx.Response, status: int, error: str) -> dict[str, Any]:
    """Return the problem in a response, and check its status and its name."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert problem["error"] == error, problem
    assert problem["status"] == status
    assert problem["type"] == f"urn:aiodelay:{error}"
    assert problem["detail"].isprintable()
    assert "Traceback" not in response.text
    return problem

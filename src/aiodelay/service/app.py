"""The service's HTTP application: `/livez`, `/readyz`, and the API with the page."""

from __future__ import annotations

from dataclasses import asdict

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .health import Health

__all__ = ["make_app"]

NO_STORE = {"Cache-Control": "no-store"}
OWN = ("/livez", "/readyz")


def make_app(health: Health, api: ASGIApp) -> ASGIApp:
    """Return the application that answers health checks, and passes all other requests to the API.

    Args:
        health: Answers `/readyz`.
        api: Answers all requests except `/livez` and `/readyz`.
    """

    async def livez(request: Request) -> JSONResponse:
        return JSONResponse({"status": "alive"}, headers=NO_STORE)

    async def readyz(request: Request) -> JSONResponse:
        report = await health.report()
        content = {
            "status": "ready" if report.is_ready else "not ready",
            "reasons": report.reasons,
            "stores": {name: asdict(store) for name, store in report.stores.items()},
        }
        return JSONResponse(content, status_code=200 if report.is_ready else 503, headers=NO_STORE)

    own = Starlette(routes=[Route("/livez", livez), Route("/readyz", readyz)])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (own if scope.get("path") in OWN else api)(scope, receive, send)

    return app

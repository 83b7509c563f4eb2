"""`install_page`: adds the routes of the page to the app of the API."""

from __future__ import annotations

from importlib import resources

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.routing import Route

from aiodelay.service.api.security import Tokens
from aiodelay.service.api.sessions import Sessions

from . import actions, dead, live, messages, overview, places, session
from .state import PageState

__all__ = ["HTMX", "install_page"]

HTMX = "4.0.1"
"""The version of htmx.min.js and of its extension hx-sse.min.js in static/vendor, from the npm package `htmx.org`."""
TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "txt": "text/plain"}
KEPT = {"cache-control": "public, max-age=31536000, immutable"}
ROUTES = (
    Route("/", overview.front),
    Route("/messages", messages.messages),
    Route("/messages/{id:path}", messages.message),
    Route("/recurring", messages.recurring),
    Route("/dead", dead.dead),
    Route("/dead/{revision}/{id:path}", dead.letter),
    Route("/sinks", places.sinks),
    Route("/instances", places.instances),
    Route("/consumers", places.consumers),
    Route("/live", live.live),
    Route("/plan", actions.plan, methods=["POST"]),
    Route("/plan/{token}", actions.ask),
    Route("/confirm", actions.confirm, methods=["POST"]),
    Route("/operations/{token}", actions.operation),
    Route("/operations/{token}/stop", actions.stop, methods=["POST"]),
    Route("/login", session.login),
    Route("/login", session.sign_in, methods=["POST"]),
    Route("/logout", session.logout, methods=["POST"]),
    Route("/theme", session.theme, methods=["POST"]),
)


def install_page(app: FastAPI, tokens: Tokens, sessions: Sessions, environment: str) -> None:
    """Add the page to an app.

    Args:
        app: The app of the API, with the gate and with `state.served`.
        tokens: The tokens that are valid now.
        sessions: The browser sessions.
        environment: The text of the badge; empty = no badge.
    """
    app.state.page = PageState(tokens, sessions, environment)
    app.router.routes.extend([*ROUTES, *_static()])


def _static() -> list[Route]:
    """Return a route for each static file. Other paths have no route, so no other file can be read."""
    static = resources.files("aiodelay.service.page").joinpath("static")
    files = [*static.iterdir(), *static.joinpath("vendor").iterdir()]
    return [_file(each.name, each.read_bytes()) for each in files if each.is_file()]


def _file(name: str, content: bytes) -> Route:
    type_ = TYPES[name.rpartition(".")[2]]

    async def answer(request: Request) -> Response:
        del request
        return Response(content, media_type=type_, headers=KEPT)

    return Route(f"/static/{name}", answer)

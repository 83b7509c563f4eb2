"""The routes that sign a user in and out, and that set the colours."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from aiodelay.service.api.security import CALLER, Caller, audit, peer_of
from aiodelay.service.api.sessions import COOKIE, SESSION_S

from .rendering import THEME, local, path_of, shown
from .requests import form_of, screen, seen_at
from .state import state_of

__all__ = ["login", "logout", "sign_in", "theme"]

YEAR_S = 365 * 86_400


async def login(request: Request) -> Response:
    """Show the form that asks for a token."""
    back = local(request, request.query_params.get("back", ""))
    return shown(request, "login.html", wrong="wrong" in request.query_params, next_page=back)


@screen(None)
async def sign_in(request: Request) -> Response:
    """Start a session if the token is valid."""
    form = await form_of(request)
    back = local(request, form.one("back"))
    begun = state_of(request).sessions.begin(form.one("token"))
    peer = peer_of(request.scope)
    if begun is None:
        state_of(request).tokens.refuse(peer)
        return seen_at(path_of(request, "login", back=back, wrong="yes"))
    cookie, token = begun
    state_of(request).sessions.end(request.cookies.get(COOKIE, ""))
    request.scope[CALLER] = Caller(token.name, token.scopes, peer)
    audit(request, "sign in")
    response = seen_at(back)
    _set(request, response, COOKIE, cookie, SESSION_S)
    return response


@screen(None)
async def logout(request: Request) -> Response:
    """End a session."""
    await form_of(request)
    state_of(request).sessions.end(request.cookies.get(COOKIE, ""))
    response = seen_at(path_of(request, "login"))
    response.delete_cookie(COOKIE, path=_path(request))
    return response


@screen(None)
async def theme(request: Request) -> Response:
    """Set the colours: dark, light, or auto (the setting of the system)."""
    form = await form_of(request)
    response = seen_at(local(request, form.one("back")))
    chosen = form.one("theme")
    _set(request, response, THEME, chosen if chosen in ("dark", "light") else "auto", YEAR_S)
    return response


def _set(request: Request, response: Response, name: str, value: str, seconds: int) -> None:
    response.set_cookie(
        name,
        value,
        max_age=seconds,
        path=_path(request),
        secure="https" in (request.url.scheme, request.headers.get("x-forwarded-proto")),
        httponly=True,
        samesite="strict",
    )


def _path(request: Request) -> str:
    return request.scope.get("root_path", "") or "/"

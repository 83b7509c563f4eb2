"""How a screen is asked for: who may, which store, what a form says; errors become pages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias
from urllib.parse import parse_qs

from fastapi import Request
from starlette.responses import RedirectResponse, Response

from aiodelay.errors import AiodelayError
from aiodelay.service.api.bodies import check_type, chunks_of
from aiodelay.service.api.problems import ApiError, problem_of, wrong
from aiodelay.service.api.security import CALLER, caller_of, check_allowed
from aiodelay.service.api.served import Opened, served_of
from aiodelay.service.api.sessions import COOKIE
from aiodelay.service.config import Scope

from .forms import Draft, Form
from .rendering import here_of, local, path_of, shown
from .state import state_of

__all__ = ["failed", "form_of", "refused", "screen", "seen_at", "store_of", "wanted"]

log: logging.Logger = logging.getLogger("aiodelay.service")

_Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
MOST_FIELDS = 2_100
FORM = "application/x-www-form-urlencoded"


def screen(scope: Scope | None) -> Callable[[_Endpoint], _Endpoint]:
    """Make a route of a function for callers whose token has the scope. Others are asked to sign in, unless it is None.

    The page shows errors that the function raises.
    """

    def decorate(function: _Endpoint) -> _Endpoint:
        async def endpoint(request: Request) -> Response:
            is_unknown = request.scope[CALLER] is None and state_of(request).has_tokens
            if scope is not None and is_unknown and request.method == "GET":
                if request.headers.get("hx-request"):
                    return Response(status_code=401, headers={"hx-redirect": path_of(request, "login")})
                return RedirectResponse(path_of(request, "login", back=here_of(request)), 303)
            try:
                if scope is not None:
                    check_allowed(request, scope)
                return await function(request)
            except AiodelayError as error:
                return failed(request, error)

        return endpoint

    return decorate


def failed(request: Request, error: AiodelayError) -> Response:
    """Return the page that tells an error."""
    problem = problem_of(error)
    if problem.status == 500:
        log.error("a page failed", exc_info=error)
    try:
        store = store_of(request) if request.scope[CALLER] is not None else None
    except ApiError:
        store = None
    return shown(request, "error.html", store, status=problem.status, problem=problem)


def seen_at(path: str) -> Response:
    """Return the answer to a form that was taken: its result is seen at a path, which can be loaded again."""
    return RedirectResponse(path, 303)


def refused(request: Request, form: Form, mistake: str, back: str) -> Response:
    """Return the answer to a form with a mistake: the screen that it came from shows it again, as it was typed.

    Args:
        request: Which brought the form.
        form: What was typed.
        mistake: Why it is refused.
        back: The screen's path and query.
    """
    token = state_of(request).drafts.add(Draft(caller_of(request).name, form, mistake))
    path = local(request, back)
    return seen_at(f"{path}{'&' if '?' in path else '?'}draft={token}")


def store_of(request: Request, name: str = "") -> Opened:
    """Return the store that a page is about; the first where none is named.

    Raises:
        ApiError: There is none such.
    """
    stores = served_of(request).stores
    name = name or request.query_params.get("store", "")
    if not name:
        return next(iter(stores.values()))
    if name not in stores:
        raise wrong(404, "UnknownStoreError", "store", repr(name[:64]), ", ".join(stores))
    return stores[name]


def wanted(request: Request, name: str) -> str | None:
    """Return a field of the query; None where it is missing or empty."""
    return request.query_params.get(name, "").strip() or None


async def form_of(request: Request) -> Form:
    """Return what a form has sent, if it is one of ours.

    Raises:
        ApiError: It is too large, too slow, of another type, or has not brought along what our forms do.
    """
    check_type(request, FORM)
    limits = served_of(request).limits
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            body = b"".join([chunk async for chunk in chunks_of(request, limits.max_body)])
        form = Form(parse_qs(body.decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS))
    except TimeoutError:
        raise ApiError(408, "BodyTimeoutError", "the form did not arrive in time") from None
    except ValueError:
        raise wrong(422, "FormError", "form", "none that can be read", f"at most {MOST_FIELDS} fields") from None
    if not state_of(request).sessions.is_csrf(request.cookies.get(COOKIE, ""), form.one("csrf")):
        detail = "this form is of an earlier session: go back, load its page again, and repeat"
        raise ApiError(403, "CsrfError", detail)
    return form

"""Steps of every screen of the page: check the caller, find the store, read the form, show errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
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
    """Return a decorator that makes a function the endpoint of a screen.

    The caller's token must have the scope. A caller without a valid token is sent to the login page. If the scope is
    None, nothing is checked. If the function raises an error, the page shows the error.
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
    """Return the page that shows an error."""
    problem = problem_of(error)
    if problem.status == 500:
        log.error("a page failed", exc_info=error)
    try:
        store = store_of(request) if request.scope[CALLER] is not None else None
    except ApiError:
        store = None
    return shown(request, "error.html", store, status=problem.status, problem=problem)


def seen_at(path: str) -> Response:
    """Return the answer to an accepted form: a redirect to the screen with the result. That screen can be reloaded."""
    return RedirectResponse(path, 303)


def refused(request: Request, form: Form, mistake: str, back: str, wrong_fields: Sequence[str] = ()) -> Response:
    """Return the answer to a form with a mistake: a redirect to its screen, which shows the form as it was typed.

    Args:
        request: The request with the form.
        form: The fields as typed.
        mistake: The reason of the refusal.
        back: The path and the query of the form's screen.
        wrong_fields: The names of the wrong fields; empty = any of the filled fields.
    """
    token = state_of(request).drafts.add(Draft(caller_of(request).name, form, mistake, wrong_fields))
    path = local(request, back)
    return seen_at(f"{path}{'&' if '?' in path else '?'}draft={token}")


def store_of(request: Request, name: str = "") -> Opened:
    """Return the store that a request names; the first store if it names none.

    Raises:
        ApiError: The service has no store of that name.
    """
    stores = served_of(request).stores
    name = name or request.query_params.get("store", "")
    if not name:
        return next(iter(stores.values()))
    if name not in stores:
        raise wrong(404, "UnknownStoreError", "store", repr(name[:64]), ", ".join(stores))
    return stores[name]


def wanted(request: Request, name: str) -> str | None:
    """Return a field of the URL's query; None if it is missing or empty."""
    return request.query_params.get(name, "").strip() or None


async def form_of(request: Request) -> Form:
    """Return the fields of a form that this page sent.

    Raises:
        ApiError: The form is too large or too slow, has another content type, or lacks the CSRF token of its session.
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
        raise wrong(422, "FormError", "form", "not readable", f"UTF-8 text with at most {MOST_FIELDS} fields") from None
    if not state_of(request).sessions.is_csrf(request.cookies.get(COOKIE, ""), form.one("csrf")):
        detail = "the form belongs to an earlier session; go back, reload its page, and send the form again"
        raise ApiError(403, "CsrfError", detail)
    return form

"""Error answers as problem+json (RFC 9457). One table maps errors to HTTP statuses.

An error outside the table gives the answer 500 without details. The log has them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from aiodelay.errors import (
    AiodelayError,
    ClosedError,
    ConfigurationError,
    DuplicateIdError,
    InputError,
    OutcomeUnknownError,
    PayloadTooLargeError,
    StoreBusyError,
    StoreFullError,
    StoreTooNewError,
    StoreUnavailableError,
    TargetNotAllowedError,
    cut,
    shortened,
)
from aiodelay.operations.json_shapes import error_shape

from .models import Problem

__all__ = [
    "CLOSE",
    "INTERNAL",
    "UNKNOWN",
    "UNTOLD",
    "ApiError",
    "install",
    "problem_of",
    "response_of",
    "unknown_if_unavailable",
    "wrong",
]

log: logging.Logger = logging.getLogger("aiodelay.service")

STATUSES: tuple[tuple[type[AiodelayError], int], ...] = (
    (TargetNotAllowedError, 403),
    (PayloadTooLargeError, 413),
    (InputError, 422),
    (StoreTooNewError, 503),
    (ConfigurationError, 422),
    (DuplicateIdError, 409),
    (StoreFullError, 507),
    (StoreUnavailableError, 503),
    (StoreBusyError, 503),
    (ClosedError, 503),
    (OutcomeUnknownError, 504),
)
"""The HTTP status for each class of errors. The first class that matches an error decides."""
CLOSE = {"connection": "close"}
"""The header of an answer that is sent before the whole body is read. The connection cannot serve another request."""
RETRY_AFTER_S = "1"
LONGEST = 500


class ApiError(AiodelayError):
    """An error that only the API raises.

    Args:
        status: The HTTP status.
        error: The stable name of the error.
        detail: A sentence that says what happened and what to do.
        headers: Headers of the answer.
        about: `field`, `value` and `allowed`, if a value of the request is wrong; never a secret.
    """

    def __init__(
        self, status: int, error: str, detail: str, headers: Mapping[str, str] | None = None, **about: str
    ) -> None:
        super().__init__(status, error, detail)
        self.headers: Mapping[str, str] = headers or {}
        self.problem: Problem = _problem(status, {"error": error, "detail": detail} | about)


def wrong(status: int, error: str, field: str, value: str, allowed: str) -> ApiError:
    """Return the error for a wrong value in a request."""
    return ApiError(status, error, f"{field} is {value}; allowed: {allowed}", field=field, value=value, allowed=allowed)


def _problem(status: int, shape: Mapping[str, str]) -> Problem:
    texts = {name: cut(text, LONGEST) for name, text in shape.items()}
    return Problem(f"urn:aiodelay:{texts['error']}", HTTPStatus(status).phrase, status, **texts)


def problem_of(error: AiodelayError) -> Problem:
    """Return the problem that describes an error; `INTERNAL` for an error whose details must not leave the service."""
    if isinstance(error, ApiError):
        return error.problem
    status = next((status for class_, status in STATUSES if isinstance(error, class_)), 500)
    if status == 500:
        return INTERNAL
    shape = error_shape(error)
    if isinstance(error, ClosedError):  # its own text advises a Python program, not a client of the API
        shape["detail"] = f"{error.what} is {error.state}"
    if isinstance(error, OutcomeUnknownError):
        shape["detail"] = (
            f"whether message {shortened(error.message_id)} was {error.action} is unknown: {error.reason}; "
            "repeat the request with the same id or Idempotency-Key"
        )
    return _problem(status, shape)


INTERNAL = _problem(500, {"error": "InternalError", "detail": "the service failed; its log has the reason"})
UNTOLD = _problem(503, {"error": "ClosedError", "detail": "the service is ending"})
UNKNOWN = _problem(
    504,
    {
        "error": "OutcomeUnknownError",
        "detail": "the service is ending, and it is unknown whether the request was carried out; "
        "repeat the request with the same id or Idempotency-Key",
    },
)


def response_of(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """Return the HTTP answer for a problem."""
    headers = dict(headers or {})
    if problem.status in (503, 504):
        headers.setdefault("retry-after", RETRY_AFTER_S)
    return Response(msgspec.json.encode(problem), problem.status, headers, "application/problem+json")


@contextmanager
def unknown_if_unavailable() -> Iterator[None]:
    """Answer 504 if the store does not answer in the block, because the store may have made the change, also in part.

    Only changes of messages need no such block: for them, `StoreUnavailableError` means that nothing was changed.

    Raises:
        ApiError: The store does not answer.
    """
    try:
        yield
    except StoreUnavailableError as error:
        detail = f"{error}; the store may have made the change, fully or in part; repeat the request"
        raise ApiError(504, "OutcomeUnknownError", detail) from error


def _methods(app: FastAPI, request: Request) -> str:
    """Return the methods of all routes for the path of a request. A route's own error names only its own methods."""
    found = [route for route in app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in found for method in getattr(route, "methods", None) or ()}))


def install(app: FastAPI) -> None:
    """Make an app answer all its errors as problems."""

    async def known(_: Request, error: Exception) -> Response:
        assert isinstance(error, AiodelayError)
        problem = problem_of(error)
        if problem.status == 500:
            log.error("a request failed", exc_info=error)
        return response_of(problem, error.headers if isinstance(error, ApiError) else None)

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        given = shortened(first.get("input"))
        return response_of(wrong(422, "ParameterError", str(first["loc"][-1]), given, str(first["msg"])).problem)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        phrase = HTTPStatus(error.status_code).phrase
        name = phrase.title().replace(" ", "") + "Error"
        problem = _problem(error.status_code, {"error": name, "detail": phrase.lower()})
        is_method = error.status_code == HTTPStatus.METHOD_NOT_ALLOWED
        return response_of(problem, {"allow": _methods(app, request)} if is_method else error.headers)

    app.add_exception_handler(AiodelayError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)

"""`admin`: builds the app from the routes, the gate that checks each request, and the error answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, Response

from aiodelay.core.validation import Targets, check_flag, check_namespace
from aiodelay.core.version import __version__
from aiodelay.errors import ConfigurationError, kind_of, shortened
from aiodelay.scheduler import Scheduler
from aiodelay.service.config import Token
from aiodelay.service.page import install_page

from . import bulk, dead, etf1, lane_limits, lanes, messages, problems
from .bodies import Json
from .pages import PAGE_HEADERS, documentation
from .schemas import openapi_of
from .security import ApiLimits, Gate, Tokens
from .served import Opened, Served
from .sessions import Sessions

__all__ = ["admin"]

ONLY = "default"
"""The name of the store if the app has only one."""


ROUTERS = (
    *(messages.scheduling, messages.changing, messages.reading, dead.reading, dead.changing),
    *(lanes.reading, lanes.changing, lane_limits.reading, lane_limits.changing),
    *(bulk.reading, bulk.changing, etf1.reading, etf1.alive),
)


def admin(
    schedulers: Scheduler | Mapping[str, Scheduler],
    *,
    tokens: Collection[Token] | Tokens = (),
    read_only: bool = True,
    allowed_targets: Collection[str] | None = None,
    limits: ApiLimits | None = None,
    environment: str = "",
) -> FastAPI:
    """Return the page and the HTTP API for schedulers: an app to serve, or to mount in an app of yours.

    The app does not open or close the schedulers. Your program opens them, on the event loop of the app.

    Args:
        schedulers: One scheduler, or several by name. If there are several, a request names its store with `?store=`.
        tokens: The tokens that callers may use. Without tokens, the app answers only requests from this machine. If you
            give a `Tokens`, its method `load` replaces the tokens while the app runs.
        read_only: Refuse every change, whatever scopes a token has.
        allowed_targets: The destinations that requests may schedule to, as for a `Scheduler`. None = the
            `allowed_targets` of each scheduler; a scheduler without them allows no destination.
        limits: Limits on the requests of clients.
        environment: The text of the page's badge, such as "production"; empty = no badge.

    Raises:
        ConfigurationError: An argument is wrong. The error names the argument, its value and the allowed values.
    """
    given = {ONLY: schedulers} if isinstance(schedulers, Scheduler) else dict(schedulers)
    for name, scheduler in given.items():
        check_namespace(name)
        if not isinstance(scheduler, Scheduler):
            raise ConfigurationError("schedulers", kind_of(scheduler), "a Scheduler, or several by name")
    if not given:
        raise ConfigurationError("schedulers", shortened([]), "at least one Scheduler")
    limits = ApiLimits() if limits is None else limits
    stores = {name: Opened(name, each, _targets(each, allowed_targets)) for name, each in given.items()}
    app = FastAPI(
        title="aiodelay",
        version=__version__,
        summary="Messages that are delivered later",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,  # a redirect would send the client to any host that its header Host names
        telemetry={"metrics": False, "logs": False, "exclude": _is_live},
    )
    app.state.served = Served(stores, limits, check_flag(read_only, "read_only"))
    tokens = tokens if isinstance(tokens, Tokens) else Tokens(tokens)
    sessions = Sessions(tokens)
    app.add_middleware(Gate, tokens=tokens, sessions=sessions, limits=limits)
    problems.install(app)
    app.router.routes.extend(route for router in ROUTERS for route in router.routes)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        prefix = request.scope.get("root_path", "")
        servers = {"servers": [{"url": prefix}]} if prefix else {}  # the paths of the document have no prefix
        return Json(openapi_of(app, ROUTERS) | servers)

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return HTMLResponse(documentation(openapi_of(app, ROUTERS)), headers=PAGE_HEADERS)

    install_page(app, tokens, sessions, environment)
    return app


def _is_live(scope: MutableMapping[str, Any]) -> bool:
    """Whether a request reads the page's event stream. Such a request ends when the tab is closed, without an error."""
    return str(scope.get("path", "")).endswith("/live")


def _targets(scheduler: Scheduler, allowed: Collection[str] | None) -> Targets:
    if allowed is not None:
        return Targets(allowed)
    return scheduler.targets if scheduler.targets.allowed is not None else Targets(())

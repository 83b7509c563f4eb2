"""The app: routes, one gate before them, and errors that are problems."""

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

from . import bulk, dead, etf1, lanes, messages, problems
from .bodies import Json
from .pages import PAGE_HEADERS, documentation
from .schemas import openapi_of
from .security import ApiLimits, Gate, Tokens
from .served import Opened, Served
from .sessions import Sessions

__all__ = ["admin"]

ONLY = "default"
"""What the one store of a service is called."""


ROUTERS = (
    *(messages.scheduling, messages.changing, messages.looking, dead.looking, dead.changing),
    *(lanes.looking, lanes.changing, bulk.looking, bulk.changing, etf1.looking, etf1.alive),
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
    """Return the page and the HTTP API over schedulers: an app of its own, or one to mount in yours.

    The schedulers are opened and closed by whoever made them, on the same event loop.

    Args:
        schedulers: One, or several by name; requests name theirs by `?store=`.
        tokens: Who may use it. Without any, only whoever asks from this machine; with a `Tokens`, its `load`
            exchanges them while the app runs.
        read_only: Refuse all that changes anything, whatever a token is for.
        allowed_targets: Where messages may be scheduled to, as of a `Scheduler`; None = what each scheduler allows by
            its own `allowed_targets`, and nothing where it has none.
        limits: How much a client may ask for.
        environment: What the page's badge says, such as "production"; empty = there is none.

    Raises:
        ConfigurationError: An argument is wrong; names it, its value and what is allowed.
    """
    given = {ONLY: schedulers} if isinstance(schedulers, Scheduler) else dict(schedulers)
    for name, scheduler in given.items():
        check_namespace(name)
        if not isinstance(scheduler, Scheduler):
            raise ConfigurationError("schedulers", kind_of(scheduler), "a Scheduler, or several by name")
    if not given:
        raise ConfigurationError("schedulers", shortened([]), "at least one")
    limits = ApiLimits() if limits is None else limits
    stores = {name: Opened(name, each, _targets(each, allowed_targets)) for name, each in given.items()}
    app = FastAPI(
        title="aiodelay",
        version=__version__,
        summary="Messages that are delivered later",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,  # to where the header Host says, whatever it says
        telemetry={"metrics": False, "logs": False, "exclude": _is_live},
    )
    app.state.served = Served(stores, limits, check_flag(read_only, "read_only"))
    tokens = tokens if isinstance(tokens, Tokens) else Tokens(tokens)
    sessions = Sessions(tokens)
    app.add_middleware(Gate, tokens=tokens, sessions=sessions, limits=limits)
    problems.install(app)
    app.router.routes.extend(route for router in ROUTERS for route in router.routes)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Json(openapi_of(app, ROUTERS))

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return HTMLResponse(documentation(openapi_of(app, ROUTERS)), headers=PAGE_HEADERS)

    install_page(app, tokens, sessions, environment)
    return app


def _is_live(scope: MutableMapping[str, Any]) -> bool:
    """Whether a request follows the page's events: it lasts until its tab is closed, which is no error."""
    return str(scope.get("path", "")).endswith("/live")


def _targets(scheduler: Scheduler, allowed: Collection[str] | None) -> Targets:
    if allowed is not None:
        return Targets(allowed)
    return scheduler.targets if scheduler.targets.allowed is not None else Targets(())

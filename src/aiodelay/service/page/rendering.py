"""Renders the templates, with the values that all templates use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from importlib import resources
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Request
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse, Response

from aiodelay.core.version import __version__
from aiodelay.service.api.security import CALLER
from aiodelay.service.api.served import Opened, served_of
from aiodelay.service.api.sessions import COOKIE

from . import values
from .state import state_of

__all__ = ["PAGE_HEADERS", "encoded", "here_of", "links_of", "local", "path_of", "rendered", "shown", "url_of"]

PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "referrer-policy": "same-origin",
}
"""Headers of every page. With these headers, browsers load only files of this service, and run no inline script.

The policy for referrers is `same-origin`: with `no-referrer`, browsers would send no origin with forms.
"""
THEME = "aiodelay-theme"
HTMX_CONFIG = json.dumps(
    {
        "includeIndicatorCSS": False,
        "extensions": "sse",
        "history": True,
        "morphIgnore": ["data-htmx-powered", "open"],  # an update does not close details that a viewer has opened
        "sse": {"reconnectMaxDelay": "5s"},
    }
)
TABS = (
    ("", "Overview"),
    ("messages", "Messages"),
    ("recurring", "Recurring"),
    ("dead", "Dead letters"),
    ("sinks", "Sinks"),
    ("instances", "Instances"),
    ("consumers", "Consumers"),
)


# --- URLs -------------------------------------------------------------------------------------------------


def path_of(request: Request, path: str = "", **query: object) -> str:
    """Return a path of this app, with the prefix under which it is mounted. None and empty values are left out."""
    given = {name: value for name, value in query.items() if value not in (None, "", [], ())}
    text = f"?{urlencode(given, doseq=True)}" if given else ""
    return f"{request.scope.get('root_path', '')}/{path}{text}"


def url_of(request: Request, store: Opened, path: str = "", **query: object) -> str:
    """Return a path of this app for a store. If the service has several stores, the path names the store."""
    named = store.name if len(served_of(request).stores) > 1 else None
    return path_of(request, path, store=named, **query)


def links_of(request: Request, store: Opened) -> Mapping[str, str]:
    """Return the links in the parts of a page that are sent to all viewers of a store."""
    return {
        "scheduled": url_of(request, store, "messages", state="scheduled"),
        "overdue": url_of(request, store, "messages", state="overdue"),
        "in_flight": url_of(request, store, "messages", state="in_flight"),
        "held": url_of(request, store, "messages", state="held"),
        "dead": url_of(request, store, "dead"),
        "lane": url_of(request, store, "messages", lane="_")[:-1],
    }


# --- pages ------------------------------------------------------------------------------------------------


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("aiodelay.service.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(values, name) for name in values.__all__}
    return environment


_TEMPLATES = _environment()


def _static_version() -> str:
    """Return a hash of all static files. URLs contain it, so browsers can cache the files without limit."""
    static = resources.files("aiodelay.service.page").joinpath("static")
    names = sorted(each.name for each in static.iterdir() if each.is_file())
    return sha256(b"".join(static.joinpath(name).read_bytes() for name in names)).hexdigest()[:12]


_STATIC = f"{__version__}-{_static_version()}"


def rendered(template: str, **given: object) -> str:
    """Return the HTML of a template with these values."""
    return _TEMPLATES.get_template(template).render(**given)


def shown(
    request: Request, template: str, store: Opened | None = None, *, status: int = 200, **given: object
) -> Response:
    """Return the answer to a request: a page.

    Args:
        request: The request to answer.
        template: The name of the template.
        store: The store that the page shows.
        status: The HTTP status.
        given: Values that only this template uses.
    """
    content = rendered(template, **_common(request, store), **given)
    return HTMLResponse(encoded(content), status, headers=PAGE_HEADERS)


def encoded(text: str) -> bytes:
    """Return HTML as UTF-8. Characters that are not valid in UTF-8, for example from a file name, are escaped."""
    return text.encode("utf-8", "backslashreplace")


def _common(request: Request, store: Opened | None) -> Mapping[str, Any]:
    served, state = served_of(request), state_of(request)
    caller = request.scope[CALLER]
    scopes = frozenset(() if caller is None else caller.scopes)
    cookie = request.cookies.get(COOKIE, "")
    theme = request.cookies.get(THEME, "")
    draft = state.drafts.find(request.query_params.get("draft", ""), by="" if caller is None else caller.name)

    def url(path: str = "", **query: object) -> str:
        return path_of(request, path, **query) if store is None else url_of(request, store, path, **query)

    return {
        "url": url,
        "static": lambda name: path_of(request, f"static/{name}", v=_STATIC),
        "store": store,
        "links": {} if store is None else links_of(request, store),
        "stores": list(served.stores),
        "store_field": store.name if store is not None and len(served.stores) > 1 else "",
        "tabs": TABS,
        "unable": {} if store is None else state.unable(store),
        "here": request.scope["path"].removeprefix(request.scope.get("root_path", "")).strip("/").partition("/")[0],
        "back": here_of(request),
        "caller": caller,
        "has_tokens": state.has_tokens,
        "read_only": served.read_only,
        "sees_part": store is not None and store.scheduler.store.traits.lookup == "owner",
        "may_move": store is not None and store.scheduler.store.traits.changes,
        "may_schedule": "schedule" in scopes and not served.read_only,
        "may_operate": "operate" in scopes and not served.read_only,
        "mistake": draft.mistake,
        "wrong_fields": draft.wrong,
        "typed": draft.form.one,
        "ticked": frozenset(draft.form.all("id")) | frozenset(draft.form.all("letter")),
        "running": [] if store is None else served.operations.running(store=store.name),
        "csrf": state.sessions.csrf(cookie),
        "environment": state.environment,
        "environment_kind": _environment_kind(state.environment),
        "theme": theme if theme in ("dark", "light") else "auto",
        "version": __version__,
        "htmx_config": HTMX_CONFIG,
    }


def here_of(request: Request) -> str:
    """Return the path and the query of a GET request; for another method, the path of the front page.

    The path keeps the encoding of the request: from the id `a/../b` without encoding, a browser would make the path of
    the message `b`.
    """
    if request.method != "GET":
        return path_of(request)
    query = request.scope["query_string"].decode(
        "latin-1"
    )  # `request.url` decodes the path with old versions of Starlette
    if "draft" in request.query_params:
        query = urlencode([each for each in request.query_params.multi_items() if each[0] != "draft"])
    raw = request.scope.get("raw_path")
    path = quote(request.scope["path"]) if raw is None else raw.decode("latin-1")
    return path + (f"?{query}" if query else "")


def local(request: Request, path: str) -> str:
    """Return the path if it belongs to this app, and otherwise the front page. So no link leads to another site."""
    root = path_of(request)
    is_ours = path.startswith(root) and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_ours else root


def _environment_kind(name: str) -> str:
    """Return the CSS class for the badge of an environment."""
    lowered = name.lower()
    if lowered.startswith("prod") or lowered == "live":
        return "live"
    return "test" if lowered.startswith(("stag", "test", "qa", "pre", "uat")) else "other"

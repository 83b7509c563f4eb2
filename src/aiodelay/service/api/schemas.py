"""The OpenAPI document, made of the models; and how routes say which they take and return."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from . import models
from .bodies import NDJSON, PLAIN
from .security import SCOPE

__all__ = ["PROBLEM", "documents", "openapi_of"]

PROBLEM = "application/problem+json"
VERSION = "3.1.0"
REF = "#/components/schemas/{name}"


def _content(model: type[Any], *types: str) -> dict[str, Any]:
    return {each: {"schema": {"$ref": REF.format(name=model.__name__)}} for each in types}


def documents(
    answer: type[Any] | None,
    takes: type[Any] | None = None,
    *,
    lines: type[Any] | None = None,
    status: int = 200,
    form: str = PLAIN,
) -> dict[str, Any]:
    """Return the arguments by which a route says what it takes and returns.

    Args:
        answer: What it returns; None = nothing.
        takes: Its body.
        lines: What it returns for each line, where its body may be lines of it.
        status: Of its answer.
        form: The answer's content type.
    """
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": "Done", **({"content": _content(answer, form)} if answer else {})},
        "default": {"description": "Not done; says why", "content": _content(models.Problem, PROBLEM)},
    }
    extra: dict[str, Any] = {}
    if takes is not None:
        extra["requestBody"] = {"required": True, "content": _content(takes, PLAIN)}
    if takes is not None and lines is not None:
        extra["requestBody"]["content"] |= {NDJSON: {"schema": {"type": "string"}}}
        responses[200] = {"description": "What became of each line", "content": _content(lines, NDJSON)}
    return {"status_code": status, "responses": responses, "openapi_extra": extra}


def openapi_of(app: FastAPI) -> dict[str, Any]:
    """Return the document of an app, made once."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, openapi_version=VERSION, summary=app.summary, routes=app.routes
        )
        types = [getattr(models, name) for name in models.__all__]
        _, schemas = msgspec.json.schema_components(types, ref_template=REF)
        components = document.setdefault("components", {})
        components["schemas"] = schemas
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        for route in app.routes:
            scope = _scope_of(route)
            if scope is not None and isinstance(route, APIRoute):
                for method in route.methods or ():
                    operation = document["paths"][route.path_format][method.lower()]
                    operation["security"] = [{"bearer": [scope]}]
        app.openapi_schema = document
    return app.openapi_schema


def _scope_of(route: object) -> str | None:
    """Return what a token must be for."""
    if not isinstance(route, APIRoute):
        return None
    scopes = [getattr(each.dependency, SCOPE, None) for each in route.dependencies]
    return next((scope for scope in scopes if scope is not None), None)

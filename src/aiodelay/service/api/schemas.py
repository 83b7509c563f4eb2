"""Generates the OpenAPI document from the models and the routes. `documents` declares the models of a route."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.responses import Response

from . import models
from .bodies import NDJSON, PLAIN

__all__ = ["PROBLEM", "documents", "openapi_of", "scopes_of"]

PROBLEM = "application/problem+json"
VERSION = "3.1.0"
REF = "#/components/schemas/{name}"


def _content(model: Any, *types: str) -> dict[str, Any]:  # noqa: ANN401 - a model, or `list[...]` of a model
    items = get_args(model)
    schema = {"$ref": REF.format(name=(items[0] if items else model).__name__)}
    return {each: {"schema": {"type": "array", "items": schema} if items else schema} for each in types}


def documents(
    answer: type[Any] | None,
    takes: type[Any] | None = None,
    *,
    lines: type[Any] | None = None,
    status: int = 200,
    unfinished: int | None = None,
    form: str = PLAIN,
    headers: Mapping[str, str] | None = None,
    etag: bool = False,
) -> dict[str, Any]:
    """Return the arguments of a route that document its request and its answers.

    Args:
        answer: The model of the answer; None = no body.
        takes: The model of the request's body.
        lines: The model of the answer to each line, if the body may be many lines of `takes`.
        status: The HTTP status of the answer.
        unfinished: The HTTP status if the work goes on after the answer.
        form: The answer's content type.
        headers: The request headers that the route reads, with their descriptions.
        etag: The answer has the revision as `ETag`.
    """
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": "Done", **({"content": _content(answer, form)} if answer else {})},
        "default": {"description": "An error, with its reason", "content": _content(models.Problem, PROBLEM)},
    }
    if unfinished is not None:
        responses[unfinished] = responses[status] | {"description": "Under way"}
    if etag:
        responses[status]["headers"] = {"ETag": {"description": "The revision", "schema": {"type": "string"}}}
    extra: dict[str, Any] = {}
    if headers:
        extra["parameters"] = [
            {"name": name, "in": "header", "description": what, "schema": {"type": "string"}}
            for name, what in headers.items()
        ]
    if takes is not None:
        extra["requestBody"] = {"required": True, "content": _content(takes, PLAIN)}
    if takes is not None and lines is not None:
        extra["requestBody"]["content"] |= {NDJSON: {"schema": {"type": "string"}}}
        content = _content(answer, form) | _content(lines, NDJSON)
        description = "The stored message was kept unchanged; or, for a stream, the outcome of each line"
        responses[200] = {"description": description, "content": content}
    return {
        "status_code": status,
        "responses": responses,
        "openapi_extra": extra,
        "response_class": Response,  # Response has no media type, so FastAPI documents only the types above
    }


def openapi_of(app: FastAPI, routers: Sequence[APIRouter]) -> dict[str, Any]:
    """Return the OpenAPI document of an app with these routers. The first call generates the document."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, openapi_version=VERSION, summary=app.summary, routes=app.routes
        )
        types = [getattr(models, name) for name in models.__all__]
        _, schemas = msgspec.json.schema_components(types, ref_template=REF)
        _complete_schemas(schemas)
        components = document.setdefault("components", {})
        components["schemas"] = schemas
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        for method, path, scope in scopes_of(routers):
            if scope and path in document["paths"]:  # a former name of a route is not documented
                document["paths"][path][method.lower()]["security"] = [{"bearer": [scope]}]
        app.openapi_schema = document
    return app.openapi_schema


def _complete_schemas(schema: Any) -> None:  # noqa: ANN401 - any part of a schema
    """Give each array its `items` and each free object its `additionalProperties`; remove defaults.

    Generators of API clients require `items` and `additionalProperties`. They treat a field with a default as a field
    that is always present.
    """
    if isinstance(schema, list):
        for each in schema:
            _complete_schemas(each)
    elif isinstance(schema, dict):
        schema.pop("default", None)
        if schema.get("type") == "array":
            schema.setdefault("items", {})
        elif schema.get("type") == "object" and "properties" not in schema:
            schema.setdefault("additionalProperties", True)
        for each in schema.values():
            _complete_schemas(each)


def scopes_of(routers: Sequence[APIRouter]) -> Iterator[tuple[str, str, str]]:
    """Yield the method and path of each route, and the scope that a token must have; "" = no token needed."""
    for router in routers:
        scope = getattr(router.route_class, "needed", "")
        for route in router.routes:
            assert isinstance(route, APIRoute)
            yield from ((method, route.path_format, scope) for method in route.methods or ())

"""The API's documentation: one HTML page, generated from the OpenAPI document, without scripts or outside resources."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from hashlib import sha256
from html import escape
from typing import Any

__all__ = ["PAGE_HEADERS", "documentation"]

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
section { border-top: 1px solid #8888; }
code, td:first-child { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; }
td { border-top: 1px solid #8884; padding: .2rem .6rem .2rem 0; vertical-align: top; }
"""
_HASH = base64.b64encode(sha256(STYLE.encode()).digest()).decode()
PAGE_HEADERS = {"content-security-policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; frame-ancestors 'none'"}
"""With these headers, browsers apply only the style of this page, and load nothing."""


def documentation(document: Mapping[str, Any]) -> str:
    """Return the documentation of an OpenAPI document as HTML."""
    operations = [
        part
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        for part in _operation(method.upper(), path, operation)
    ]
    models = [part for name, schema in document["components"]["schemas"].items() for part in _model(name, schema)]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>aiodelay API</title><style>{STYLE}</style><body><h1>aiodelay API {escape(document['info']['version'])}"
        f'</h1><p>The OpenAPI document, for programs: <a href="openapi.json">openapi.json</a>. Errors are '
        f"<code>application/problem+json</code>.</p>{''.join(operations)}<h2>Models</h2>{''.join(models)}</body></html>"
    )


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    scopes = [scope for each in operation.get("security", ()) for scope in each["bearer"]]
    yield f"<section><h2><code>{method} {escape(path)}</code></h2><p><b>{escape(operation['summary'])}</b>"
    yield f" (scope {escape(' '.join(scopes))})</p>" if scopes else " (no token needed)</p>"
    yield f"<p>{escape(operation.get('description', ''))}</p><table>"
    for each in operation.get("parameters", ()):
        yield _row(f"{each['in']} {each['name']}", each.get("description", ""))
    for type_, body in operation.get("requestBody", {}).get("content", {}).items():
        yield _row("body", f"{type_} {_named(body['schema'])}")
    for status, answer in operation["responses"].items():
        for type_, body in answer.get("content", {}).items():
            yield _row(str(status), f"{type_} {_named(body.get('schema', {}))}")
    yield "</table></section>"


def _model(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f'<section id="{escape(name)}"><h3>{escape(name)}</h3><p>{escape(schema.get("description", ""))}</p><table>'
    for field, type_ in schema.get("properties", {}).items():
        yield _row(field, _named(type_) + ("" if field in schema.get("required", ()) else ", optional"))
    yield "</table></section>"


def _named(schema: Mapping[str, Any]) -> str:
    """Return a short text for a schema, such as `array of MessageOut`."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(map(_named, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    if schema.get("type") == "array":
        return f"array of {_named(schema.get('items') or {})}"
    return str(schema.get("type", "anything"))


def _row(name: str, text: str) -> str:
    return f"<tr><td>{escape(name)}<td>{escape(text)}"

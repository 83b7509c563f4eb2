"""docs/api.md: each request, sent in order, gets the answer in the page, and the table of routes is complete."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from aiodelay import Scheduler
from aiodelay.service import admin
from aiodelay.service.api.application import ROUTERS
from aiodelay.service.api.schemas import openapi_of
from tests.support.api import ALL, serving_api

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
STEPS = re.findall(r"```http\n(.*?)```\n\n```(?:json|ndjson)\n(.*?)```", PAGE, re.DOTALL)
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def written(request: str) -> tuple[str, str, dict[str, str], str]:
    head, _, body = request.partition("\n\n")
    first, *headers = head.splitlines()
    method, path = first.split()
    return method, path, dict(line.split(": ", 1) for line in headers), body.rstrip("\n")


def plain(text: str) -> list[Any]:
    """What a text says, line by line, without what is another one each time."""
    text = TIME.sub("<time>", text)
    text = re.sub(r"\b1[79]\d{11}\b", "0", text)
    text = re.sub(r'"key-[0-9a-f]{40}"', '"<key>"', text)
    text = re.sub(r'"(after|confirm)": ?"[\w-]+"', r'"\1": "<token>"', text)
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.asyncio
async def test_requests_are_answered_as_the_page_says() -> None:
    assert len(STEPS) >= 8
    async with Scheduler("memory://", dispatch=False) as scheduler, serving_api(scheduler, **ALL) as client:
        for request, answer in STEPS:
            method, path, headers, body = written(request)
            got: httpx.Response = await client.request(method, path, headers=headers, content=body)
            assert plain(got.text) == plain(answer), request


def table() -> str:
    """The routes, as the page lists them."""
    document = openapi_of(admin(Scheduler("memory://")), ROUTERS)
    lines = ["| route | scope | |", "| --- | --- | --- |"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            (scope,) = operation.get("security", [{"bearer": ["none"]}])[0]["bearer"]
            lines.append(f"| `{method.upper()} {path}` | {scope} | {operation['summary']} |")
    return "\n".join(lines)


def test_the_table_of_routes_is_the_documents() -> None:
    assert PAGE.partition("<!-- routes")[2].partition("-->\n")[2].strip() == table()

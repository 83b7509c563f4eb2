"""Reads the bodies of requests, with limits on size and time, and reads and writes JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from aiodelay.errors import InputError, cut
from aiodelay.operations.json_shapes import json_problem

from .problems import CLOSE, ApiError, wrong
from .security import ApiLimits

__all__ = [
    "NDJSON",
    "Json",
    "body_of",
    "check_type",
    "chunks_of",
    "encoded",
    "lines_of",
    "read_json",
]

NDJSON = "application/x-ndjson"
PLAIN = "application/json"

T = TypeVar("T")


class Json(Response):
    """An answer in JSON."""

    media_type = PLAIN

    def render(self, content: Any) -> bytes:  # noqa: ANN401 - any content that msgspec encodes
        """Return the content as JSON text."""
        return encoded(content)


def encoded(content: Any) -> bytes:  # noqa: ANN401 - any content that msgspec encodes
    """Return the content as JSON text.

    Texts that other programs have stored may hold characters that are not valid in UTF-8. Such characters are escaped.
    """
    try:
        return msgspec.json.encode(content)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(content)).encode()


def check_type(request: Request, *allowed: str) -> str:
    """Return the content type of the body.

    The form of a web page cannot send JSON. So if only JSON is allowed, the check also stops forms of other sites.

    Raises:
        ApiError: The type is not one of `allowed`.
    """
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given not in allowed:
        raise wrong(415, "ContentTypeError", "content-type", repr(cut(given)), " or ".join(allowed))
    return given


async def body_of(request: Request, limits: ApiLimits) -> bytes:
    """Return the whole JSON body of a request.

    Raises:
        ApiError: The content type is not JSON, or the body is too large or arrives too slowly.
    """
    check_type(request, PLAIN)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return b"".join([chunk async for chunk in chunks_of(request, limits.max_body)])
    except TimeoutError:
        raise _too_slow(limits) from None


async def read_json(request: Request, limits: ApiLimits, type_: type[T]) -> T:
    """Return the JSON body of a request, decoded as a value of `type_`.

    Raises:
        ApiError: See `body_of`.
        InputError: The body is not JSON, or the JSON does not have this type.
    """
    body = await body_of(request, limits)
    try:
        return msgspec.json.decode(body, type=type_)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        problem = cut(json_problem(error), 200)
        raise InputError("body", f"wrong JSON: {problem}", "JSON as /openapi.json describes it") from None


async def chunks_of(request: Request, most: int) -> AsyncIterator[bytes]:
    """Yield the parts of a body as they arrive.

    Raises:
        ApiError: The body is larger than `most` bytes, or the client has disconnected.
    """
    size = 0
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise _too_large(most)
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > most:
                raise _too_large(most)
            yield chunk
    except ClientDisconnect:
        raise ApiError(400, "DisconnectedError", "the client has disconnected") from None


async def lines_of(request: Request, limits: ApiLimits) -> AsyncIterator[bytes]:
    """Yield the lines of a body without their line ends, empty lines too.

    The body is read only as fast as the caller takes lines.

    Raises:
        ApiError: A line or the whole body is too large, or nothing arrives for too long.
    """
    rest = b""
    chunks = chunks_of(request, limits.max_stream)
    while True:
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                chunk = await anext(chunks, None)
        except TimeoutError:
            raise _too_slow(limits) from None
        if chunk is None:
            break
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > limits.max_body:
            detail = f"a line has more than the allowed {limits.max_body} bytes"
            raise ApiError(413, "LineTooLargeError", detail, CLOSE, field="line", allowed=f"{limits.max_body} bytes")
    if rest:
        yield rest


def _too_large(most: int) -> ApiError:
    detail = f"the body has more than the allowed {most} bytes"
    return ApiError(413, "BodyTooLargeError", detail, CLOSE, field="body", allowed=f"{most} bytes")


def _too_slow(limits: ApiLimits) -> ApiError:
    detail = (
        f"the body arrives too slowly; the limit for a body, or for a pause in a stream, is {limits.body_timeout_s:g} s"
    )
    return ApiError(408, "BodyTimeoutError", detail, CLOSE, field="body", allowed=f"{limits.body_timeout_s:g} s")

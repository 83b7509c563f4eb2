"""`WebhookSink`, for `to="webhook:<path>"`: posts due messages to an HTTP server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Self

import httpx2

from aiodelay.core.urls import UrlOptions
from aiodelay.core.values import Delivery, Demand, Failed, NotTaken, SendOutcome, Sent
from aiodelay.errors import ConfigurationError, TargetError, shortened


class WebhookSink:
    """A sink that posts the payload of each message, with the delivery id. By this id, the receiver drops duplicates.

    Args:
        base: The base URL, such as `https://host:port/base`. The sink appends the address of each message to it.
    """

    name = "webhook"
    limits = Demand(20)

    def __init__(self, base: str) -> None:
        self._base = base

    def check(self, address: str) -> None:
        if not re.fullmatch(r"[\w.~/-]+", address, re.ASCII):
            raise TargetError("path in to", shortened(address), "letters, digits, . _ ~ - /")

    async def __aenter__(self) -> Self:
        self._client = httpx2.AsyncClient(base_url=self._base, timeout=10)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._client.aclose()

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        async with asyncio.TaskGroup() as tasks:
            posts = [tasks.create_task(self._post(delivery)) for delivery in deliveries]
        return [post.result() for post in posts]

    async def _post(self, delivery: Delivery) -> SendOutcome:
        envelope = delivery.envelope
        kind = "application/json" if envelope.encoding == "json" else "application/octet-stream"
        headers = {"Content-Type": kind, "Idempotency-Key": delivery.delivery_id}
        try:
            answer = await self._client.post(envelope.address, content=envelope.payload, headers=headers)
        except httpx2.TransportError as error:
            return NotTaken(type(error).__name__)  # the server is away: try again without counting an attempt
        if answer.is_success:
            return Sent()
        is_passing = answer.is_server_error or answer.status_code in (408, 429)
        return Failed(f"HTTP {answer.status_code}", retryable=is_passing)


def open_sink(url: str) -> WebhookSink:
    """Open `webhook://host:port/base`, or with TLS `webhook://host/base?tls=true`."""
    options = UrlOptions(url)
    scheme = "https" if options.flag("tls") else "http"
    options.finish()
    if not options.parts.netloc:
        raise ConfigurationError("sink", options.masked, "webhook://host:port/base")
    return WebhookSink(f"{scheme}://{options.parts.netloc}{options.parts.path}")

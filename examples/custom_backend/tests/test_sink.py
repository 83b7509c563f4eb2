from __future__ import annotations

import asyncio
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar

import pytest

from aiodelay import ConfigurationError, Retry, Scheduler, TargetError
from aiodelay.backends.registry import open_sink
from aiodelay.core.values import Delivery, Envelope, NotTaken


class Receiver(BaseHTTPRequestHandler):
    got: ClassVar[list[tuple[str, bytes, str]]] = []
    answers: ClassVar[list[int]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.append((self.path, body, self.headers["Idempotency-Key"]))
        self.send_response(self.answers.pop(0) if self.answers else 204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - the name in the base class


@pytest.fixture
def receiver() -> type[Receiver]:
    Receiver.got, Receiver.answers = [], []
    return Receiver


@pytest.fixture
def url(receiver: type[Receiver]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), receiver)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"webhook://127.0.0.1:{server.server_port}/hooks"
    server.shutdown()
    server.server_close()
    thread.join()


async def send(url: str, *ids: str) -> list[str]:
    """Send messages. Return the reasons of the dead letters."""
    retry = Retry(attempts=3, first="10ms", jitter=0)
    async with Scheduler("memory://", sinks=[url], retry=retry) as scheduler:
        for message_id in ids:
            await scheduler.schedule(b"paid", to="webhook:orders/7", delay="0s", id=message_id)
        await scheduler.run_until_idle()
        return [f"{letter.reason}: {letter.record.last_error}" async for letter in scheduler.dead_letters()]


def test_used_by_url(url: str, receiver: type[Receiver]) -> None:
    assert asyncio.run(send(url, "a", "b")) == []
    assert sorted((path, body, key.partition("/")[0]) for path, body, key in receiver.got) == [
        ("/hooks/orders/7", b"paid", "a"),
        ("/hooks/orders/7", b"paid", "b"),
    ]


def test_a_server_that_fails_is_tried_again_with_the_same_key(url: str, receiver: type[Receiver]) -> None:
    receiver.answers += [503, 429]
    assert asyncio.run(send(url, "a")) == []
    keys = [key for _, _, key in receiver.got]
    assert len(keys) == 3
    assert len(set(keys)) == 1


def test_what_the_server_refuses_is_given_up(url: str, receiver: type[Receiver]) -> None:
    receiver.answers += [404]
    assert asyncio.run(send(url, "a")) == ["not_retryable: HTTP 404"]
    assert len(receiver.got) == 1


def test_a_server_that_is_away_takes_nothing_and_costs_no_attempt() -> None:
    async def deliver() -> object:
        async with open_sink("webhook://127.0.0.1:1/") as sink:
            return await sink.send([Delivery(Envelope("a", "webhook", "x"), "a/1/2", 2, 1, 1, 0)])

    assert asyncio.run(deliver()) == [NotTaken("ConnectError")]


def test_urls_and_addresses_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="webhook://host:port/base"):
        open_sink("webhook:")
    with pytest.raises(TargetError, match="path in to is 'a b'"):
        open_sink("webhook://host").check("a b")

"""Django with its own threaded server: views schedule after their transaction has committed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
import pytest
from django.conf import settings
from django.core.handlers.wsgi import WSGIHandler
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
from django.db import connection, models, transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path

from aiodelay import Message, Scheduler
from aiodelay.blocking import BlockingScheduler
from tests.support.django_project import set_up


@dataclass
class CheckPayment:
    order: int


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[models.Model]]:
    """A project of one table."""
    set_up(tmp_path_factory.mktemp("django"))

    class Order(models.Model):
        class Meta:
            app_label = "shop"

    with connection.schema_editor() as editor:
        editor.create_model(Order)
    yield Order
    connection.close()


class Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - its name there


@pytest.fixture
def delays(tmp_path: Path) -> Iterator[BlockingScheduler]:
    delays = BlockingScheduler(f"sqlite:///{tmp_path}/delays.db")
    yield delays
    delays.close()


def served(*views: Any) -> Iterator[httpx2.Client]:  # noqa: ANN401 - what `path` makes
    settings.ROOT_URLCONF = views
    server = ThreadedWSGIServer(("127.0.0.1", 0), Handler)
    server.set_app(WSGIHandler())
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    with httpx2.Client(base_url=f"http://127.0.0.1:{server.server_port}", timeout=30) as client:
        yield client
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def client(shop: type[models.Model], delays: BlockingScheduler) -> Iterator[httpx2.Client]:
    @transaction.atomic
    def place(request: HttpRequest) -> JsonResponse:
        order = shop.objects.create()
        check = partial(delays.schedule, CheckPayment(order.pk), delay="15m", id=f"check-{order.pk}")
        transaction.on_commit(check)
        if request.GET.get("fails"):
            raise OSError("after the order was written")
        assert delays.get(f"check-{order.pk}") is None, "not before the commit"
        return JsonResponse({"order": order.pk})

    async def place_in_a_loop(request: HttpRequest) -> JsonResponse:
        scheduled = await asyncio.to_thread(delays.schedule, CheckPayment(0), delay="15m", id="async")
        return JsonResponse({"id": scheduled.id})

    yield from served(path("place", place), path("async", place_in_a_loop))


def test_views_schedule_when_their_transaction_has_committed(
    client: httpx2.Client, shop: type[models.Model], delays: BlockingScheduler
) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.get("/place"), range(24)))
    orders = {json.loads(answer.text)["order"] for answer in answers}
    assert client.get("/place?fails=yes").status_code == 500
    assert len(orders) == 24
    assert scheduled(delays) == {f"check-{order}" for order in orders}
    assert {order.pk for order in shop.objects.all()} >= orders


def test_an_asynchronous_view_schedules_in_a_thread(client: httpx2.Client, delays: BlockingScheduler) -> None:
    assert client.get("/async").json() == {"id": "async"}
    assert scheduled(delays) == {"async"}


def test_a_queryset_is_scheduled_as_it_is_read(shop: type[models.Model], delays: BlockingScheduler) -> None:
    """Django lets nobody read one on an event loop."""
    shop.objects.all().delete()
    shop.objects.bulk_create(shop() for _ in range(100))
    orders = shop.objects.iterator()
    assert delays.schedule_many(Message(CheckPayment(order.pk), delay="1h") for order in orders) == 100


def scheduled(delays: BlockingScheduler) -> set[str]:
    async def read(scheduler: Scheduler) -> set[str]:
        return {snapshot.record.id async for snapshot in scheduler.pending()}

    return delays.call(read)

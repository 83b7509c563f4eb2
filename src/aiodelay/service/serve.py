"""The service as a whole: what is opened, in which order, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from aiodelay.errors import AiodelayError, ConfigurationError
from aiodelay.scheduler import Scheduler

from .api import Tokens, admin
from .app import make_app
from .config import ApiSettings, Settings
from .connections import Server
from .health import Health
from .parts import make_api, make_box, make_scheduler, store_of
from .reading import Configuration
from .token_file import follow_tokens

if TYPE_CHECKING:
    from aiodelay.delay_box import DelayBox

__all__ = ["listening", "run_service", "serving_page", "url_of"]

LOOK_S = 0.5
"""Pause between two looks whether a store serves claims already."""
BACKLOG = 2048
log: logging.Logger = logging.getLogger("aiodelay.service")


async def run_service(settings: Settings, stop: asyncio.Event, configuration: Configuration) -> None:
    """Serve until an event is set, then end in order: not ready any more, no more requests, intakes, deliveries.

    Args:
        settings: All that can be said.
        stop: Set by whoever wants the end.
        configuration: Where the settings come from; tokens are read again when its file changes.

    Raises:
        ConfigurationError: It cannot listen where it is told to, or a store, sink or topic cannot be used.
        StoreUnavailableError, SinkUnavailableError: One did not answer within `limits.open_timeout`.
    """
    schedulers = {name: make_scheduler(settings, store) for name, store in settings.named_stores.items()}
    boxes: dict[str, list[DelayBox]] = {name: [] for name in schedulers}
    for intake in settings.intake:
        boxes[store_of(settings, intake)].append(make_box(settings, intake, schedulers))
    health = Health(schedulers, settings.limits)
    tokens = Tokens(settings.api.tokens)
    api = make_api(settings, schedulers, tokens)
    app = make_app(health, api)
    listener = listening(settings.api.host, settings.api.port)
    async with asyncio.TaskGroup() as tasks:
        server = _server(app, settings.api)
        serving = tasks.create_task(server.serve([listener]), name="aiodelay http")
        log.info("listening on %s", url_of(listener))
        watching = tasks.create_task(follow_tokens(configuration, tokens), name="aiodelay tokens")

        async def leave() -> None:
            health.is_leaving = True
            log.info("stopping; a later signal ends it at once")
            await asyncio.sleep(settings.limits.leave.total_seconds())
            api.state.page.closing.set()
            server.should_exit = True
            await asyncio.wait([serving])
            await api.state.served.operations.aclose()

        try:
            await _keep_all_open(schedulers, boxes, health, stop, leave)
        finally:
            watching.cancel()
            api.state.page.closing.set()
            server.should_exit = True
            await asyncio.wait([serving])
            await api.state.served.operations.aclose()


@asynccontextmanager
async def serving_page(scheduler: Scheduler, listener: socket.socket) -> AsyncIterator[None]:
    """Serve the page of one open scheduler as long as the block lasts; to this machine alone, which may do all.

    Args:
        scheduler: Whose.
        listener: Listens already.
    """
    app = admin(scheduler, read_only=False)
    server = _server(app, ApiSettings())
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve([listener]), name="aiodelay page")
        try:
            yield
        finally:
            app.state.page.closing.set()
            server.should_exit = True
            await asyncio.wait([serving])
            await app.state.served.operations.aclose()


async def _keep_all_open(
    schedulers: Mapping[str, Scheduler],
    boxes: Mapping[str, Sequence[DelayBox]],
    health: Health,
    stop: asyncio.Event,
    leave: Callable[[], Awaitable[None]],
) -> None:
    """Keep the stores open until an event is set and then what must end before them; what is not open yet never is."""
    closing = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        opened = {
            name: tasks.create_task(
                _keep_open(name, scheduler, boxes[name], health, closing), name=f"aiodelay store {name}"
            )
            for name, scheduler in schedulers.items()
        }
        await stop.wait()
        await leave()
        closing.set()
        for name in health.opening:
            opened[name].cancel()


async def _keep_open(
    name: str, scheduler: Scheduler, boxes: Sequence[DelayBox], health: Health, closing: asyncio.Event
) -> None:
    """Open a store's scheduler and intakes, and close them, intakes first, when it is time."""
    try:
        async with scheduler, AsyncExitStack() as stack:
            for box in boxes:
                await stack.enter_async_context(box)
            health.opening.discard(name)
            await _tell_open(name, scheduler, closing)
            await closing.wait()
    except AiodelayError as error:
        error.add_note(f"store {name}")
        raise


async def _tell_open(name: str, scheduler: Scheduler, closing: asyncio.Event) -> None:
    """Log that a store is open once it serves claims, and until then, once, why it does not."""
    if (status := scheduler.status()).phase != "ready":
        log.warning("%s is not ready: %s", name, status.why or f"{status.done} of {status.of} partitions are read")
    while scheduler.status().phase != "ready":
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await closing.wait()
                return
    log.info("%s is open: %s", name, scheduler.store.name)


def _server(app: ASGIApp, settings: ApiSettings) -> Server:
    return Server(app, most=settings.max_connections, still_s=settings.body_timeout.total_seconds())


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Its connections send at once: asyncio sees to that only for sockets that name their protocol, which these do not. An
    answer in two parts would take 40 ms, until the client acknowledges the first.

    Args:
        host: Where.
        port: 0 = any free one.

    Raises:
        ConfigurationError: It cannot.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address, family=family, backlog=BACKLOG)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise ConfigurationError(
            "api.host, api.port", f"{host} {port} ({error.strerror})", "an address that is free"
        ) from None


def url_of(listener: socket.socket) -> str:
    """Return where a socket listens, as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

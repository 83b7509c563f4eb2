"""`run_service`: opens the stores, the intakes and the HTTP server, serves until a signal, and then ends in order."""

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
"""Seconds between two checks whether a store is ready."""
BACKLOG = 2048
log: logging.Logger = logging.getLogger("aiodelay.service")


async def run_service(settings: Settings, stop: asyncio.Event, configuration: Configuration) -> None:
    """Serve until `stop` is set, then end in order.

    The order of the end: the service says that it is not ready, takes no more requests, closes the intakes, and drains
    the deliveries.

    Args:
        settings: The settings of the service.
        stop: The caller sets this event to end the service.
        configuration: The source of the settings. If its file changes, the tokens are read again.

    Raises:
        ConfigurationError: The service cannot listen on its address, or a store, sink or topic cannot be used.
        StoreUnavailableError, SinkUnavailableError: A store or a sink did not answer within `limits.open_timeout`.
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
            log.info("the service is stopping; a later signal ends it at once")
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
    """Serve the page of one open scheduler until the block ends.

    Only requests from this machine are answered. Such a request needs no token, and may change everything.

    Args:
        scheduler: The scheduler to show.
        listener: A socket that listens already.
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
    """Open the stores, wait for `stop`, run `leave`, then close the stores.

    `leave` ends everything that must end before the stores. If a store is still opening when `leave` has ended, its
    opening is cancelled.
    """
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
    """Open a store's scheduler and its intakes. Close them, intakes first, when `closing` is set."""
    try:
        async with scheduler, AsyncExitStack() as stack:
            for box in boxes:
                await stack.enter_async_context(box)
            health.opening.discard(name)
            await _log_open(name, scheduler, closing)
            await closing.wait()
    except AiodelayError as error:
        error.add_note(f"store {name}")
        raise


async def _log_open(name: str, scheduler: Scheduler, closing: asyncio.Event) -> None:
    """Log when a store becomes ready. If the store is not ready at once, log the reason first."""
    if (status := scheduler.status()).phase != "ready":
        why = status.why or f"{status.done} of {status.of} partitions are read"
        log.warning("store %s is not ready: %s", name, why)
    while scheduler.status().phase != "ready":
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await closing.wait()
                return
    log.info("store %s is open: %s", name, scheduler.store.name)


def _server(app: ASGIApp, settings: ApiSettings) -> Server:
    return Server(app, most=settings.max_connections, still_s=settings.body_timeout.total_seconds())


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address.

    The socket has the option TCP_NODELAY, and its connections inherit the option. Without TCP_NODELAY, an answer in two
    parts takes 40 ms: the second part waits until the client has acknowledged the first part. asyncio itself sets the
    option only if the attribute `proto` of a socket is `IPPROTO_TCP`. In connections of this socket, it is 0.

    Args:
        host: The address or host name.
        port: The port; 0 = any free port.

    Raises:
        ConfigurationError: The address cannot be used, for example because it is in use.
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
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

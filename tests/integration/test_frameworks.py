"""`Scheduler.lifespan` in FastAPI, Starlette and Litestar, served by uvicorn on a real port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import fastapi
import httpx2
import litestar
import litestar.datastructures
import litestar.di
import litestar.params
import pytest
import starlette.applications
import starlette.requests
import starlette.responses
import starlette.routing
import uvicorn

from aiodelay import ClosedError, ConfigurationError, Scheduler
from aiodelay.contrib.litestar import AiodelayPlugin
from aiodelay.service.connections import KEPT_S

pytestmark = pytest.mark.asyncio


@dataclass
class Ship:
    order: int


class State(TypedDict):
    shop: str


Schedule: TypeAlias = Callable[[int], Any]
Own: TypeAlias = Callable[[Any], AbstractAsyncContextManager[State]]
Make: TypeAlias = Callable[[Scheduler, Own, Schedule], Any]


def make_fastapi(scheduler: Scheduler, own: Own, ship: Schedule) -> fastapi.FastAPI:
    app = fastapi.FastAPI(lifespan=scheduler.lifespan(own))

    @app.post("/orders/{order}")
    async def place(order: int, request: fastapi.Request) -> str:
        await ship(order)
        return str(request.state.shop)

    return app


def make_starlette(scheduler: Scheduler, own: Own, ship: Schedule) -> starlette.applications.Starlette:
    async def place(request: starlette.requests.Request) -> starlette.responses.JSONResponse:
        await ship(request.path_params["order"])
        return starlette.responses.JSONResponse(request.state.shop)

    routes = [starlette.routing.Route("/orders/{order:int}", place, methods=["POST"])]
    return starlette.applications.Starlette(routes=routes, lifespan=scheduler.lifespan(own))


def stateful(own: Own) -> Callable[[litestar.Litestar], AbstractAsyncContextManager[None]]:
    """Return the application's own lifespan for Litestar, which gives it the application to put state into."""

    @asynccontextmanager
    async def lifespan(app: litestar.Litestar) -> AsyncIterator[None]:
        async with own(app) as state:
            app.state.update(state)
            yield

    return lifespan


def make_litestar(scheduler: Scheduler, own: Own, ship: Schedule) -> litestar.Litestar:
    """Litestar takes any number of lifespans."""

    @litestar.post("/orders/{order:int}", status_code=200)
    async def place(order: litestar.params.FromPath[int], state: litestar.datastructures.State) -> str:
        await ship(order)
        return str(state.shop)

    return litestar.Litestar([place], lifespan=[stateful(own), scheduler.lifespan()], logging_config=None)


def make_litestar_with_plugin(scheduler: Scheduler, own: Own, ship: Schedule) -> litestar.Litestar:
    """The plugin stands before the application's own lifespan, which is entered first all the same."""
    given = scheduler

    @litestar.post("/orders/{order:int}", status_code=200)
    async def place(
        order: litestar.params.FromPath[int],
        delays: litestar.di.NamedDependency[Scheduler],
        state: litestar.datastructures.State,
    ) -> str:
        assert delays is given
        await ship(order)
        return str(state.shop)

    return litestar.Litestar(
        [place],
        plugins=[AiodelayPlugin(scheduler, name="delays")],
        lifespan=[stateful(own)],
        logging_config=None,
    )


EACH = pytest.mark.parametrize("make", [make_fastapi, make_starlette, make_litestar, make_litestar_with_plugin])


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[httpx2.AsyncClient]:  # noqa: ANN401 - of either framework
    """Serve an application as `uvicorn` does, on a port of its own; stopped as by SIGTERM."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, lifespan="on", log_config=None, timeout_keep_alive=KEPT_S))
        started, startup = asyncio.Event(), server.startup

        async def start(sockets: list[socket.socket] | None = None) -> None:
            try:
                await startup(sockets)
            except SystemExit:  # what uvicorn does where the application does not start
                server.should_exit = True
            finally:
                started.set()

        server.startup = start  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve([listening]))
            await started.wait()
            assert not server.should_exit, "the application did not start"
            base = f"http://127.0.0.1:{listening.getsockname()[1]}"
            async with httpx2.AsyncClient(base_url=base, timeout=60) as client:
                yield client
            server.should_exit = True


@EACH
async def test_requests_schedule_handlers_run_and_shutdown_drains(tmp_path: Path, make: Make) -> None:
    scheduler = Scheduler(f"sqlite:///{tmp_path}/shop.db")
    steps: list[str] = []
    shipped: asyncio.Queue[int] = asyncio.Queue()
    begun, may_end = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def own(app: object) -> AsyncIterator[State]:
        assert not is_open(scheduler)
        steps.append(f"own entered by {type(app).__name__}")
        yield {"shop": "corner shop"}
        assert not is_open(scheduler)
        steps.append("own left")

    @scheduler.handler
    async def ship(event: Ship) -> None:
        if event.order == 2:
            begun.set()
            await may_end.wait()
        steps.append(f"shipped {event.order}")
        shipped.put_nowait(event.order)

    async def place(order: int) -> None:
        await scheduler.schedule(Ship(order), delay="1ms")

    app = make(scheduler, own, place)
    async with served(app) as client:
        answer = await client.post("/orders/1")
        assert (answer.status_code, answer.text.strip('"')) == (200, "corner shop")
        assert await shipped.get() == 1
        await client.post("/orders/2")
        await begun.wait()
        asyncio.get_running_loop().call_later(0.2, may_end.set)  # the server is being stopped by then
    assert steps == [f"own entered by {type(app).__name__}", "shipped 1", "shipped 2", "own left"]
    assert not is_open(scheduler)


def is_open(scheduler: Scheduler) -> bool:
    try:
        scheduler._ready()
    except ClosedError:
        return False
    return True


@EACH
async def test_a_scheduler_that_cannot_open_fails_the_servers_start(
    tmp_path: Path, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    steps: list[str] = []

    @asynccontextmanager
    async def own(app: object) -> AsyncIterator[State]:
        try:
            yield {"shop": ""}
        finally:
            steps.append("own left")

    async def place(order: int) -> None: ...

    app = make(Scheduler(f"sqlite:///{tmp_path}/none/shop.db", open_timeout="0s"), own, place)
    with pytest.raises(ExceptionGroup) as failed:
        async with served(app):
            pass
    assert failed.group_contains(AssertionError, match="did not start")
    assert steps == ["own left"]
    assert "StoreUnavailableError" in caplog.text
    assert "Application startup failed. Exiting." in caplog.text


@EACH
async def test_an_application_may_be_served_again(make: Make) -> None:
    scheduler = Scheduler("memory://")
    own, got = own_lifespan(), []

    @scheduler.handler
    async def ship(event: Ship) -> None:
        got.append(event.order)

    async def place(order: int) -> None:
        await scheduler.schedule(Ship(order), delay="0s")
        await scheduler.run_until_idle()

    app = make(scheduler, own, place)
    for order in (1, 2):
        async with served(app) as client:
            assert (await client.post(f"/orders/{order}")).status_code == 200
    assert got == [1, 2]


def own_lifespan() -> Own:
    @asynccontextmanager
    async def own(app: object) -> AsyncIterator[State]:
        yield {"shop": "corner shop"}

    return own


async def test_without_a_lifespan_of_ones_own() -> None:
    scheduler = Scheduler("memory://")
    for app in (
        fastapi.FastAPI(lifespan=scheduler.lifespan()),
        starlette.applications.Starlette(lifespan=scheduler.lifespan()),
        litestar.Litestar([], lifespan=[scheduler.lifespan()], logging_config=None),
    ):
        async with served(app) as client:
            assert is_open(scheduler)
            assert (await client.get("/nothing")).status_code == 404
        assert not is_open(scheduler)


async def test_lifespans_nest() -> None:
    """Two schedulers, and state that a lifespan yields, through both."""
    first, second = Scheduler("memory://"), Scheduler("memory://")
    async with second.lifespan(first.lifespan(own_lifespan()))("app") as state:
        assert is_open(first)
        assert is_open(second)
        assert isinstance(state, Mapping)
        assert state == {"shop": "corner shop"}
    assert not is_open(first)


@pytest.mark.parametrize("own", [7, "startup"])
async def test_what_is_no_lifespan_is_refused(own: Any) -> None:  # noqa: ANN401 - wrong on purpose
    with pytest.raises(ConfigurationError, match=r"lifespan is an? .*; allowed: a function that takes the application"):
        Scheduler("memory://").lifespan(own)


async def test_two_plugins_need_two_names() -> None:
    first, second = Scheduler("memory://"), Scheduler("memory://")
    with pytest.raises(ConfigurationError, match="AiodelayPlugin name is 'scheduler'; allowed: a name that no"):
        litestar.Litestar([], plugins=[AiodelayPlugin(first), AiodelayPlugin(second)])
    litestar.Litestar([], plugins=[AiodelayPlugin(first), AiodelayPlugin(second, name="other")])

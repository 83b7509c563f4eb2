"""The pytest plugin: the fixtures `clock`, `scheduler`, `aiodelay_scheduler` and `faulty_store`.

pytest loads the plugin by its entry point. A test that uses `clock` or `scheduler`, directly or through another
fixture, runs on a `VirtualLoop` of its own. This works under pytest-asyncio (1.4 or later, strict or auto mode) and
under anyio's plugin. The plugin does not change other tests.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import Any

import pytest

from aiodelay.backends.memory import MemoryStore
from aiodelay.ports.clock import Clock
from aiodelay.scheduler import Scheduler

from .clock import LoopClock, VirtualClock
from .faults import FaultyStore
from .kit import on_clock, store_of
from .loop import VirtualLoop

__all__ = ["aiodelay_scheduler", "clock", "faulty_store", "scheduler"]

_MARK = "_aiodelay_virtual_loop"


@pytest.fixture
def _aiodelay_virtual_loop() -> None:
    """Mark the test as a test for a virtual loop. The hooks below look for the name of this fixture."""


@pytest.fixture
def clock(_aiodelay_virtual_loop: None) -> VirtualClock:
    """The virtual clock of this test. It starts at 2030-01-01T00:00:00Z, and virtual time passes while the test waits.

    `await clock.advance("1h")` lets an hour pass and returns when everything that became due has happened. In a test
    that is not async, `clock.move(ms)` moves the clock.
    """
    return VirtualClock.of_next_loop()


@pytest.fixture
def aiodelay_scheduler() -> Scheduler | None:
    """Return None: the fixture `scheduler` then makes an empty scheduler.

    Override this fixture in your conftest.py to return your program's scheduler.
    """
    return None


@pytest.fixture
def scheduler(
    request: pytest.FixtureRequest, aiodelay_scheduler: Scheduler | None, _aiodelay_virtual_loop: None
) -> Iterator[Scheduler]:
    """Your scheduler, with its handlers, on an empty memory store, recording sinks and virtual time. It is not open.

    Open it with `async with scheduler:`, as your program does. The fixture `aiodelay_scheduler` chooses the scheduler.
    A `TestClient` of a web framework opens the scheduler on a real loop. There it runs in real time, and the test must
    not use `clock`.
    """
    clock: Clock = request.getfixturevalue("clock") if "clock" in request.fixturenames else LoopClock()
    yours = aiodelay_scheduler if aiodelay_scheduler is not None else Scheduler(MemoryStore(clock=clock), clock=clock)
    with on_clock(yours, clock):
        yield yours


@pytest.fixture
def faulty_store(scheduler: Scheduler) -> FaultyStore:
    """The store of `scheduler`, to inject faults: `faulty_store.inject("unavailable", "apply", times=3)`."""
    return store_of(scheduler)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Make the loop of pytest-asyncio, and of anyio's async fixtures, virtual for a test that is marked so.

    The fixture `_aiodelay_virtual_loop` marks the tests that use `clock` or `scheduler`.
    The plugin does not use pytest-asyncio's hook for loop factories: with that hook, pytest would set up all async
    fixtures of a wider scope again for every test. Those fixtures keep their real loop, because tests in real time
    share them.
    """
    if request.scope != "function" or _MARK not in request.fixturenames or not _makes_runner(fixturedef):
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixturedef, "func", _on_virtual_loop(fixturedef.func))
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Make anyio run a marked test on a virtual loop, unless an async fixture of wider scope already has a loop."""
    if _MARK not in pyfuncitem.fixturenames or not (chosen := _virtual(pyfuncitem.funcargs)):
        return (yield)
    pyfuncitem.funcargs.update(chosen)
    with pytest.MonkeyPatch.context() as patch:
        if inspect.iscoroutinefunction(pyfuncitem.obj):
            patch.setattr(pyfuncitem, "obj", _watched(pyfuncitem.obj))
        return (yield)


def _makes_runner(fixturedef: pytest.FixtureDef[object]) -> bool:
    wanted = {"pytest_asyncio.plugin": "_asyncio_loop_factory", "anyio.pytest_plugin": "anyio_backend"}
    function = fixturedef.func
    return inspect.isgeneratorfunction(function) and wanted.get(function.__module__) in fixturedef.argnames


def _on_virtual_loop(fixture: Callable[..., Any]) -> Callable[..., Generator[object, object, object]]:
    @functools.wraps(fixture)
    def on_virtual_loop(**arguments: object) -> Generator[object, object, object]:
        return (yield from fixture(**arguments | _virtual(arguments)))

    return on_virtual_loop


def _watched(test: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
    @functools.wraps(test)
    async def watched(**arguments: object) -> object:
        loop = asyncio.get_running_loop()
        running = test(**arguments)
        return await (loop.watch(running) if isinstance(loop, VirtualLoop) else running)

    return watched


def _virtual(arguments: dict[str, Any]) -> dict[str, object]:
    """Return the arguments that choose the loop, changed so that they choose a virtual loop."""
    chosen: dict[str, object] = {}
    if "_asyncio_loop_factory" in arguments:
        chosen["_asyncio_loop_factory"] = VirtualLoop
    backend = arguments.get("anyio_backend")
    name, options = backend if isinstance(backend, tuple) else (backend, {})
    if name == "asyncio":
        chosen["anyio_backend"] = (name, {**options, "loop_factory": VirtualLoop})
    return chosen

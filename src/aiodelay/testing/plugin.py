"""The pytest plugin: the fixture `clock`, and a virtual loop under every test that uses it.

pytest loads it by entry point. Tests that use `clock`, be it through other fixtures, run on a `VirtualLoop` of their
own, under pytest-asyncio (1.4 or later, strict or auto mode) and anyio's plugin alike; all others are left alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TypeAlias

import pytest

from .clock import VirtualClock
from .loop import VirtualLoop

__all__ = ["clock"]

_LoopFactory: TypeAlias = Callable[[], asyncio.AbstractEventLoop]

_MARK = "_aiodelay_virtual_loop"
_in_setup = pytest.StashKey[list[pytest.FixtureRequest]]()
_chosen = pytest.StashKey[dict[_LoopFactory, _LoopFactory]]()


@pytest.fixture
def _aiodelay_virtual_loop() -> None:
    """Mark the test, by a name that no one else uses, as one for a virtual loop."""


@pytest.fixture
def clock(_aiodelay_virtual_loop: None) -> VirtualClock:
    """The time of this test: starts at 2030-01-01T00:00:00Z, passes while the test waits, costs nothing.

    `await clock.advance("1h")` lets an hour pass and returns when all that became due has happened. In a test that is
    not async, `clock.move(ms)` moves it.
    """
    return VirtualClock.of_next_loop()


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Generator[None, Mapping[str, _LoopFactory] | None, Mapping[str, _LoopFactory]]:
    """Put the choice between a normal and a virtual loop into the factories of pytest-asyncio.

    Every test gets the same factory objects: pytest tears down the user's wider async fixtures between two tests whose
    factories differ. So the choice is made when a loop is needed, not here.
    """
    factories = yield
    if factories is None:
        factories = {"asyncio": asyncio.new_event_loop}
    elif not isinstance(factories, Mapping) or not all(map(callable, factories.values())):
        return factories  # pytest-asyncio says what is wrong with it
    choosing = {name: _choosing(config, factory) for name, factory in factories.items()}
    return dict([*choosing.items()][:1]) if _MARK in getattr(item, "fixturenames", ()) else choosing


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(request: pytest.FixtureRequest) -> Generator[None, object, object]:
    """Remember which fixture is being set up: a loop is made for that one."""
    in_setup = request.config.stash.setdefault(_in_setup, [])
    in_setup.append(request)
    try:
        return (yield)
    finally:
        in_setup.pop()


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give anyio's tests that use `clock` a backend with a virtual loop, as if they were parametrized with it."""
    names = metafunc.fixturenames
    if _MARK not in names or "anyio_backend" not in names or _parametrizes(metafunc, "anyio_backend"):
        return
    # The fixture of anyio itself takes a parameter, and knows to renew wider async fixtures for it; an own one does not.
    takes_parameter = metafunc._arg2fixturedefs["anyio_backend"][-1].params is not None
    backend = ("asyncio", {"loop_factory": VirtualLoop})
    mark = pytest.mark.parametrize("anyio_backend", [backend], ids=["asyncio"], indirect=takes_parameter)
    metafunc.definition.add_marker(mark)


def _choosing(config: pytest.Config, factory: _LoopFactory) -> _LoopFactory:
    def chosen() -> asyncio.AbstractEventLoop:
        in_setup = config.stash.get(_in_setup, [])
        # A wider loop is shared with tests that want real time, whichever test happens to start it.
        wanted = in_setup and in_setup[-1].scope == "function" and _MARK in in_setup[-1].fixturenames
        return VirtualLoop() if wanted else factory()

    return config.stash.setdefault(_chosen, {}).setdefault(factory, chosen)


def _parametrizes(metafunc: pytest.Metafunc, name: str) -> bool:
    return any(name in _names(*mark.args, **mark.kwargs) for mark in metafunc.definition.iter_markers("parametrize"))


def _names(argnames: str | Iterable[str], *_: object, **__: object) -> list[str]:
    return [name.strip() for name in argnames.split(",")] if isinstance(argnames, str) else list(argnames)

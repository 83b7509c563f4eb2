from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
from hypothesis import core, settings

from aiodelay.testing.servers import NoServerError, redis_programs, redis_servers, serving
from tests.support import kafka as kafka_support
from tests.support.distribution import InGroups, give_way, slowest_first
from tests.support.servers import Found, is_of_the_gate

# The gate draws the same examples each time, and no deadline, since a slow machine says nothing about the code.
# `--hypothesis-profile=nightly` draws more of them, and new ones.
settings.register_profile("ours", deadline=None, derandomize=True)
settings.register_profile("nightly", deadline=None, derandomize=False, max_examples=2000)
settings.load_profile("ours")


BROKERS = {"cluster", "kafka", "own_broker", "seen"}
"""Fixtures that start a Kafka broker, or start it again. `tests/support/kafka.py` limits each start."""


# A shell starts a command with `&` so that it ignores Ctrl-C, and the programs that the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # pytest-randomly chooses the run's seed first
def pytest_configure(config: pytest.Config) -> None:
    """Draw Hypothesis's examples from the run's seed, so that `--randomly-seed=N` alone repeats a night."""
    seed = config.getoption("--randomly-seed", None)
    if seed is not None and config.getoption("--hypothesis-seed", None) is None:
        core.global_force_seed = seed  # the gate's profile is derandomized, and takes no notice


def pytest_report_header() -> list[str]:
    try:
        redis = ", ".join(dict.fromkeys(map(str, [*redis_servers(), *redis_programs()])))
    except NoServerError as error:  # what needs one fails at collection
        redis = str(error)
    return [f"redis: {redis}", f"kafka: {kafka_support.choice()}"]


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Item] | None:
    """Collect no nightly classes for the gate. They have as many tests as the gate, and each process collects all."""
    marks = getattr(obj, "pytestmark", ()) if name.startswith("Test") else ()
    is_of_the_night = any(mark.name == "nightly" for mark in marks)
    return [] if is_of_the_night and "not nightly" in collector.config.option.markexpr else None


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests `nightly` that repeat a rule on a further Redis product, and order all tests."""
    for item in items:
        if isinstance(item, pytest.Function):
            call = getattr(item, "callspec", None)
            servers = [value for value in call.params.values() if isinstance(value, Found)] if call else []
            valkey_too = item.get_closest_marker("valkey_too") is not None
            if not all(is_of_the_gate(server, valkey_too=valkey_too) for server in servers):
                item.add_marker("nightly")
            if not BROKERS.isdisjoint(item.fixturenames):
                limit_without_fixtures(item)
    items[:] = slowest_first(items)


def limit_without_fixtures(item: pytest.Item) -> None:
    """Let the time limit of a test cover only its call, since a broker may need minutes to start on a busy machine."""
    given = item.get_closest_marker("timeout") or pytest.mark.timeout.mark
    item.add_marker(pytest.mark.timeout(*given.args, **{**given.kwargs, "func_only": True}), append=False)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> InGroups:  # noqa: ANN401 - xdist's
    return InGroups(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    give_way(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected, and keep them out of later garbage collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[str]:
    """The bootstrap address of a real broker, which all processes of a test run share."""
    own = tmp_path_factory.getbasetemp()
    with kafka_support.shared(own if worker_id == "master" else own.parent) as bootstrap:
        yield bootstrap


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[Callable[[Found], str]]:
    """Return the URL of a server that all tests of this process share: each test has a namespace of its own.

    Tests that configure, stop, fill or watch a whole server start their own.
    """
    with ExitStack() as servers:
        yield cache(lambda found: servers.enter_context(serving(found)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What tests log may be no UTF-8; what their processes tell each other is."""
    report = yield
    report.sections = [(title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections]
    return report

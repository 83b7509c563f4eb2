from __future__ import annotations

from importlib.metadata import entry_points

import pytest

pytest_plugins = ["pytester"]

IS_INSTALLED = any(point.value == "aiodelay.testing.plugin" for point in entry_points(group="pytest11"))
BOTH_LOOPS = """
import asyncio
import pytest
import pytest_asyncio
from aiodelay.testing.clock import START
from aiodelay.testing.loop import VirtualLoop

def is_virtual():
    return isinstance(asyncio.get_running_loop(), VirtualLoop)
"""


class Inner:
    def __init__(self, pytester: pytest.Pytester) -> None:
        self._pytester = pytester

    def conftest(self, source: str) -> None:
        self._pytester.makeconftest(source)

    def run(self, source: str, *options: str) -> pytest.RunResult:
        self._pytester.makepyfile(test_inner=BOTH_LOOPS + source)
        plugins = ["-p", "no:randomly", "-p", "no:cacheprovider"]
        plugins += ["-k", "not trio"]  # anyio before 4.12 runs each test also on Trio, which is not installed
        if not IS_INSTALLED:
            plugins += ["-p", "aiodelay.testing.plugin"]
        if "no:asyncio" not in options:
            plugins += ["-o", "asyncio_default_fixture_loop_scope=function"]
        return self._pytester.runpytest_inprocess("-W", "error", *plugins, *options)


@pytest.fixture
def inner(pytester: pytest.Pytester) -> Inner:
    return Inner(pytester)


ASYNCIO_SUITE = """
{mark}
async def test_hour(clock):
    assert is_virtual()
    asyncio.get_running_loop().call_later(3599, seen.append, "fired")
    await clock.advance("1h")
    assert seen == ["fired"]
    assert (clock.now() - START).total_seconds() == 3600

seen = []

{mark}
async def test_each_test_begins_anew(clock):
    assert clock.now() == START

{mark}
async def test_plain():
    assert not is_virtual()

{mark}
@pytest.mark.parametrize("n", [1, 2])
async def test_parameters(clock, n):
    await asyncio.sleep(n * 3600)
    assert clock.monotonic_ms() == n * 3_600_000

def test_not_async(clock):
    clock.move(5)
    assert clock.monotonic_ms() == 5

class TestClass:
    {mark}
    async def test_method(self, clock):
        assert is_virtual()
"""


@pytest.mark.parametrize(
    ("mark", "mode"), [("@pytest.mark.asyncio", "strict"), ("", "auto"), ("@pytest.mark.asyncio", "auto")]
)
def test_pytest_asyncio_needs_no_configuration(inner: Inner, mark: str, mode: str) -> None:
    result = inner.run(ASYNCIO_SUITE.format(mark=mark), f"--asyncio-mode={mode}", "-v")
    result.assert_outcomes(passed=7)
    result.stdout.fnmatch_lines_random(["*::test_hour PASSED*", "*::test_plain PASSED*", "*::test_parameters[[]2] *"])


def test_async_fixtures_run_on_the_loop_of_their_test(inner: Inner) -> None:
    source = """
@pytest_asyncio.fixture
async def machine(clock):
    assert is_virtual()
    yield asyncio.get_running_loop()
    await clock.advance("1h")

@pytest_asyncio.fixture
async def other():
    yield is_virtual()

@pytest.mark.asyncio
async def test_machine(machine, other):
    assert machine is asyncio.get_running_loop()
    assert other

@pytest.mark.asyncio
async def test_plain(other):
    assert not other
"""
    inner.run(source).assert_outcomes(passed=2)


def test_wider_async_fixtures_keep_their_own_loop_and_are_made_once(inner: Inner) -> None:
    source = """
made = []

@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def database():
    made.append(is_virtual())
    yield made

@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def table(database):
    made.append(is_virtual())
    yield made

@pytest.mark.asyncio
async def test_virtual_first(clock, table):
    assert is_virtual()

@pytest.mark.asyncio
async def test_real(table):
    assert not is_virtual()

@pytest.mark.asyncio
async def test_virtual_again(clock, table):
    assert is_virtual()

@pytest.mark.asyncio(loop_scope="session")
async def test_session(database):
    assert not is_virtual()

def test_counts():
    assert made == [False, False]
"""
    inner.run(source).assert_outcomes(passed=5)


def test_loop_factories_of_the_project_hold_for_its_other_tests(inner: Inner) -> None:
    inner.conftest("""
import asyncio

class Mine(asyncio.SelectorEventLoop):
    pass

def pytest_asyncio_loop_factories(config, item):
    return {"mine": Mine, "normal": asyncio.SelectorEventLoop}
""")
    source = """
@pytest.mark.asyncio
async def test_virtual(clock):
    assert is_virtual()

@pytest.mark.asyncio
async def test_plain(request):
    mine = type(asyncio.get_running_loop()).__name__ == "Mine"
    assert mine == ("mine" in request.node.name)
"""
    inner.run(source).assert_outcomes(passed=4)


def test_a_fixture_of_the_project_named_clock_changes_nothing(inner: Inner) -> None:
    source = """
@pytest.fixture
def clock():
    return "tick"

@pytest.mark.asyncio
async def test_own(clock):
    assert clock == "tick"
    assert not is_virtual()
"""
    inner.run(source).assert_outcomes(passed=1)


def test_a_fixture_of_the_project_may_build_on_clock(inner: Inner) -> None:
    source = """
@pytest.fixture
def clock(clock):
    clock.move(1000)
    return clock

@pytest.mark.asyncio
async def test_own(clock):
    await clock.advance("1s")
    assert clock.monotonic_ms() == 2000
"""
    inner.run(source).assert_outcomes(passed=1)


@pytest.mark.parametrize(
    "source",
    [
        """
@pytest.mark.asyncio(loop_scope="module")
async def test_wide_loop(clock):
    clock.now()
""",
        """
@pytest.mark.asyncio
async def test_hidden_request(request):
    request.getfixturevalue("clock").now()
""",
        """
@pytest.fixture(scope="module")
async def wide():
    yield

@pytest.mark.anyio
async def test_wide_fixture(clock, wide):
    clock.now()
""",
        """
def test_by_hand(clock):
    async def read():
        clock.now()
    asyncio.run(read())
""",
    ],
    ids=["wide loop", "hidden request", "wide fixture", "by hand"],
)
def test_a_clock_on_a_real_loop_says_what_to_write(inner: Inner, source: str) -> None:
    result = inner.run(source)
    result.assert_outcomes(failed=1)
    message = result.stdout.str().replace("\n", " ")
    for part in (
        "ConfigurationError: the event loop under the clock is _UnixSelectorEventLoop; allowed: aiodelay.testing.clock",
        "name the fixture 'clock'",
        "@pytest.mark.asyncio(loop_scope='function')",
        "anyio_backend that returns ('asyncio', {'loop_factory': VirtualLoop})",
        "asyncio.Runner(loop_factory=VirtualLoop)",
    ):
        assert part in message


ANYIO_SUITE = """
pytestmark = pytest.mark.anyio

@pytest.fixture
async def machine(clock):
    assert is_virtual()
    yield asyncio.get_running_loop()
    await clock.advance("1h")

@pytest.fixture
async def answer(clock):
    await clock.advance("1h")
    return 42

async def test_hour(clock, machine, answer):
    assert machine is asyncio.get_running_loop()
    await clock.advance(hours=1)
    assert clock.monotonic_ms() == 2 * 3_600_000
    assert answer == 42

async def test_plain():
    assert not is_virtual()

@pytest.mark.parametrize("n", [1, 2])
async def test_parameters(n, clock, anyio_backend_name, anyio_backend_options):
    await asyncio.sleep(n * 3600)
    assert clock.monotonic_ms() == n * 3_600_000
    assert anyio_backend_name == "asyncio"

def test_not_async(clock):
    clock.move(5)
"""


@pytest.mark.parametrize("has_pytest_asyncio", [True, False])
def test_anyio_needs_no_configuration(inner: Inner, has_pytest_asyncio: bool) -> None:
    result = inner.run(ANYIO_SUITE, "-v", *([] if has_pytest_asyncio else ["-p", "no:asyncio"]))
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines_random(["*::test_hour[[]asyncio] PASSED*", "*::test_plain[[]asyncio] PASSED*"])


@pytest.mark.parametrize("backend", ["'asyncio'", "('asyncio', {'debug': True})"])
def test_an_anyio_backend_of_the_project_keeps_its_options(inner: Inner, backend: str) -> None:
    source = f"""
pytestmark = pytest.mark.anyio

@pytest.fixture(scope="module")
def anyio_backend():
    return {backend}

async def test_virtual(clock, anyio_backend):
    assert is_virtual()
    assert asyncio.get_running_loop().get_debug() == ("debug" in anyio_backend[1])

async def test_plain(anyio_backend):
    assert not is_virtual()
    assert anyio_backend == {backend}
"""
    inner.run(source).assert_outcomes(passed=2)


def test_a_whole_module_of_anyio_can_be_virtual(inner: Inner) -> None:
    source = """
pytestmark = pytest.mark.anyio

@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio", {"loop_factory": VirtualLoop}

@pytest.fixture(scope="module")
async def wide():
    await asyncio.sleep(3600)
    yield

async def test_virtual(clock, wide):
    assert clock.monotonic_ms() == 0
    await clock.advance("1h")

async def test_begins_anew(clock, wide):
    assert clock.monotonic_ms() == 0

async def test_no_clock():
    assert is_virtual()
"""
    inner.run(source).assert_outcomes(passed=3)


def test_one_async_fixture_can_serve_both_plugins(inner: Inner) -> None:
    source = """
async def _machine(clock):
    assert is_virtual()
    yield asyncio.get_running_loop()
    await clock.advance("1h")

machine_of_anyio = pytest.fixture(_machine)

@pytest_asyncio.fixture(loop_scope="function")
async def machine_of_asyncio(clock):
    async for machine in _machine(clock):
        yield machine

@pytest.fixture
def machine(request, clock):
    plugin = "anyio" if "anyio_backend" in request.fixturenames else "asyncio"
    return request.getfixturevalue(f"machine_of_{plugin}")

@pytest.mark.anyio
async def test_anyio(machine):
    assert machine is asyncio.get_running_loop()

@pytest.mark.asyncio
async def test_asyncio(machine):
    assert machine is asyncio.get_running_loop()
"""
    inner.run(source).assert_outcomes(passed=2)


@pytest.mark.parametrize("mark", ["asyncio", "anyio"])
def test_waiting_for_ever_fails_the_test_and_no_other(inner: Inner, mark: str) -> None:
    source = f"""
pytestmark = pytest.mark.{mark}

async def test_stuck(clock):
    await asyncio.Event().wait()

async def test_next(clock):
    await clock.advance("1h")
"""
    result = inner.run(source)
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["*WaitingForeverError: nothing is ready*", "*: *test_stuck (*test_inner.py:*"])


@pytest.mark.parametrize("mark", ["asyncio", "anyio"])
def test_async_fixtures_survive_a_test_that_waits_for_ever(inner: Inner, mark: str) -> None:
    source = f"""
pytestmark = pytest.mark.{mark}
fixture = pytest.fixture if "{mark}" == "anyio" else pytest_asyncio.fixture
ended = []

@fixture
async def machine(clock):
    try:
        yield
    finally:
        await asyncio.sleep(1)
        ended.append("machine")

async def test_stuck(machine):
    await asyncio.Event().wait()

async def test_next(clock):
    assert ended == ["machine"]
    await clock.advance("1h")
"""
    result = inner.run(source)
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["*WaitingForeverError: nothing is ready*"])


def test_it_works_without_any_async_plugin(inner: Inner) -> None:
    source = """
def test_by_hand(clock):
    async def hour():
        await clock.advance("1h")
        return clock.monotonic_ms()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(hour()) == 3_600_000
"""
    result = inner.run(source, "-p", "no:asyncio", "-p", "no:anyio")
    result.assert_outcomes(passed=1)

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
        pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error\n")

    def conftest(self, source: str) -> None:
        self._pytester.makeconftest(source)

    def run(self, source: str, *options: str) -> pytest.RunResult:
        self._pytester.makepyfile(test_inner=BOTH_LOOPS + source)
        plugin = [] if IS_INSTALLED else ["-p", "aiodelay.testing.plugin"]
        return self._pytester.runpytest_inprocess(*plugin, "-p", "no:randomly", "-p", "no:cacheprovider", *options)


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
    assert type(asyncio.get_running_loop()) is type(asyncio.new_event_loop()) or True

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


def test_factories_of_the_project_still_hold_for_its_other_tests(inner: Inner) -> None:
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

@pytest.mark.asyncio(loop_factories=["mine"])
async def test_chosen():
    assert type(asyncio.get_running_loop()).__name__ == "Mine"
"""
    result = inner.run(source, "-v")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(
        ["*::test_virtual PASSED*", "*test_plain[[]mine] PASSED*", "*test_plain[[]normal] PASSED*"]
    )


@pytest.mark.parametrize("factories", ["{}", "{'broken': 1}", "'text'"])
def test_broken_factories_are_still_refused_by_pytest_asyncio(inner: Inner, factories: str) -> None:
    inner.conftest(f"def pytest_asyncio_loop_factories(config, item): return {factories}")
    source = """
@pytest.mark.asyncio
async def test_plain():
    pass
"""
    result = inner.run(source)
    assert "must return a non-empty mapping" in result.stdout.str() + result.stderr.str()


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
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_own_backend(clock):
    clock.now()
""",
        """
def test_by_hand(clock):
    async def read():
        clock.now()
    asyncio.run(read())
""",
    ],
    ids=["wide loop", "hidden request", "own backend", "by hand"],
)
def test_a_clock_on_a_real_loop_says_what_to_write(inner: Inner, source: str) -> None:
    result = inner.run(source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*ConfigurationError: the event loop under the clock is *; allowed: aiodelay.testing.clock.VirtualLoop,"
            " which tests get that name the fixture 'clock' as an argument (pytest-asyncio >= 1.4: mark them"
            " @pytest.mark.asyncio(loop_scope='function'); anyio: give them a fixture anyio_backend that returns"
            " ('asyncio', {'loop_factory': VirtualLoop}); neither: asyncio.Runner(loop_factory=VirtualLoop))"
        ]
    )


def test_anyio_needs_no_configuration(inner: Inner) -> None:
    source = """
pytestmark = pytest.mark.anyio

@pytest.fixture
async def machine(clock):
    assert is_virtual()
    yield asyncio.get_running_loop()
    await clock.advance("1h")

@pytest.fixture(scope="module")
async def wide():
    yield is_virtual()

async def test_hour(clock, machine):
    assert machine is asyncio.get_running_loop()
    await clock.advance(hours=1)
    assert clock.monotonic_ms() == 3_600_000

async def test_plain(wide):
    assert not is_virtual()
    assert not wide

@pytest.mark.parametrize("n", [1, 2])
async def test_parameters(n, clock, wide):
    await asyncio.sleep(n * 3600)
    assert clock.monotonic_ms() == n * 3_600_000
    assert wide

def test_not_async(clock):
    clock.move(5)
"""
    for options in ([], ["-p", "no:asyncio"]):
        code = source if not options else source.replace("import pytest_asyncio", "")
        result = inner.run(code, "-v", *options)
        result.assert_outcomes(passed=5)
        result.stdout.fnmatch_lines_random(["*::test_hour[[]asyncio] PASSED*", "*::test_plain[[]asyncio] PASSED*"])


def test_anyio_backend_may_be_overridden(inner: Inner) -> None:
    source = """
pytestmark = pytest.mark.anyio

@pytest.fixture
def anyio_backend():
    return "asyncio", {"loop_factory": VirtualLoop}

async def test_virtual(clock):
    await clock.advance(hours=1)

async def test_virtual_too():
    assert is_virtual()
"""
    inner.run(source).assert_outcomes(passed=2)


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

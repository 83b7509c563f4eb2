"""One Spark session and one Connect server for all tests of a process, and a separate namespace for each test.

Every fixture that starts Java takes the fixture `java`, and so does every test that starts Java by itself. A test needs
Spark if and only if `java` is among its fixtures (`item.fixturenames`); every other test runs without Spark.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright
from py4j.java_gateway import java_import
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from aiodelay.spark.session import register
from tests.spark.connect import SERVER, Client, port_of
from tests.spark.program import PATIENT, QUICK_QUERIES
from tests.support.chromium import chromium
from tests.support.cli import Ran, ran
from tests.support.servers import RedisServer, redis_products, start

LIGHT_JAVA = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m "
    "-XX:+IgnoreUnrecognizedVMOptions -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)
"""A second compiler and a parallel collector pay after minutes, and most JVMs of these tests live for seconds.

The classes of Spark need no verifier.
"""


ROOT = Path(__file__).parents[2]
PATIENCE = pytest.mark.timeout(600)
"""A timeout in the middle of a call to Java spoils the session for all later tests, so a busy machine has more time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "java" in getattr(item, "fixturenames", ()) and item.get_closest_marker("timeout") is None:
            item.add_marker(PATIENCE)


@pytest.fixture(scope="session")
def java() -> Iterator[None]:
    """Give each JVM that this process starts from now on settings that save processor time.

    PySpark's loggers change the format of every handler that they are given, and pytest gives its own handlers to each
    logger that does not propagate, so later tests would see what they log in PySpark's format.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAVA_TOOL_OPTIONS", LIGHT_JAVA)
        patch.delattr(PySparkLogger, "addHandler")
        yield


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config, java: None) -> Iterator[SparkSession]:
    """A session in this process: two cores, a task may fail twice, nothing outside the test's folders.

    It is a Spark Connect server too, for `connect`, and its JVM runs in a folder of its own. At night it plans and
    compiles queries as Spark does by default; most processes that tests start always do.
    """
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    folder = tmp_path_factory.mktemp("spark")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": f"{folder / 'warehouse'}",
        "spark.local.dir": f"{folder / 'local'}",
        "spark.driver.extraJavaOptions": f"-Dderby.system.home={folder} -Djava.io.tmpdir={folder}",
    }
    if "not nightly" in pytestconfig.option.markexpr:
        settings |= QUICK_QUERIES
    builder = SparkSession.builder.master("local[2,3]").appName("tests")
    for name, value in (settings | PATIENT | SERVER).items():
        builder = builder.config(name, value)
    (folder / "here").mkdir()
    with chdir(folder / "here"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}", prepend=os.pathsep)  # for functions of tests that Spark's workers run
        session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    register(session)
    for name in ("sql.functions", "api.python.PythonUtils"):  # else py4j searches all jars for them, time and again
        java_import(session._jvm, f"org.apache.spark.{name}")
    yield session
    session.stop()


@pytest.fixture
def connect(spark: SparkSession) -> Client:
    """A client of the session's Spark Connect server, in the folder where its JVM runs."""
    jvm: Any = spark._jvm
    return Client(f"sc://localhost:{port_of(spark)}", Path(jvm.System.getProperty("user.dir")))


@pytest.fixture
def job(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run `aiodelay spark` with these arguments in this process, in the session of the other tests."""
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    return partial(ran, "spark")


@pytest.fixture
def namespace() -> str:
    return f"t{uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    server = start(redis_products()[0].program)
    yield server
    server.stop()


@pytest.fixture(params=["redis", pytest.param("sqlite", marks=pytest.mark.nightly)])
def url(request: pytest.FixtureRequest, redis_server: RedisServer, tmp_path: Path) -> str:
    """The URL of a store that jobs can write; on Redis, the server is that of the other tests too."""
    return redis_server.url if request.param == "redis" else f"sqlite:///{tmp_path / 'delay.db'}"


@pytest_asyncio.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        await browser.close()

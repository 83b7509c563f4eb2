from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from aiodelay.testing.servers import NoServerError, redis_programs, redis_servers
from tests.support import kafka as kafka_support

# A loaded machine is slow, which says nothing about the code; and of the same code the same is said each time.
# `--hypothesis-profile=nightly` takes its time, and tries what it has not tried before.
settings.register_profile("ours", deadline=None, derandomize=True)
settings.register_profile("nightly", deadline=None, derandomize=False, max_examples=2000)
settings.load_profile("ours")


def pytest_report_header() -> list[str]:
    try:
        redis = ", ".join(dict.fromkeys(map(str, [*redis_servers(), *redis_programs()])))
    except NoServerError as error:  # what needs one fails at collection
        redis = str(error)
    return [f"redis: {redis}", f"kafka: {kafka_support.choice()}"]


@pytest.fixture(scope="session")
def kafka() -> Iterator[str]:
    """The bootstrap address of a real broker, which lives as long as the test run."""
    broker = kafka_support.find()
    yield broker.bootstrap
    broker.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What tests log may be no UTF-8; what their processes tell each other is."""
    report = yield
    report.sections = [(title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections]
    return report

from collections.abc import Iterator

import pytest
from hypothesis import settings

# A loaded machine is slow, which says nothing about the code. `--hypothesis-profile=nightly` takes its time.
settings.register_profile("ours", deadline=None)
settings.register_profile("nightly", deadline=None, derandomize=False, max_examples=2000)
settings.load_profile("ours")


@pytest.fixture(scope="session")
def kafka() -> Iterator[str]:
    """The bootstrap address of a real broker, which lives as long as the test run."""
    from tests.support.kafka import find  # noqa: PLC0415 - needs the client, which most tests do not

    broker = find()
    yield broker.bootstrap
    broker.stop()

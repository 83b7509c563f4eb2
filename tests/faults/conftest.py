"""Fixtures that the fault tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.scene import RedisScene, Scene
from tests.support import kafka as kafka_support
from tests.support.clear_errors import PASSWORD
from tests.support.processes import Crew
from tests.support.servers import RedisServer, redis_products, redis_programs, start
from tests.support.tls import Certificates


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """One file and its processes; none is left at the end."""
    with Crew(tmp_path) as crew:
        yield Scene(crew, tmp_path)


@pytest.fixture(scope="session")
def broker_certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """The authority by which brokers and clients know each other."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def _brittle_broker(broker_certificates: Certificates) -> Iterator[kafka_support.Broker]:
    """One for all tests of this process.

    It looks often for transactions that nobody has ended in time, and two users may do only what they were granted.
    A third user, `keeper`, may do anything. Tests can search for this user's password.
    """
    users = kafka_support.logins("owner", "producer", certificates=broker_certificates, keeper=PASSWORD)
    broker = kafka_support.started(transaction_abort_timed_out_transaction_cleanup_interval_ms="500", **users)
    yield broker
    broker.stop()


@pytest.fixture
def own_broker(_brittle_broker: kafka_support.Broker) -> Iterator[kafka_support.Broker]:
    """A broker that may be frozen and killed, and where the users `owner` and `producer` need rights.

    Clients that show a certificate of `broker_certificates` at its TLS port need rights as well.
    """
    yield _brittle_broker
    _brittle_broker.recover()


@pytest.fixture(params=redis_programs(), ids=lambda found: found.name)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server that was just started; of every kind found."""
    server = start(request.param.program)
    yield server
    server.stop()


@pytest.fixture(params=redis_products(), ids=lambda found: found.name)
def redis_scene(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RedisScene]:
    """One server and its processes: of each product, since these tests take long."""
    server = start(request.param.program, "--appendfsync", "always", "--repl-diskless-sync-delay", "0")
    with Crew(tmp_path) as crew:
        yield RedisScene(crew, tmp_path, server)
    server.stop()


@pytest.fixture(params=["sqlite", *redis_products()], ids=lambda found: getattr(found, "name", found))
def any_scene(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Scene]:
    """As `scene`, on every store that processes can share."""
    with Crew(tmp_path) as crew:
        if request.param == "sqlite":
            yield Scene(crew, tmp_path)
            return
        server = start(request.param.program, "--appendfsync", "always")
        yield RedisScene(crew, tmp_path, server)
        server.stop()

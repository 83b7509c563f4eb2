"""The rights in docs/kafka.md are sufficient. Each is needed, and the error for a missing right names it."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # which names them all
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from aiodelay import Scheduler
from aiodelay.backends.kafka.client._overrides import connection
from aiodelay.errors import AiodelayError, StoreUnavailableError
from aiodelay.kafka import KafkaStore
from tests.support.kafka import Broker, create_topic, new_name
from tests.support.kafka_rights import grant, revoke
from tests.support.service import Service
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

KINDS = {"Topic": ResourceType.TOPIC, "Group": ResourceType.GROUP, "TransactionalId": ResourceType.TRANSACTIONAL_ID}
OPERATIONS = {
    "Read": AclOperation.READ,
    "Write": AclOperation.WRITE,
    "DescribeConfigs": AclOperation.DESCRIBE_CONFIGS,
}
PAGE = (Path(__file__).parents[2] / "docs" / "kafka.md").read_text().partition("\n## Rights\n")[2]
ROW = re.compile(r"^\| ([a-z ]+) \| (\w+) `([\w.]+)`.*? \| (\w+) \|", re.MULTILINE)
Right = tuple[ResourceType, str, AclOperation]


def rights_of(who: str) -> dict[str, Right]:
    return {
        f"{op} {kind} {name}": (KINDS[kind], name, OPERATIONS[op])
        for by, kind, name, op in ROW.findall(PAGE)
        if by == who
    }


OWNER, PRODUCER = rights_of("dispatches"), rights_of("only schedules")
"""What users of these names, whom `own_broker` knows, need."""


class Rights:
    """What a user may do, of topics whose names end alike."""

    def __init__(self, broker: Broker, admin: AdminClient) -> None:
        self._admin, self._broker, self.names = admin, broker, new_name("")

    async def topics(self) -> None:
        store = KafkaStore(f"kafka://{self._broker.bootstrap}/{self.name('schedules')}?create_topic=true&partitions=2")
        async with store:
            await create_topic(self._broker.bootstrap, self.name("history"))
            await create_topic(self._broker.bootstrap, self.name("target"))

    def name(self, what: str) -> str:
        head, dot, tail = what.partition(".schedules")
        return f"{head}.schedules{self.names}{tail}" if dot else f"{what}{self.names}"

    def url(self, user: str, options: str = "") -> str:
        where = f"{self._broker.login}/{self.name('schedules')}"
        return f"kafka://{user}:{user}@{where}?security=SASL_PLAINTEXT&timeout_ms=20000{options}"

    async def grant(self, user: str, *rights: Right) -> None:
        await asyncio.to_thread(grant, self._admin, *(self._binding(user, *right) for right in rights))

    async def revoke(self, user: str, right: Right) -> None:
        await asyncio.to_thread(revoke, self._admin, self._binding(user, *right))

    def _binding(self, user: str, kind: ResourceType, what: str, operation: AclOperation) -> AclBinding:
        pattern = ResourcePatternType.PREFIXED if what.endswith(".") else ResourcePatternType.LITERAL
        return AclBinding(kind, self.name(what), pattern, f"User:{user}", "*", operation, AclPermissionType.ALLOW)

    async def arrived(self, n: int) -> Counter[bytes]:
        options = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
        bootstrap = self._broker.bootstrap
        async with AIOKafkaConsumer(self.name("target"), bootstrap_servers=bootstrap, **options) as consumer:
            return Counter([(await consumer.getone()).value for _ in range(n)])


@asynccontextmanager
async def rights_on(broker: Broker) -> AsyncIterator[Rights]:
    with AdminClient({"bootstrap.servers": broker.bootstrap}) as admin:
        rights = Rights(broker, admin)
        await rights.topics()
        yield rights


async def test_what_the_page_names_is_enough(own_broker: Broker) -> None:
    async with rights_on(own_broker) as rights:
        await rights.grant("owner", *OWNER.values())
        await rights.grant("producer", *PRODUCER.values())
        target = f"kafka:{rights.name('target')}"
        options = f"&history={rights.name('history')}"
        async with (
            Scheduler(rights.url("owner", options)) as owner,
            Scheduler(rights.url("producer"), dispatch=False) as producer,
        ):
            await producer.schedule(b"cancelled", to=target, delay="1h", id="c")
            await producer.cancel("c")
            await producer.schedule(b"produced", to=target, delay="1ms")
            await owner.schedule(b"owned", to=target, delay="1ms")
            assert await rights.arrived(2) == Counter([b"owned", b"produced"])
            assert await owner.pause("kafka")
            assert await owner.resume("kafka")
            async with asyncio.timeout(60):
                while sum(each.event == "delivered" for each in await owner.journal()) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)


async def test_a_login_in_the_clear_is_told_once_and_each_time_to_other_clients(
    own_broker: Broker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told() -> int:
        return sum("in the clear" in record.getMessage() for record in caplog.records)

    monkeypatch.setattr(connection._logins, "_has_warned", False)
    async with rights_on(own_broker) as rights:
        await rights.grant("producer", *PRODUCER.values())
        for _ in range(2):
            async with Scheduler(rights.url("producer"), dispatch=False):
                assert told() == 1
        login = {"sasl_plain_username": "producer", "sasl_plain_password": "producer"}
        cluster = {"bootstrap_servers": own_broker.login, "security_protocol": "SASL_PLAINTEXT"}
        for n in (2, 3):
            async with AIOKafkaProducer(**cluster, **login):
                assert told() >= n


NEEDED = ["Read Topic schedules", "Write Topic schedules", "Read Group aiodelay.schedules"]
NEEDED += ["Write TransactionalId aiodelay.schedules."]


def said_of(missing: str, rights: Rights) -> str:
    """Return what is said where a right is missing, named as `OWNER` does."""
    operation, kind, name = missing.split()
    beginning = " and all names with this prefix" if name.endswith(".") else ""
    return f"the right {operation} on {kind} {rights.name(name)}{beginning} is missing"


@pytest.mark.parametrize("missing", NEEDED)
async def test_what_is_missing_is_told_once_and_costs_nothing_but_time(
    own_broker: Broker, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with rights_on(own_broker) as rights:
        await rights.grant("owner", *OWNER.values())
        await rights.grant("producer", *PRODUCER.values())
        async with Scheduler(rights.url("producer"), dispatch=False) as producer:
            await producer.schedule(b"m", to=f"kafka:{rights.name('target')}", delay="1ms")
        await rights.revoke("owner", OWNER[missing])
        told = said_of(missing, rights)
        caplog.set_level(logging.DEBUG, "aiodelay.kafka")

        def levels() -> list[str]:
            kafkas = [each for each in caplog.records if each.name == "aiodelay.kafka"]
            return [each.levelname for each in kafkas if "AuthorizationFailed" in each.message or told in each.message]

        owns_nothing = "Group" in missing  # it schedules as others do
        async with Scheduler(rights.url("owner"), store_timeout="60s" if owns_nothing else "2s") as owner:
            await until(lambda: told in owner.status().why, "the status says which right is missing")
            assert owner.status().phase == "loading"
            refused = ""
            try:
                await owner.schedule(b"n", to=f"kafka:{rights.name('target')}", delay="1h")
            except AiodelayError as refusal:
                refused = f"{refusal}"
            await until(lambda: levels().count("DEBUG") > 2, "all that needs the right is tried again")
            await rights.grant("owner", OWNER[missing])
            assert await rights.arrived(1) == Counter([b"m"])
    assert bool(refused) is not owns_nothing
    assert set(levels()) == {"DEBUG", "ERROR"}
    assert levels().count("ERROR") == 1


async def test_the_service_says_that_a_store_is_open_once_it_is(own_broker: Broker, tmp_path: Path) -> None:
    missing = "Read Group aiodelay.schedules"
    async with rights_on(own_broker) as rights:
        await rights.grant("owner", *OWNER.values())
        await rights.revoke("owner", OWNER[missing])
        with Service(tmp_path, f'store = "{rights.url("owner")}"\n') as service:
            await asyncio.to_thread(service.err.wait_for, f"default is not ready: {said_of(missing, rights)}")
            assert "default is open" not in "".join(service.err.seen)
            await rights.grant("owner", OWNER[missing])
            await asyncio.to_thread(service.err.wait_for, "default is open")
            service.send(signal.SIGTERM)
            assert await asyncio.to_thread(service.exit_code) == 0


LOGINS = {
    "wrong password": ("owner:wrong", "SASL_PLAINTEXT", "user or password is refused"),
    "TLS on a plain port": ("owner:owner", "SASL_SSL", "one without TLS, security=SASL_SSL may be wrong"),
    "no login where one is needed": ("", "PLAINTEXT", "security=PLAINTEXT may be wrong"),
    "a mechanism that the broker does not have": ("owner:owner", "SASL_PLAINTEXT&sasl=SCRAM-SHA-256", "sasl= may"),
}


@pytest.mark.parametrize("wrong", LOGINS)
async def test_k29_why_a_host_cannot_be_used_stands_in_the_error(own_broker: Broker, wrong: str) -> None:
    login, security, reason = LOGINS[wrong]
    where = f"{login}@{own_broker.login}" if login else own_broker.login
    store = KafkaStore(f"kafka://{where}/schedules?security={security}&timeout_ms=30000")
    with pytest.raises(StoreUnavailableError) as caught:
        async with store:
            pass
    assert f"{own_broker.login}: " in str(caught.value)
    assert reason in str(caught.value)

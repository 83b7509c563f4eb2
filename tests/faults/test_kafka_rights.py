"""What docs/kafka.md says that a process needs to be allowed is enough, and each part of it is needed and told."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # which names them all
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from aiodelay import Scheduler
from aiodelay.errors import AiodelayError
from aiodelay.kafka import KafkaStore
from tests.support.kafka import Broker, create_topic, new_name
from tests.support.kafka_rights import grant, revoke

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
        return f"kafka://{user}:{user}@{where}?security=SASL_PLAINTEXT&timeout_ms=3000{options}"

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
            async with asyncio.timeout(30):
                while sum(each.event == "delivered" for each in await owner.journal()) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)


TOLD = {
    "Read Topic schedules": ("TopicAuthorizationFailed", "schedules"),
    "Write Topic schedules": ("TopicAuthorizationFailed", "schedules"),
    "Read Group aiodelay.schedules": ("GroupAuthorizationFailed", "aiodelay.schedules"),
    "Write TransactionalId aiodelay.schedules.": ("TransactionalIdAuthorizationFailed", "schedules"),
}


@pytest.mark.parametrize("missing", TOLD)
async def test_what_is_missing_is_told_and_costs_nothing_but_time(
    own_broker: Broker, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with rights_on(own_broker) as rights:
        await rights.grant("owner", *OWNER.values())
        await rights.grant("producer", *PRODUCER.values())
        async with Scheduler(rights.url("producer"), dispatch=False) as producer:
            await producer.schedule(b"m", to=f"kafka:{rights.name('target')}", delay="1ms")
        await rights.revoke("owner", OWNER[missing])
        async with Scheduler(rights.url("owner"), store_timeout="2s") as owner:
            refused = ""
            try:
                await owner.schedule(b"n", to=f"kafka:{rights.name('target')}", delay="1h")
            except AiodelayError as refusal:
                refused = f"{refusal}"
            await rights.grant("owner", OWNER[missing])
            assert await rights.arrived(1) == Counter([b"m"])
    error, name = TOLD[missing]
    assert error in refused + caplog.text
    assert rights.name(name) in refused + caplog.text
    assert bool(refused) is ("Group" not in missing)  # without which it owns nothing, and schedules as others do

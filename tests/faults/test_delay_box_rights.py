"""The rights in docs/delay-box.md are sufficient. Each is needed, and the log names the right that is missing."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # which names them all
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from aiodelay.delay_box import DelayBox
from aiodelay.errors import AiodelayError
from tests.support.boxes import Out, request, send
from tests.support.kafka import Broker, create_topic, new_name
from tests.support.kafka_rights import grant, revoke
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

PAGE = (Path(__file__).parents[2] / "docs" / "delay-box.md").read_text().partition("\n## Rights\n")[2]
ROW = re.compile(r"^\| (Topic|Groups)[^`|]*`([\w.-]+)`[^|]*\| (\w+)", re.MULTILINE)
RIGHTS = [f"{operation} {kind} {name}" for kind, name, operation in ROW.findall(PAGE)]
TOLD = re.compile("is missing|is not authorized for this client")
"""What the log says: aiodelay's own words, or those of aiokafka, which tries to write to a topic for a while."""
OPERATIONS = {"Read": AclOperation.READ, "Write": AclOperation.WRITE}


class Place:
    """The topics of a box, and the rights of its user `owner` to them."""

    def __init__(self, broker: Broker, admin: AdminClient) -> None:
        self.broker, self._admin = broker, admin
        self.intake, self.target = new_name("delays"), new_name("orders")
        self.dead = f"{self.intake}.dead"

    def _binding(self, right: str) -> AclBinding:
        operation, kind, name = right.split()
        topics = {"delays": self.intake, "delays.dead": self.dead, "orders": self.target}
        is_topic = kind == "Topic"
        where = ResourceType.TOPIC if is_topic else ResourceType.GROUP
        pattern = ResourcePatternType.LITERAL if is_topic else ResourcePatternType.PREFIXED
        named = topics[name] if is_topic else name
        return AclBinding(where, named, pattern, "User:owner", "*", OPERATIONS[operation], AclPermissionType.ALLOW)

    async def grant(self, *rights: str) -> None:
        await asyncio.to_thread(grant, self._admin, *map(self._binding, rights))

    async def revoke(self, right: str) -> None:
        await asyncio.to_thread(revoke, self._admin, self._binding(right))

    def box(self, timeout_ms: int = 30_000) -> DelayBox:
        options = f"security=SASL_PLAINTEXT&timeout_ms={timeout_ms}"
        source = f"kafka://owner:owner@{self.broker.login}/{self.intake}?{options}"
        return DelayBox("memory://", source, allow=[self.target])

    async def send(self) -> None:
        """Send a request that is delivered, and one that is refused."""
        requests = [request(self.target, "m", 0), b"no request"]
        await asyncio.to_thread(send, self.broker.bootstrap, self.intake, requests)

    async def both_came_out(self) -> None:
        for topic, value in ((self.target, b"m"), (self.dead, b"no request")):
            out = Out(self.broker.bootstrap, topic)
            await out.until(1)
            assert out.values == [value]
            out.close()


@asynccontextmanager
async def placed(broker: Broker) -> AsyncIterator[Place]:
    with AdminClient({"bootstrap.servers": broker.bootstrap}) as admin:
        place = Place(broker, admin)
        for topic in (place.intake, place.target, place.dead):
            await create_topic(broker.bootstrap, topic)
        await place.grant(*RIGHTS)
        yield place
        for right in RIGHTS:
            await place.revoke(right)


async def test_the_rights_of_the_page_are_enough_for_a_box(own_broker: Broker) -> None:
    assert len(RIGHTS) == 4
    async with placed(own_broker) as place, place.box():
        await place.send()
        await place.both_came_out()


@pytest.mark.nightly  # that they are enough, above; how a missing right is told: test_kafka_rights.py
@pytest.mark.parametrize("missing", RIGHTS)
async def test_each_right_of_a_box_is_needed_and_costs_nothing_but_time(
    own_broker: Broker, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "aiodelay")
    async with placed(own_broker) as place:
        await place.revoke(missing)
        await place.send()

        async def run() -> None:
            while True:
                try:
                    await place.box(timeout_ms=3_000).run()
                except AiodelayError as error:
                    logging.getLogger("aiodelay").warning("the box ended: %s", error)

        running = asyncio.create_task(run())
        await until(lambda: TOLD.search(caplog.text), f"{missing} is told")
        await place.grant(missing)
        await place.both_came_out()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

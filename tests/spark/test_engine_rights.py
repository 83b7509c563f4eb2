"""The engine without all Kafka rights: it reports missing rights at the start, and loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # which names them all
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from pyspark.sql import SparkSession

from aiodelay.errors import StoreUnavailableError
from aiodelay.spark.errors import clear_error
from aiodelay.spark.jobs import engine
from tests.spark.test_engine import PARTITIONS, Topics, ids
from tests.support.kafka import Broker, create_topic, logins, new_name, started
from tests.support.kafka_rights import grant

# At night, since it starts a broker of its own. What a topic refuses: test_engine; rights: faults/test_kafka_rights.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

READER, WRITER = "reader", "writer"
"""Who may write to any topic may ask for a producer's number too: that a user may not is told of one without."""


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    """One that lets users do only what they may."""
    broker = started(**logins(READER, WRITER))
    yield broker
    broker.stop()


class Allowed(Topics):
    """Topics, and what an engine may do with them that logs in as a user."""

    def __init__(self, broker: Broker, user: str) -> None:
        super().__init__(broker.bootstrap)
        self._user = user
        self.url = f"kafka://{user}:{user}@{broker.login}/{self.schedules}?security=SASL_PLAINTEXT&timeout_ms=5000"

    def allow(self, topic: str, *operations: AclOperation) -> None:
        binding = ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, f"User:{self._user}", "*"
        with AdminClient({"bootstrap.servers": self.bootstrap}) as admin:
            grant(admin, *(AclBinding(*binding, each, AclPermissionType.ALLOW) for each in operations))

    def refusal(self, spark: SparkSession, folder: Path) -> str:
        """Start, and return why that failed."""
        with pytest.raises(StoreUnavailableError) as caught:
            engine.start(spark, source=self.url, checkpoint=f"{folder / 'never'}").stop()
        assert f"{self._user}:{self._user}" not in f"{caught.value}"
        return f"{caught.value}"


def test_what_is_not_allowed_is_told_before_spark_begins(spark: SparkSession, broker: Broker, tmp_path: Path) -> None:
    topics = Allowed(broker, READER)
    assert topics.refusal(spark, tmp_path).endswith(f"TopicAuthorizationFailedError: {topics.schedules}")
    topics.allow(topics.schedules, AclOperation.DESCRIBE)
    assert topics.refusal(spark, tmp_path).endswith(f"TopicAuthorizationFailedError: {topics.schedules}")
    topics.allow(topics.schedules, AclOperation.READ)
    assert topics.refusal(spark, tmp_path).endswith(f"TopicAuthorizationFailedError: {topics.dead}")
    asyncio.run(create_topic(topics.bootstrap, topics.dead, PARTITIONS))
    topics.allow(topics.dead, AclOperation.DESCRIBE)
    assert topics.refusal(spark, tmp_path).endswith("ClusterAuthorizationFailedError"), "it may write nothing"


def test_a_topic_that_may_not_be_written_costs_no_other_message_and_none_is_lost(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    topics = Allowed(broker, WRITER)
    hidden, closed = (asyncio.run(create_topic(broker.bootstrap, new_name())) for _ in range(2))
    asyncio.run(create_topic(broker.bootstrap, topics.dead, PARTITIONS))
    topics.allow(topics.schedules, AclOperation.READ)
    topics.allow(topics.out, AclOperation.WRITE)
    for topic in (topics.dead, closed):
        topics.allow(topic, AclOperation.DESCRIBE)
    topics.send(topics.put("a", 0), topics.put("b", 0, to=hidden), topics.put("c", 0, to=closed))
    given: dict[str, Any] = {
        "source": topics.url,
        "checkpoint": f"{tmp_path / 'checkpoint'}",
        "shards": 1,
        "timeout": "1s",
    }
    with pytest.raises(Exception, match="unavailable") as caught:
        engine.start(spark, **given).awaitTermination()
    assert f"{clear_error(caught.value)}".endswith(f"TopicAuthorizationFailedError: {topics.dead}")
    topics.allow(topics.dead, AclOperation.WRITE)
    query = engine.start(spark, **given)
    try:
        dead = topics.read(topics.dead, 2, is_going=lambda: bool(query.isActive))
    finally:
        query.stop()
    reasons = {dict(each.headers)["scheduler-key"]: dict(each.headers)["aiodelay-dead-reason"] for each in dead}
    assert reasons == {
        key: f"{topic}: [Error 29] TopicAuthorizationFailedError: {topic}".encode()
        for key, topic in ((b"b", hidden), (b"c", closed))
    }
    assert {*ids(topics.read(topics.out, 1))} == {"a"}

"""The check of a schedules topic at start: every row, all problems at once, each with the command to fix it."""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from aiokafka.errors import UnknownTopicOrPartitionError

from aiodelay.backends.kafka.client.options import Cluster, read_cluster
from aiodelay.backends.kafka.topics import topic as topics
from aiodelay.backends.kafka.topics.topic import SETTINGS, Topic, check, prepare, problems
from aiodelay.core.urls import UrlOptions
from aiodelay.errors import StoreMismatchError, StoreUnavailableError
from tests.support.kafka import create_topic, new_name, started
from tests.support.topics import set_config

GOOD = Topic("schedules", 6, 3, {**SETTINGS, "min.insync.replicas": "2"})

FATAL = {
    "cleanup.policy": ["delete", "compact,delete"],
    "min.compaction.lag.ms": ["0", "599999"],
    "delete.retention.ms": ["599999"],
    "unclean.leader.election.enable": ["true"],
}
UNWISE = {
    "min.compaction.lag.ms": ["600000", "21599999"],
    "max.compaction.lag.ms": ["9223372036854775807"],
    "delete.retention.ms": ["600000", "86400000"],
    "segment.ms": ["604800001"],
    "segment.bytes": ["1073741825"],
    "min.cleanable.dirty.ratio": ["0.6"],
    "message.timestamp.type": ["CreateTime"],
    "max.message.bytes": ["100000"],
    "min.insync.replicas": ["1"],
}


def rows(table: dict[str, list[str]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}={value}") for name, values in table.items() for value in values]


@pytest.fixture
def flapping() -> Iterator[str]:
    """A cluster that loses count of its only broker again and again: its heartbeats come too late."""
    broker = started(broker_session_timeout_ms="1500", broker_heartbeat_interval_ms="3000")
    yield broker.bootstrap
    broker.stop()


def cluster(bootstrap: str) -> Cluster:
    return read_cluster(UrlOptions(f"kafka://{bootstrap}"))


def changed(**settings: str) -> Topic:
    return GOOD._replace(
        settings={**GOOD.settings, **{name.replace("_", "."): text for name, text in settings.items()}}
    )


def test_what_topics_are_created_with_has_no_problem() -> None:
    assert problems(GOOD) == []


@pytest.mark.parametrize(("name", "value"), rows(FATAL))
def test_what_may_lose_messages_is_refused_with_the_command_that_mends_it(name: str, value: str) -> None:
    with pytest.raises(StoreMismatchError) as caught:
        check(changed(**{name: value}), cluster("host:9092"))
    assert f"{name} is {value}, should be" in str(caught.value)
    assert f"--entity-name schedules --alter --add-config {name}={SETTINGS[name]}" in str(caught.value)


@pytest.mark.parametrize(("name", "value"), rows(UNWISE))
def test_what_is_unwise_is_logged_once(name: str, value: str, caplog: pytest.LogCaptureFixture) -> None:
    check(changed(**{name: value}), cluster("host:9092"))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{name} is {value}, should be" in record.message


def test_too_few_replicas_are_unwise(caplog: pytest.LogCaptureFixture) -> None:
    check(GOOD._replace(replicas=1), cluster("host:9092"))
    assert "replication factor is 1, should be 3" in caplog.text


def test_all_problems_are_named_at_once() -> None:
    topic = changed(cleanup_policy="delete", min_compaction_lag_ms="0", segment_ms="9999999999")
    with pytest.raises(StoreMismatchError) as caught:
        check(topic, cluster("host:9092"))
    for name in ("cleanup.policy", "min.compaction.lag.ms", "segment.ms"):
        assert f"{name} is" in str(caught.value)
        assert f"{name}={SETTINGS[name]}" in str(caught.value)


def test_settings_that_may_not_be_read_are_said_to_be_unchecked(caplog: pytest.LogCaptureFixture) -> None:
    check(GOOD._replace(settings={}), cluster("host:9092"))
    assert "may not read its settings (DescribeConfigs)" in caplog.text
    grant = "--allow-principal User:ANONYMOUS --operation DescribeConfigs --topic schedules"
    assert f"To fix it: kafka-acls.sh --bootstrap-server host:9092 --add {grant}" in caplog.text


# --- on a broker ------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_topic_as_kafka_makes_it_is_refused_and_the_command_mends_it(kafka: str) -> None:
    name = await create_topic(kafka, new_name())
    with pytest.raises(StoreMismatchError) as caught:
        await prepare(cluster(kafka), [name], create=False, partitions=1)
    assert "cleanup.policy is delete, should be compact" in str(caught.value)
    await asyncio.to_thread(carry_out, kafka, str(caught.value).partition("changed by this command: ")[2])
    (found,) = await prepare(cluster(kafka), [name], create=False, partitions=1)
    assert [problem.setting for problem in problems(found)] == ["replication.factor"]


def carry_out(bootstrap: str, command: str) -> None:
    """Do what kafka-configs.sh does, and wait until the broker applies it."""
    words = shlex.split(command)
    name, settings = words[words.index("--entity-name") + 1], words[words.index("--add-config") + 1]
    pairs = (each.split("=", 1) for each in settings.split(","))
    set_config(bootstrap, name, **{setting.replace(".", "_"): value for setting, value in pairs})


@pytest.mark.asyncio
async def test_a_missing_topic_is_refused_and_created_if_told_to(kafka: str) -> None:
    name = new_name()
    with pytest.raises(StoreMismatchError, match=f"topic {name} is missing; .*create_topic=true, or: kafka-topics.sh"):
        await prepare(cluster(kafka), [name], create=False, partitions=4)
    (created,) = await prepare(cluster(kafka), [name], create=True, partitions=4)
    assert (created.name, created.partitions) == (name, 4)
    assert SETTINGS.items() <= created.settings.items()
    assert await prepare(cluster(kafka), [name], create=True, partitions=9) == [created]


@pytest.mark.asyncio
async def test_f22_without_a_broker_the_check_ends_with_a_clear_error() -> None:
    with pytest.raises(StoreUnavailableError, match=r"kafka://127\.0\.0\.1:1 is unavailable"):
        await prepare(cluster("127.0.0.1:1"), ["schedules"], create=False, partitions=1)


@pytest.mark.asyncio
async def test_f22_while_the_cluster_counts_no_broker_topics_are_created_later(flapping: str) -> None:
    for _ in range(8):
        await asyncio.sleep(0.5)  # the cluster counts its broker, or does not, for half a second and more
        patient = cluster(f"{flapping}?timeout_ms=60000")
        (created,) = await prepare(patient, [new_name()], create=True, partitions=1)
        assert created.replicas == 1


def test_every_setting_that_is_checked_can_be_mended() -> None:
    assert topics._RULES.keys() == SETTINGS.keys()


@pytest.mark.asyncio
async def test_a_broker_that_has_not_heard_of_a_topic_yet_is_asked_again(
    kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = topics._settings, []

    async def settings(admin: Any, name: str) -> Any:  # noqa: ANN401 - aiokafka's
        asked.append(name)
        if len(asked) == 1:  # as a second broker answers at times, just after the topic was made
            raise UnknownTopicOrPartitionError(name)
        return await real(admin, name)

    monkeypatch.setattr(topics, "_settings", settings)
    name = new_name()
    (found,) = await prepare(cluster(kafka), [name], create=True, partitions=1)
    assert (asked, found.settings["cleanup.policy"]) == ([name] * 2, "compact")

"""Functions that check, create and describe topics. A schedules topic's settings must not let Kafka lose messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from aiokafka.admin import NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    InvalidReplicationFactorError,
    KafkaError,
    NodeNotReadyError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    for_code,
)

from aiodelay.backends.kafka.client import (
    MAY_NOT_CREATE,
    NO_TOPIC_IDS,
    Admin,
    admin_of,
    missing_right,
    reason_of,
    rights_on,
)
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.remedies import with_remedy
from aiodelay.errors import StoreMismatchError, StoreUnavailableError

from .remedies import grant, remedied

__all__ = [
    "LEAST_LAG_MS",
    "RECORD_BYTES",
    "SETTINGS",
    "Problem",
    "Topic",
    "check",
    "history_partitions",
    "missing_rights",
    "prepare",
    "prepare_dead",
    "prepare_intake",
    "problems",
    "repair_command",
    "schedules_partitions",
]

log: logging.Logger = logging.getLogger("aiodelay.kafka")
_Found = TypeVar("_Found")

_HOUR_MS, _DAY_MS = 3_600_000, 86_400_000
LEAST_LAG_MS = 600_000
_LEAST_RETENTION_MS = 3 * _DAY_MS
RECORD_BYTES = 65_536
"""The most bytes that a record needs beside payload, key and headers."""
_LEAST_MESSAGE = 262_144 + RECORD_BYTES
_FOREVER = 9_223_372_036_854_775_807
_MISSING, _EXISTS, _FORBIDDEN = 3, 36, 29

SETTINGS = {
    "cleanup.policy": "compact",
    "min.compaction.lag.ms": str(_DAY_MS),
    "max.compaction.lag.ms": str(7 * _DAY_MS),
    "delete.retention.ms": str(7 * _DAY_MS),
    "segment.ms": str(_DAY_MS),
    "segment.bytes": str(256 << 20),
    "min.cleanable.dirty.ratio": "0.3",
    "message.timestamp.type": "LogAppendTime",
    "unclean.leader.election.enable": "false",
    "max.message.bytes": str(2 << 20),
}
"""The settings with which a schedules topic is created, and which a repair command sets."""


class Topic(NamedTuple):
    """A topic as the cluster describes it; `settings` is empty if this process may not read them."""

    name: str
    partitions: int
    replicas: int
    settings: Mapping[str, str]


class Problem(NamedTuple):
    """A problem with the settings of a topic.

    Attributes:
        setting: The name of the setting.
        text: The value of the setting, and the value that it should have.
        is_fatal: Whether messages may be lost because of this value. Other problems cost time or space, or are unwise.
        repair: The value that a command can set; "" if no command can repair it.
    """

    setting: str
    text: str
    is_fatal: bool
    repair: str


def problems(topic: Topic) -> list[Problem]:
    """Return all problems with a topic."""
    found = [
        _judge(name, value, rule) for name, rule in _RULES.items() if (value := topic.settings.get(name)) is not None
    ]
    if topic.replicas < 3:
        text = f"replication factor is {topic.replicas}, should be 3: if a broker is lost, its schedules may be lost"
        found.append(Problem("replication.factor", text, is_fatal=False, repair=""))
    elif int(topic.settings.get("min.insync.replicas", "2")) < 2:
        text = f"min.insync.replicas is {topic.settings['min.insync.replicas']}, should be 2"
        found.append(Problem("min.insync.replicas", text, is_fatal=False, repair="2"))
    return [problem for problem in found if problem is not None]


class _Rule(NamedTuple):
    """The rule for a setting.

    Attributes:
        good: Returns whether a value is good.
        bearable: Returns whether a value is not fatal, although it is not good.
        should_be: The value that the setting should have, with the reason.
    """

    good: Any
    bearable: Any
    should_be: str


HISTORY_SETTINGS = {"cleanup.policy": "delete", "retention.ms": str(7 * _DAY_MS)}
"""The settings with which a history topic is created."""


def _at_least(n: int) -> Any:  # noqa: ANN401 - a predicate of text
    return lambda value: int(value) >= n


def _at_most(n: float) -> Any:  # noqa: ANN401 - a predicate of text
    return lambda value: float(value) <= n


def _is(text: str) -> Any:  # noqa: ANN401 - a predicate of text
    return lambda value: value == text


def _always(_: str) -> bool:
    return True


_RULES: dict[str, _Rule] = {
    "cleanup.policy": _Rule(_is("compact"), _is("compact"), "compact: anything else deletes schedules by age"),
    "min.compaction.lag.ms": _Rule(
        _at_least(6 * _HOUR_MS),
        _at_least(LEAST_LAG_MS),
        "at least 21600000 (6 h): within this time, a change that raced with a delivery is written again",
    ),
    "max.compaction.lag.ms": _Rule(
        _at_most(_FOREVER / 2), _always, "about 604800000 (7 d): else quiet partitions grow"
    ),
    "delete.retention.ms": _Rule(
        _at_least(_LEAST_RETENTION_MS), _at_least(LEAST_LAG_MS), "at least 259200000 (3 d): a reader may take this long"
    ),
    "segment.ms": _Rule(_at_most(7 * _DAY_MS), _always, "at most 604800000 (7 d): the newest segment is never cleaned"),
    "segment.bytes": _Rule(_at_most(1 << 30), _always, "at most 1073741824: the newest segment is never cleaned"),
    "min.cleanable.dirty.ratio": _Rule(_at_most(0.5), _always, "at most 0.5: more has to be read at every start"),
    "message.timestamp.type": _Rule(
        _is("LogAppendTime"), _always, "LogAppendTime: else producers choose when their records may be cleaned"
    ),
    "unclean.leader.election.enable": _Rule(_is("false"), _is("false"), "false: else schedules may be lost"),
    "max.message.bytes": _Rule(
        _at_least(_LEAST_MESSAGE), _always, f"at least {_LEAST_MESSAGE}: larger messages are refused"
    ),
}


def _judge(name: str, value: str, rule: _Rule) -> Problem | None:
    if rule.good(value):
        return None
    return Problem(name, f"{name} is {value}, should be {rule.should_be}", not rule.bearable(value), SETTINGS[name])


def repair_command(topic: str, bootstrap: str, found: Sequence[Problem]) -> str:
    """Return the command that sets all settings that a command can repair; "" if there are none."""
    settings = ",".join(f"{problem.setting}={problem.repair}" for problem in found if problem.repair)
    if not settings:
        return ""
    where = f"--bootstrap-server {bootstrap} --entity-type topics --entity-name {topic}"
    return f"kafka-configs.sh {where} --alter --add-config {settings}"


def check(topic: Topic, cluster: Cluster) -> None:
    """Refuse a topic that may lose messages. Log other problems once.

    Raises:
        StoreMismatchError: The topic may lose messages. The error names all problems, and the command to repair them.
    """
    found = problems(topic)
    if not topic.settings:
        problem = "this user may not read its settings (DescribeConfigs), so they were not checked"
        log.warning(
            "topic %s: %s", topic.name, with_remedy(problem, grant(cluster, "DescribeConfigs", "Topic", topic.name))
        )
    if any(problem.is_fatal for problem in found):
        texts = "; ".join(problem.text for problem in sorted(found, key=lambda problem: not problem.is_fatal))
        command = repair_command(topic.name, cluster.bootstrap, found)
        raise StoreMismatchError(
            f"topic {topic.name}", f"not safe for schedules: {texts}", f"this topic, changed by this command: {command}"
        )
    if found:
        texts = "; ".join(problem.text for problem in found)
        command = repair_command(topic.name, cluster.bootstrap, found)
        log.warning("topic %s: %s", topic.name, with_remedy(texts, command) if command else texts)


async def prepare(
    cluster: Cluster, names: Sequence[str], *, create: bool, partitions: int, history: str = ""
) -> list[Topic]:
    """Check schedules topics and a history topic. If `create` is set, create missing topics first.

    Return the schedules topics.

    Raises:
        StoreUnavailableError: The cluster does not answer.
        StoreMismatchError: A topic is missing, a schedules topic may lose messages, or the history topic is compacted.
    """

    async def ask(admin: Admin) -> tuple[list[Topic], list[Topic]]:
        if create:
            await _create(admin, names, partitions, SETTINGS)
        topics = [await _described(admin, name, cluster, SETTINGS, is_created=create) for name in names]
        if history and create:
            await _create(admin, [history], partitions, HISTORY_SETTINGS)
        kept = [await _described(admin, history, cluster, HISTORY_SETTINGS, is_created=create)] if history else []
        return topics, kept

    topics, kept = await _by_admin(cluster, ask, "Write")
    for topic in topics:
        check(topic, cluster)
    for topic in kept:
        if "compact" in topic.settings.get("cleanup.policy", ""):
            command = repair_command(topic.name, cluster.bootstrap, [_COMPACTED])
            raise StoreMismatchError(
                f"topic {history}",
                f"not fit for a history: {_COMPACTED.text}",
                f"this topic, changed by this command: {command}",
            )
    return topics


async def history_partitions(cluster: Cluster, name: str) -> int:
    """Return the number of partitions of a history topic.

    Raises:
        StoreUnavailableError: The cluster does not answer.
        StoreMismatchError: The topic is missing.
    """

    async def ask(admin: Admin) -> Topic:
        return await _described(admin, name, cluster, HISTORY_SETTINGS, is_created=False)

    return (await _by_admin(cluster, ask, "Read")).partitions


async def schedules_partitions(cluster: Cluster, names: Sequence[str]) -> dict[str, int]:
    """Return the number of partitions of each schedules topic.

    Raises:
        StoreUnavailableError: The cluster does not answer.
        StoreMismatchError: A topic is missing.
    """

    async def ask(admin: Admin) -> list[Topic]:
        return [await _described(admin, name, cluster, SETTINGS, is_created=False) for name in names]

    return {topic.name: topic.partitions for topic in await _by_admin(cluster, ask, "Read")}


async def missing_rights(cluster: Cluster, names: Sequence[str], operations: Sequence[str]) -> list[str]:
    """Return the rights to these operations that this user lacks on topics, in the words of `missing_right`.

    Raises:
        StoreUnavailableError: The cluster does not answer.
    """

    async def ask(admin: Admin) -> dict[str, Collection[str]]:
        return {name: await _rights(admin, name) for name in names}

    allowed = await _by_admin(cluster, ask)
    lacking = {operation: [name for name in names if operation not in allowed[name]] for operation in operations}
    return [missing_right(operation, "Topic", topics) for operation, topics in lacking.items() if topics]


async def _rights(admin: Admin, name: str) -> Collection[str]:
    try:
        return await rights_on(admin.client, name)
    except TopicAuthorizationFailedError:
        return ()
    except NO_TOPIC_IDS:
        return ("Read", "Write")  # brokers before topic ids do not report rights


async def prepare_intake(
    cluster: Cluster, dead_topics: Mapping[str, str], *, create: bool, partitions: int
) -> list[Topic]:
    """Return the topics of an intake. Create missing dead topics. Create other missing topics if `create` is set.

    Args:
        cluster: The cluster of the topics.
        dead_topics: Maps each topic of the intake to its dead topic.
        create: Whether to create missing topics of the intake too, not only missing dead topics.
        partitions: The number of partitions of a topic that is created.

    Raises:
        StoreUnavailableError: The cluster does not answer, or a topic may not be created.
        StoreMismatchError: A topic is missing.
    """

    async def ask(admin: Admin) -> list[Topic]:
        known = {each["topic"] for each in await admin.describe_topics() if not each["error_code"]}
        if create:
            await _create(admin, [topic for topic in dead_topics if topic not in known], partitions, {})
        topics = [await _described(admin, topic, cluster, {}, is_created=create) for topic in dead_topics]
        for topic in topics:
            if dead_topics[topic.name] not in known:
                await _create(admin, [dead_topics[topic.name]], topic.partitions, DEAD_SETTINGS)
        for dead in set(dead_topics.values()):
            await _described(admin, dead, cluster, DEAD_SETTINGS, is_created=True)
        return topics

    return await _by_admin(cluster, ask)


async def prepare_dead(cluster: Cluster, name: str, *, partitions: int) -> None:
    """Create a topic for dead letters, if it is missing.

    Raises:
        StoreUnavailableError: The cluster does not answer, or the topic may not be created.
    """

    async def ask(admin: Admin) -> None:
        if name not in {each["topic"] for each in await admin.describe_topics() if not each["error_code"]}:
            await _create(admin, [name], partitions, DEAD_SETTINGS)
        await _described(admin, name, cluster, DEAD_SETTINGS, is_created=True)

    await _by_admin(cluster, ask)


async def _by_admin(cluster: Cluster, ask: Callable[[Admin], Awaitable[_Found]], operation: str = "Describe") -> _Found:
    """Connect an administrator's client, call `ask` with the client, and return the result of `ask`.

    If `ask` fails because brokers do not agree yet, it is called again. The controller does not count a broker that has
    just started, or was silent for a while, until the broker's next heartbeat. And one broker may know a topic that
    another broker does not know yet.

    Args:
        cluster: The cluster to ask.
        ask: Asks questions and gives commands. It may be called more than once.
        operation: The right that the error names if this user may not see a topic. To see a topic
            takes Describe. Read and Write include Describe, so a caller that needs one of them names that right.
    """
    try:
        async with asyncio.timeout(cluster.timeout_ms / 1000):
            while True:
                admin = admin_of(cluster)
                try:
                    await admin.start()
                    return await _retried(admin, ask)
                except NodeNotReadyError:
                    await asyncio.sleep(0.1)
                finally:
                    await admin.close()
    except (KafkaError, TimeoutError, OSError) as error:
        reason = remedied(reason_of(error, operation), cluster, whole=str(error))
        raise StoreUnavailableError(cluster.name, reason) from error


async def _retried(admin: Admin, ask: Callable[[Admin], Awaitable[_Found]]) -> _Found:
    """Call `ask` until brokers agree, and return its result.

    The same client asks again, because a new client may first wait for a host that does not answer.
    """
    while True:
        try:
            return await ask(admin)
        except (InvalidReplicationFactorError, UnknownTopicOrPartitionError):
            await asyncio.sleep(0.1)


DEAD_SETTINGS = {"cleanup.policy": "delete", "retention.ms": str(30 * _DAY_MS), "max.message.bytes": str(2 << 20)}
"""The settings with which a delay box's dead topic is created."""

_COMPACTED = Problem(
    "cleanup.policy",
    "cleanup.policy is compact: only the last entry of each id is kept",
    is_fatal=True,
    repair="delete",
)


async def _create(
    admin: Admin,
    names: Sequence[str],
    partitions: int,
    settings: Mapping[str, str],
) -> None:
    if not names:
        return
    brokers = (await admin.describe_cluster())["brokers"]
    if not brokers:
        raise NodeNotReadyError("the cluster names no broker")
    replicas = min(3, len(brokers))
    settings = {**settings, "min.insync.replicas": str(min(2, replicas))}
    topics = [NewTopic(name, partitions, replicas, topic_configs=settings) for name in names]
    try:
        answer = await admin.create_topics(topics)
    except AttributeError as error:  # aiokafka raises this error if the first broker it asks names no controller
        raise NodeNotReadyError("the cluster names no controller") from error
    for name, code, *_ in answer.topic_errors:
        if code == _FORBIDDEN:
            raise MAY_NOT_CREATE(name)
        if code not in (0, _EXISTS):
            raise for_code(code)(name)


async def _described(
    admin: Admin,
    name: str,
    cluster: Cluster,
    wanted: Mapping[str, str],
    *,
    is_created: bool,
) -> Topic:
    (found,) = await admin.describe_topics([name])
    if found["error_code"] == _MISSING and not is_created:
        settings = " ".join(f"--config {key}={value}" for key, value in wanted.items())
        command = f"kafka-topics.sh --bootstrap-server {cluster.bootstrap} --create --topic {name} --partitions 6"
        allowed = f"an existing topic, ?create_topic=true, or: {command} --replication-factor 3 {settings}"
        raise StoreMismatchError(f"topic {name}", "missing", allowed)
    if found["error_code"]:
        raise for_code(found["error_code"])(name)
    partitions = found["partitions"]
    replicas = min(len(each["replicas"]) for each in partitions)
    return Topic(name, len(partitions), replicas, await _settings(admin, name))


async def _settings(admin: Admin, name: str) -> Mapping[str, str]:
    (answer,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name)])
    ((code, _, _, _, entries),) = answer.resources
    if code == _FORBIDDEN:
        return {}
    if code:
        raise for_code(code)(name)
    return {entry[0]: entry[1] for entry in entries}

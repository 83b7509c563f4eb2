"""`aiodelay check` on a broker with logins, rights and TLS: it says why the store cannot be used, and the remedy."""

from __future__ import annotations

import asyncio
import shlex
import socket
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

from aiodelay import StoreUnavailableError
from aiodelay.kafka import KafkaStore
from tests.faults.test_kafka_rights import OWNER, PRODUCER, Rights, rights_on
from tests.support.cli import Cli, Ran
from tests.support.kafka import Broker, create_topic, new_name
from tests.support.kafka_rights import grant
from tests.support.leftovers import open_files
from tests.support.tls import Certificates

WRONG = {
    "wrong password": (
        "owner:hunter2@{login}/x?security=SASL_PLAINTEXT",
        "user or password is refused",
        "put the broker's user and password into the URL",
    ),
    "no login where one is needed": (
        "{login}/x",
        "it may want a login",
        "put user and password into the URL, with security=SASL_PLAINTEXT",
    ),
    "a login where none is taken": (
        "owner:hunter2@{plain}/x?security=SASL_PLAINTEXT",
        "takes no login at this port",
        "use security=PLAINTEXT without user and password",
    ),
    "a login over TLS where none is taken": (
        "owner:hunter2@{tls}/x?ca_certs={ca}&client_cert={client}&client_key={client_key}",
        "takes no login at this port",
        "use security=SSL without user and password",
    ),
    "another mechanism": (
        "owner:hunter2@{login}/x?security=SASL_PLAINTEXT&sasl=SCRAM-SHA-256",
        "sasl= may be wrong",
        "use sasl=PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512",
    ),
    "TLS at a plain port": (
        "{plain}/x?security=SSL",
        "the port may be one without TLS",
        "use security=PLAINTEXT, or the port for TLS",
    ),
    "TLS at a plain port for logins": (
        "owner:hunter2@{login}/x",
        "the port may be one without TLS",
        "use security=SASL_PLAINTEXT, or the port for TLS",
    ),
    "a plain client at a port for TLS": (
        "{tls}/x",
        "the port may be one for TLS",
        "use security=SSL, or the port without TLS",
    ),
    "a plain login at a port for TLS": (
        "owner:hunter2@{tls}/x?security=SASL_PLAINTEXT",
        "the port may be one for TLS",
        "use security=SASL_SSL, or the port without TLS",
    ),
    "an unknown authority": (
        "{tls}/x?security=SSL",
        "the broker's certificate is refused",
        "put ca_certs=<file of its authority>",
    ),
    "the certificate of another host": (
        "localhost:{tls_port}/x?security=SSL&ca_certs={ca}",
        "certificate is not valid for 'localhost'",
        "put ca_certs=<file of its authority> into the URL, with the host that the certificate names",
    ),
    "no certificate of the client": (
        "{tls}/x?security=SSL&ca_certs={ca}",
        "client_cert= may be missing",
        "put client_cert=<file> and client_key=<file>",
    ),
    "a port where nothing listens": (
        "127.0.0.1:1/x",
        "nothing answers at this address",
        "start the broker, or correct host and port",
    ),
    "a port that is silent": (
        "{silent}/x?timeout_ms=500",
        "nothing answers at this address",
        "start the broker, or correct host and port",
    ),
    "an unknown host": ("nowhere.invalid/x", "the host name is unknown", "correct the host in the URL"),
    "several hosts with long names": (
        f"{'a' * 60}.invalid,{{login}},{'b' * 60}.invalid/x",
        "is unavailable",
        "put user and password into the URL, with security=SASL_PLAINTEXT",
    ),
    "no topic": ("{plain}/x", "it is missing", "an existing topic, ?create_topic=true, or: kafka-topics.sh"),
    "no history": (
        "{plain}/{topic}?history=x",
        "it is missing",
        "an existing topic, ?create_topic=true, or: kafka-topics.sh",
    ),
}


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def problem_of(ran: Ran) -> dict[str, Any]:
    """Return the only problem that was found."""
    (problem,) = (each for each in ran.objects if each["level"] == "problem")
    return problem


@pytest.mark.parametrize("wrong", WRONG)
def test_why_a_kafka_cannot_be_used_and_how_to_mend_it(
    own_broker: Broker, broker_certificates: Certificates, silent: str, tmp_path: Path, wrong: str
) -> None:
    (url, why, mend), given = WRONG[wrong], broker_certificates
    places = {"plain": own_broker.bootstrap, "login": own_broker.login, "tls": own_broker.tls, "silent": silent}
    files = {"ca": given.ca, "client": given.client, "client_key": given.client_key}
    topic = asyncio.run(create_topic(own_broker.bootstrap, new_name(), cleanup_policy="compact"))
    url = url.format(**places, **files, tls_port=own_broker.tls.partition(":")[2], topic=topic)
    ran = Cli("", tmp_path)("check", f"kafka://{url}", "--json")
    problem = problem_of(ran)
    assert ran.code == (1 if wrong in ("no topic", "no history") else 5), ran
    assert why in problem["text"], problem
    assert problem["mend"].startswith(mend), problem
    assert "hunter2" not in ran.out + ran.err


def test_k20_a_login_that_is_refused_over_tls_leaves_no_connection_open(
    own_broker: Broker, broker_certificates: Certificates
) -> None:
    files = f"client_cert={broker_certificates.client}&client_key={broker_certificates.client_key}"
    url = f"kafka://owner:owner@{own_broker.tls}/x?ca_certs={broker_certificates.ca}&{files}"

    async def play() -> None:
        before = open_files()
        with pytest.raises(StoreUnavailableError):
            async with KafkaStore(url):
                pass
        assert open_files() <= before

    asyncio.run(play())


# --- rights -----------------------------------------------------------------------------------------------

FLAGS = {
    "--topic": ResourceType.TOPIC,
    "--group": ResourceType.GROUP,
    "--transactional-id": ResourceType.TRANSACTIONAL_ID,
}


def carry_out(admin: AdminClient, command: str) -> None:
    """Do what kafka-acls.sh does."""
    program, *words = shlex.split(command)
    assert program == "kafka-acls.sh"
    assert words[2:4] == ["--add", "--allow-principal"]
    operation = AclOperation[words[words.index("--operation") + 1].upper().replace("DESCRIBEC", "DESCRIBE_C")]
    (flag,) = FLAGS.keys() & {*words}
    is_prefix = "--resource-pattern-type prefixed" in command
    pattern = ResourcePatternType.PREFIXED if is_prefix else ResourcePatternType.LITERAL
    name, allow = words[words.index(flag) + 1], AclPermissionType.ALLOW
    grant(admin, AclBinding(FLAGS[flag], name, pattern, words[4], "*", operation, allow))


def mended(broker: Broker, url: str, *options: str, folder: Path) -> list[str]:
    """Check a store and carry out each remedy until nothing is missing; return what was found, in order."""
    found: list[str] = []
    with AdminClient({"bootstrap.servers": broker.bootstrap}) as admin:
        while True:
            ran = Cli("", folder)("check", url, *options, "--json")
            wrong = [each for each in ran.objects if each["mend"].startswith("kafka-acls.sh")]
            if not wrong:
                break
            texts = [each["text"].partition("unavailable: ")[2] or each["text"] for each in wrong]
            assert not {*texts} & {*found}, "its remedy did not help"
            found += texts
            for command in (command for each in wrong for command in each["mend"].split("; ")):
                carry_out(admin, command)
    assert (ran.code, ran.objects[0]["text"]) == (0, "it answers, and messages can be stored there")
    return found


def said_of(rights: Rights, what: str) -> str:
    operation, kind, name = what.split()
    beginning = " and all names with this prefix" if name.endswith(".") else ""
    return f"the right {operation} on {kind} {rights.name(name)}{beginning} is missing"


UNCHECKED = "topic {}: this user may not read its settings (DescribeConfigs), so they were not checked"


@pytest.mark.parametrize("who", ["owner", "producer"])
def test_each_right_that_is_missing_is_named_and_granted_by_its_remedy(
    own_broker: Broker, tmp_path: Path, who: str
) -> None:
    async def play() -> None:
        async with rights_on(own_broker) as rights:
            own = ["--own"] if who == "owner" else []
            url = rights.url(who)
            found = await asyncio.to_thread(mended, own_broker, url, *own, folder=tmp_path)
            needed = {"owner": OWNER, "producer": PRODUCER}[who]
            told = [said_of(rights, each) for each in needed if "target" not in each and "history" not in each]
            unchecked = UNCHECKED.format(rights.name("schedules"))
            assert sorted(found) == sorted([*(each for each in told if "DescribeConfigs" not in each), unchecked])

    asyncio.run(play())


def test_a_store_into_which_nothing_may_be_written_is_not_called_good(own_broker: Broker, tmp_path: Path) -> None:
    async def play() -> None:
        async with rights_on(own_broker) as rights:
            await rights.grant("producer", OWNER["Read Topic schedules"], OWNER["DescribeConfigs Topic schedules"])
            ran = await asyncio.to_thread(Cli("", tmp_path), "check", rights.url("producer"), "--json")
            problem = problem_of(ran)
            assert (ran.code, problem["text"]) == (1, said_of(rights, "Write Topic schedules"))
            assert not [each for each in ran.objects if each["level"] == "ok"]

    asyncio.run(play())


def test_the_right_to_create_a_topic_is_named_and_granted_by_its_remedy(own_broker: Broker, tmp_path: Path) -> None:
    topic = new_name()
    url = f"kafka://producer:producer@{own_broker.login}/{topic}?security=SASL_PLAINTEXT&create_topic=true"
    found = mended(own_broker, url, folder=tmp_path)
    assert found[0] == f"the right Create on Topic {topic} is missing"
    assert len(found) == 3


def test_a_client_with_a_certificate_is_granted_rights_by_the_name_in_it(
    own_broker: Broker, broker_certificates: Certificates, tmp_path: Path
) -> None:
    files = f"client_cert={broker_certificates.client}&client_key={broker_certificates.client_key}"
    url = f"kafka://{own_broker.tls}/{new_name()}?security=SSL&ca_certs={broker_certificates.ca}&{files}"
    problem = problem_of(Cli("", tmp_path)("check", url, "--json"))
    assert "--allow-principal 'User:<name in client_cert>' --operation Write" in problem["mend"]

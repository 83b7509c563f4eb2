"""Wrong settings of Kafka clusters and topics: each error names the setting and shows no secret."""

from __future__ import annotations

import pytest

from aiodelay import Scheduler
from aiodelay.backends.kafka.client.options import read_cluster
from aiodelay.core.urls import UrlOptions
from aiodelay.errors import ConfigurationError, TargetError
from aiodelay.kafka import KafkaSink

BAD = {
    "kafka://": "url is kafka://; allowed: kafka://host:9092",
    "kafka://host:port": "url is kafka://host:***; allowed: kafka://host:9092",
    "kafka://host:70000": "allowed: kafka://host:9092",
    "kafka://host,": "allowed: kafka://host:9092",
    "kafka://host/topic": "cluster of KafkaSink is kafka://host/topic; allowed: host:9092",
    "redis://host": "cluster of KafkaSink is redis://host; allowed: host:9092",
    "kafka://user@host": "allowed: a user with a password",
    "kafka://user:s3cret@host?security=SSL": "is SSL with a user; allowed: SASL_PLAINTEXT or SASL_SSL, or no user",
    "kafka://host?security=SASL_SSL": "is SASL_SSL without a user; allowed: a user and password in the URL, or PLAIN",
    "kafka://host?security=TLS": "security in kafka://host?security=TLS is 'TLS'; allowed: PLAINTEXT, SSL",
    "kafka://user:s3cret@host?sasl=GSSAPI": "is 'GSSAPI'; allowed: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512",
    "kafka://host?security=SSL&ca_certs=/none.pem": "is unreadable (FileNotFoundError); allowed: files in PEM form",
    "kafka://host?timeout_ms=1": "timeout_ms in kafka://host?timeout_ms=1 is '1'; allowed: an integer from 100",
    "kafka://host?acks=1": "is 'acks'; allowed: timeout_ms, security, sasl",
}


@pytest.mark.parametrize("url", BAD)
def test_a_bad_cluster_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        KafkaSink(url)
    assert BAD[url] in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_a_namespace_is_refused_rather_than_forgotten() -> None:
    with pytest.raises(ConfigurationError, match="namespace is billing; allowed: none on Kafka: give each application"):
        Scheduler("kafka://host/schedules", namespace="billing")


def test_a_cluster_is_read() -> None:
    cluster = read_cluster(UrlOptions("kafka://me:p%40ss@one,two:9093,[::1]?sasl=SCRAM-SHA-512&timeout_ms=500"))
    context = cluster.client.pop("ssl_context")
    assert context.check_hostname
    assert cluster.client == {
        "bootstrap_servers": ["one:9092", "two:9093", "[::1]:9092"],
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "me",
        "sasl_plain_password": "p@ss",
    }
    assert cluster.timeout_ms == 500
    assert "p@ss" not in repr(cluster)


@pytest.mark.parametrize("topic", ["", ".", "..", "a b", "a/b", "é", "__consumer_offsets", "x" * 250, "a\n"])
def test_what_cannot_be_a_topic_is_refused(topic: str) -> None:
    with pytest.raises(TargetError, match="1 to 249 of"):
        KafkaSink("host").check(topic)


@pytest.mark.parametrize("topic", ["a", "online-videos", "a.b_c", "x" * 249])
def test_topics(topic: str) -> None:
    KafkaSink("host").check(topic)

"""`Cluster`: the address of a Kafka cluster and the login, read from a URL."""

from __future__ import annotations

import ssl
from typing import Any
from urllib.parse import SplitResult, unquote

from msgspec import Struct

from aiodelay.core.urls import UrlOptions
from aiodelay.errors import ConfigurationError, shortened

__all__ = ["FORMS", "MAX_TIMEOUT_MS", "Cluster", "read_cluster", "read_topics", "read_url"]

FORMS = "kafka://host:9092,host2:9092, kafka://user:password@host:9092?security=SASL_SSL&sasl=SCRAM-SHA-512"
MAX_TIMEOUT_MS = 600_000
_SECURITY = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


class Cluster(Struct, frozen=True):
    """The address of a cluster, and the options for its clients.

    Attributes:
        name: The URL without its secrets.
        client: The options for every client of the cluster.
        timeout_ms: Longest wait for an answer.
    """

    name: str
    client: dict[str, Any]
    timeout_ms: int

    def __repr__(self) -> str:
        return f"Cluster({self.name!r})"

    @property
    def bootstrap(self) -> str:
        """The hosts of the URL, in the form that Kafka's commands take."""
        return ",".join(self.client["bootstrap_servers"])

    def is_same(self, other: Cluster) -> bool:
        """Say whether this address and another address certainly lead to the same cluster, with the same login.

        This is certain if both have the same login, and have a host in common.
        """
        login = [
            {name: value for name, value in each.client.items() if name not in ("bootstrap_servers", "ssl_context")}
            for each in (self, other)
        ]
        hosts = [set(each.client["bootstrap_servers"]) for each in (self, other)]
        return login[0] == login[1] and not hosts[0].isdisjoint(hosts[1])


def read_cluster(given: UrlOptions) -> Cluster:
    """Read the options that the URLs of stores, sinks and sources share.

    The caller then reads the other options of the URL, and calls `given.finish()`.

    Raises:
        ConfigurationError: The URL has none of the known forms, or an option is unknown or out of range.
    """
    parts, masked = given.parts, given.masked
    timeout_ms = given.integer("timeout_ms", 10_000, 100, MAX_TIMEOUT_MS)
    user, password = _credentials(parts, masked)
    security = given.text("security", "SASL_SSL" if user else "PLAINTEXT")
    mechanism = given.text("sasl", "PLAIN")
    if security not in _SECURITY:
        raise ConfigurationError(f"security in {masked}", shortened(security), ", ".join(_SECURITY))
    if mechanism not in _MECHANISMS:
        raise ConfigurationError(f"sasl in {masked}", shortened(mechanism), ", ".join(_MECHANISMS))
    if user and not security.startswith("SASL"):
        allowed = "SASL_PLAINTEXT or SASL_SSL, or no user and password in the URL"
        raise ConfigurationError(f"security in {masked}", f"{security} with a user", allowed)
    if security.startswith("SASL") and not user:
        allowed = "a user and password in the URL, or PLAINTEXT or SSL"
        raise ConfigurationError(f"security in {masked}", f"{security} without a user", allowed)
    client: dict[str, Any] = {"bootstrap_servers": _hosts(parts, masked), "security_protocol": security}
    if user:
        client |= {"sasl_mechanism": mechanism, "sasl_plain_username": user, "sasl_plain_password": password}
    if security.endswith("SSL"):
        client["ssl_context"] = _tls(given)
    return Cluster(masked, client, timeout_ms)


def read_url(given: str, whose: str) -> Cluster:
    """Read the cluster of a sink or a source from `host:9092`, from several hosts with commas between, or from a URL.

    Raises:
        ConfigurationError: The text has none of these forms, or an option is unknown or out of range.
    """
    url = UrlOptions(given if "://" in given else f"kafka://{given}")
    cluster = read_cluster(url)
    url.finish()
    if url.parts.scheme != "kafka" or url.parts.path.strip("/") or url.parts.fragment:
        raise ConfigurationError(f"cluster of {whose}", url.masked, "host:9092, or kafka://host:9092")
    return cluster


def read_topics(given: UrlOptions, field: str, form: str) -> list[str]:
    """Return the topics in the path of a URL. The caller must check that they are valid names.

    Args:
        given: The URL.
        field: The name of the field for errors.
        form: The allowed forms, for errors.

    Raises:
        ConfigurationError: The URL has another scheme, names no topic, or names a topic twice.
    """
    topics = given.parts.path.removeprefix("/").split(",")
    if given.parts.scheme != "kafka" or given.parts.fragment or not all(topics) or len(topics) > len(set(topics)):
        raise ConfigurationError(field, given.masked, form)
    return topics


def _hosts(parts: SplitResult, masked: str) -> list[str]:
    hosts = parts.netloc.rpartition("@")[2].split(",")
    for i, host in enumerate(hosts):
        name, colon, port = host.rpartition(":")
        if host.endswith("]") or not colon:
            hosts[i] = f"{host}:9092"
        elif not (name and port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
            raise ConfigurationError("url", masked, FORMS)
        if not host:
            raise ConfigurationError("url", masked, FORMS)
    return hosts


def _credentials(parts: SplitResult, masked: str) -> tuple[str, str]:
    if not parts.username and not parts.password:
        return "", ""
    if not parts.username or not parts.password:
        raise ConfigurationError("url", masked, f"a user with a password, as in {FORMS}")
    return unquote(parts.username), unquote(parts.password)


def _tls(given: UrlOptions) -> ssl.SSLContext:
    """Return a TLS context. It always checks the broker's certificate and name."""
    ca, cert, key = given.text("ca_certs"), given.text("client_cert"), given.text("client_key")
    try:
        context = ssl.create_default_context(cafile=ca or None)
        if cert:
            context.load_cert_chain(cert, key or None)
    except OSError as error:  # ssl.SSLError is an OSError
        name = "ca_certs, client_cert or client_key"
        raise ConfigurationError(
            f"{name} in {given.masked}", f"unreadable ({type(error).__name__})", "files in PEM form"
        ) from error
    return context

"""`Options`: the server, credentials, limits and durability in the URL of a Redis store, sink or source."""

from __future__ import annotations

import re
from typing import Any, Literal, TypeAlias
from urllib.parse import SplitResult, unquote

from msgspec import Struct
from msgspec.structs import replace

from aiodelay.backends.redis.records.shards import MOST_SHARDS
from aiodelay.core.urls import UrlOptions
from aiodelay.errors import ConfigurationError, shortened

from .login import Credentials, find_provider
from .topology import TOPOLOGY_FORMS, Topology, read_topology

__all__ = ["Durability", "Options", "read_options", "read_url"]

Durability: TypeAlias = tuple[Literal["memory", "replicated", "fsynced"], int]
"""A durability level, and a number. For `replicated`, the number of replicas that must have the data; otherwise 0."""

MAX_JOURNAL = 10_000_000
MAX_TIMEOUT_MS = 600_000
FORMS = (
    "redis://host:6379/0, rediss://user:password@host/0, unix:///path/redis.sock?db=0, valkey://, valkeys://, "
    + TOPOLOGY_FORMS
)
_LEVELS = "memory, replicated:<1 to 99>, fsynced"
_SECURE = frozenset({"rediss", "valkeys", "rediss-list", "rediss-fanout", "rediss-log"})


class Options(Struct, frozen=True):
    """The contents of a URL.

    Attributes:
        name: The URL without its secrets.
        connection: The arguments of redis-py's connections.
        socket: The path of a Unix socket, or "" for a host and a port.
        secure: True if the connections use TLS.
        connections: The largest number of connections for commands. One more connection listens for wake-ups.
        timeout_ms: The longest wait for an answer, and the longest wait for the durability level, in ms.
        durability: The level that a command must reach before `apply` acknowledges the command.
        journal: The largest number of journal entries to keep. With 0, the store keeps no journal.
        shards: The number of shards of a new namespace. 0 = the URL does not name it.
        topology: The cluster or the Sentinels, or None if the URL names the server itself.
    """

    name: str
    connection: dict[str, Any]
    socket: str
    secure: bool
    connections: int
    timeout_ms: int
    durability: Durability
    journal: int
    shards: int = 0
    topology: Topology | None = None

    @property
    def is_cluster(self) -> bool:
        """True if the servers are the nodes of a cluster. Keys may then be on different nodes."""
        return self.topology is not None and self.topology.kind == "cluster"

    def __repr__(self) -> str:  # A traceback that shows variables must not show the password.
        return f"Options({self.name!r})"

    @property
    def server(self) -> tuple[object, ...]:
        """The socket, host, port, database, user and credential provider, and the cluster or the Sentinels.

        If two URLs have equal values, they reach the same data as the same user.
        """
        named = self.topology and (self.topology.kind, frozenset(self.topology.seeds), self.topology.primary)
        credentials = self.connection.get("credential_provider")
        login = credentials.provider if credentials else self.connection.get("username")
        return self.socket, named, *(self.connection.get(name) for name in ("host", "port", "db")), login

    @property
    def place(self) -> str:
        """The socket, or the servers and the database. If two URLs have equal places, they reach the same data."""
        if self.topology is None:
            server = self.socket or "{host}:{port}".format(**self.connection)
        else:
            server = " ".join([self.topology.kind, *sorted(map(str, self.topology.seeds)), self.topology.primary])
        return f"{server}/{self.connection['db']}"

    def with_provider(self, credentials: Credentials) -> Options:
        """Return the options of connections that log in with the credentials of a provider.

        Raises:
            ConfigurationError: The URL has a user, a password or a provider of its own.
        """
        if {"username", "password", "credential_provider"} & self.connection.keys():
            raise ConfigurationError("url", self.name, "a URL without a user, because the credential provider names it")
        return replace(self, connection=self.connection | {"credential_provider": credentials})


def read_url(url: str) -> Options:
    """Read the URL of a store. Return its options.

    Raises:
        ConfigurationError: The URL has none of the known forms, or an option is unknown or out of range.
    """
    given = UrlOptions(url)
    options = replace(read_options(given), shards=given.integer("shards", 0, 1, MOST_SHARDS))
    given.finish()
    return options


def read_options(given: UrlOptions) -> Options:
    """Read the host, the credentials and the common options of a URL. The caller reads all other options.

    Raises:
        ConfigurationError: The URL has none of the known forms, or an option is out of range.
    """
    parts, masked = given.parts, given.masked
    timeout_ms = given.integer("timeout_ms", 5_000, 50, MAX_TIMEOUT_MS)
    connection: dict[str, Any] = {
        "socket_connect_timeout": given.integer("connect_timeout_ms", 3_000, 50, MAX_TIMEOUT_MS) / 1000,
        "protocol": given.integer("protocol", 2, 2, 3),
    }
    durability = _durability(given.text("durability", "memory"), masked)
    journal = given.integer("journal", 0, 0, MAX_JOURNAL)
    connections = given.integer("connections", 8, 1, 1000)
    scheme, plus, kind = parts.scheme.partition("+")
    topology: Topology | None = None
    if parts.scheme == "unix":
        connection["db"] = given.integer("db", 0, 0, 1_000_000)
    elif plus:
        topology, placed = read_topology(kind, given)
        connection |= placed
    else:
        connection |= _server(parts, masked)
    if scheme in _SECURE:
        connection |= _tls(given)
    connection |= _credentials(parts, masked)
    socket = unquote(parts.path) if parts.scheme == "unix" else ""
    if parts.fragment or (parts.scheme == "unix" and not socket.strip("/")):
        raise ConfigurationError("url", masked, FORMS)
    secure = scheme in _SECURE
    options = Options(
        masked, connection, socket, secure, connections, timeout_ms, durability, journal, topology=topology
    )
    provider = given.text("credential_provider")
    return options.with_provider(find_provider(provider, masked)) if provider else options


def _server(parts: SplitResult, masked: str) -> dict[str, Any]:
    path = parts.path.strip("/")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0 or (path and not (path.isascii() and path.isdigit() and len(path) <= 6)):
        raise ConfigurationError("url", masked, FORMS)
    return {"host": unquote(parts.hostname or "localhost"), "port": port or 6379, "db": int(path or 0)}


def _credentials(parts: SplitResult, masked: str) -> dict[str, str]:
    found = {"username": parts.username, "password": parts.password}
    if parts.username and parts.password is None:
        raise ConfigurationError("url", masked, f"a user with a password, as in {FORMS}")
    return {name: unquote(value) for name, value in found.items() if value}


def _tls(given: UrlOptions) -> dict[str, Any]:
    names = {"ca_certs": "ssl_ca_certs", "client_cert": "ssl_certfile", "client_key": "ssl_keyfile"}
    found: dict[str, Any] = {ours: value for name, ours in names.items() if (value := given.text(name))}
    return found | {"ssl_cert_reqs": "required", "ssl_check_hostname": True}


def _durability(text: str, masked: str) -> Durability:
    if text == "memory":
        return ("memory", 0)
    if text == "fsynced":
        return ("fsynced", 0)
    found = re.fullmatch(r"replicated:([1-9]\d?)", text)
    if found is None:
        raise ConfigurationError(f"durability in {masked}", shortened(text), _LEVELS)
    return ("replicated", int(found[1]))

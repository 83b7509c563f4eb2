"""`Topology`: the nodes of a cluster, or the Sentinels of a primary, in the URL of a Redis store, sink or source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple
from urllib.parse import SplitResult, unquote

from msgspec import Struct

from aiodelay.core.urls import UrlOptions
from aiodelay.errors import ConfigurationError, shortened

__all__ = ["TOPOLOGY_FORMS", "Address", "Topology", "read_topology"]

TOPOLOGY_FORMS = "redis+cluster://node1:6379,node2:6379, redis+sentinel://sentinel1:26379,sentinel2:26379/primary/0"
_PORTS: Mapping[str, int] = {"cluster": 6379, "sentinel": 26379}
_ANNOUNCE = "<host:port that the servers name>=<host:port to use>, with commas between"


class Address(NamedTuple):
    """The address of a server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Topology(Struct, frozen=True):
    """The servers that know which server holds the data.

    Attributes:
        kind: `cluster`: the servers are nodes of a cluster. `sentinel`: they are Sentinels.
        seeds: The addresses of the servers in the URL.
        primary: The name under which the Sentinels know the primary; "" for a cluster.
        login: The user and the password of the Sentinels, as arguments of redis-py's connections.
        announce: The addresses to use instead of the addresses that the servers name.
    """

    kind: Literal["cluster", "sentinel"]
    seeds: tuple[Address, ...]
    primary: str = ""
    login: tuple[tuple[str, str], ...] = ()
    announce: tuple[tuple[Address, Address], ...] = ()

    def __repr__(self) -> str:  # A traceback that shows variables must not show the password.
        return f"Topology({self.kind!r}, {self.seeds!r})"


def read_topology(kind: str, given: UrlOptions) -> tuple[Topology, dict[str, Any]]:
    """Read the servers of a URL whose scheme ends with `+cluster` or `+sentinel`.

    Returns:
        The topology, and the arguments of redis-py's connections that the path of the URL sets.

    Raises:
        ConfigurationError: A host, the path or an option is not allowed.
    """
    parts, masked = given.parts, given.masked
    announce = _announced(given.text("announce"), masked)
    if parts.fragment or kind not in _PORTS:
        raise ConfigurationError("url", masked, TOPOLOGY_FORMS)
    seeds = tuple(_address(each, masked, _PORTS[kind]) for each in parts.netloc.rpartition("@")[2].split(","))
    if kind == "cluster":
        return Topology("cluster", seeds, announce=announce), {"db": _database(parts.path.strip("/"), masked)}
    primary, _, database = parts.path.strip("/").partition("/")
    if not primary:
        allowed = "the name of the primary after the hosts, as in redis+sentinel://sentinel1,sentinel2/primary"
        raise ConfigurationError("url", masked, allowed)
    login = {"username": given.text("sentinel_username"), "password": given.text("sentinel_password")}
    if login["username"] and not login["password"]:
        raise ConfigurationError(f"sentinel_password in {masked}", "missing", "the password of sentinel_username")
    given_login = tuple((name, value) for name, value in login.items() if value)
    topology = Topology("sentinel", seeds, unquote(primary), given_login, announce)
    return topology, {"db": _database(database, masked)}


def _database(text: str, masked: str) -> int:
    if text and not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise ConfigurationError("url", masked, TOPOLOGY_FORMS)
    return int(text or 0)


def _address(text: str, masked: str, port: int, *, field: str = "url", allowed: str = TOPOLOGY_FORMS) -> Address:
    try:
        parts = SplitResult("", text, "", "", "")
        host, found = parts.hostname, parts.port
    except ValueError:
        host, found = None, None
    if not host or found == 0 or "@" in text:
        raise ConfigurationError(field, masked if field == "url" else shortened(text), allowed)
    return Address(unquote(host), found or port)


def _announced(text: str, masked: str) -> tuple[tuple[Address, Address], ...]:
    pairs: list[tuple[Address, Address]] = []
    for pair in text.split(",") if text else ():
        named, equals, used = pair.partition("=")
        field = f"announce in {masked}"
        if not equals:
            raise ConfigurationError(field, shortened(pair), _ANNOUNCE)
        first, second = (_address(each, masked, 6379, field=field, allowed=_ANNOUNCE) for each in (named, used))
        pairs.append((first, second))
    return tuple(pairs)

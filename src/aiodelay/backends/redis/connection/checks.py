"""The checks of a Redis store when it opens: the server's version, role and settings, and the layout of the keys."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from typing import Any
from uuid import uuid4

from aiodelay.backends.redis.records.keys import Keys
from aiodelay.backends.remedies import explained, with_remedy
from aiodelay.errors import StoreMismatchError, StoreUnavailableError

from .client import Client, counted
from .faults import Fault
from .locator import SentinelLocator
from .options import Options
from .remedies import CAUSES
from .scripts import Arg
from .topology import Address

__all__ = ["check_layout", "check_server", "info_of", "server_time_ms"]

log: logging.Logger = logging.getLogger("aiodelay.redis")

LEAST_REDIS, LEAST_VALKEY = (6, 2), (7, 2)
VERSIONS = "Redis 6.2 or later, Valkey 7.2 or later"
LEAST_FSYNCED = (7, 2)


async def check_server(client: Client, keys: Keys, options: Options, checked: set[Address | None]) -> bytes:
    """Check the server. Refuse a server that would evict messages, or that this version of aiodelay cannot use.

    Args:
        client: The client of a shard.
        keys: The keys of the shard.
        options: The options of the URL.
        checked: The servers that other shards of the namespace have checked already. The shard's server is added.

    Returns:
        The `uuid` of the namespace. A new namespace gets a new `uuid`.

    Raises:
        StoreMismatchError: The server evicts keys, is a replica, is too old, has another key layout, or does not fit
            the scheme of the URL.
        StoreUnavailableError: The server did not answer.
    """
    try:
        node = await client.node()
        name = client.place
        is_first = node not in checked
        if is_first:
            info = await _info(client, name)
            if info:
                _check_version(name, info)
                _check_mode(options, info)
                _check_role(name, info)
                _warn_of_min_replicas(options, info)
                _check_replicas(name, options, info)
            await _check_settings(client, options, info, name)
            if options.is_cluster and keys.shards > 1:
                await _check_coverage(client, name)
            _warn_of_silent(client, options)
        uuid = await _check_layout(client, keys, options.name)
        await _check_scripts(client, keys, options, name)
        if is_first:
            await client.load_scripts()
        checked.add(node)
    except Fault as fault:
        if fault.mismatch is not None:
            raise fault.mismatch from fault
        if fault.is_damage:
            raise StoreMismatchError(
                f"key {keys.key('meta')!r} of {options.name}",
                "written by another program",
                "a hash that aiodelay wrote",
            ) from fault
        reason = fault.reason
        if (
            options.secure
            and options.topology is None
            and "Timeout connecting" in reason
            and await _takes_connections(options)
        ):
            reason += " in the TLS handshake"
        raise StoreUnavailableError(options.name, explained(reason, CAUSES)) from fault
    return uuid


async def _takes_connections(options: Options) -> bool:
    """Return True if the server accepts TCP connections. The caller has waited in vain for a TLS handshake."""
    where = options.connection
    try:
        async with asyncio.timeout(where["socket_connect_timeout"]):
            _, writer = await asyncio.open_connection(where["host"], where["port"])
    except OSError:  # TimeoutError too
        return False
    writer.close()
    return True


async def _info(client: Client, name: str) -> dict[str, str]:
    """Return the fields of INFO, or no fields if the service forbids INFO."""
    try:
        return info_of(await client.command("INFO"))
    except Fault as fault:
        if not fault.is_refused:
            raise
        unchecked = f"the version ({VERSIONS}), the role (primary) and appendonly (yes) of the server"
        log.warning(
            "%s: INFO is not allowed (%s); make sure of the properties that were not checked: %s",
            name,
            fault.reason,
            unchecked,
        )
        return {}


def info_of(reply: Any) -> dict[str, str]:  # noqa: ANN401 - redis-py's reply
    """Return the fields of a reply to INFO, by name."""
    text = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else str(reply)
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name: value for name, _, value in pairs}


def _check_version(name: str, info: dict[str, str]) -> None:
    product = "Valkey" if "valkey_version" in info else "Redis"
    if _version(info) < (LEAST_VALKEY if product == "Valkey" else LEAST_REDIS):
        shown = info.get("valkey_version") or info.get("redis_version") or "unknown"
        raise StoreMismatchError(f"version of {name}", f"{product} {shown}", VERSIONS)


def _version(info: dict[str, str]) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", info.get("valkey_version") or info.get("redis_version", ""))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _check_mode(options: Options, info: dict[str, str]) -> None:
    """Refuse a URL for a single server that names a node of a cluster, or a Sentinel."""
    if options.topology is not None:
        return
    scheme, _, rest = options.name.partition("://")
    if info.get("cluster_enabled") == "1":
        allowed = f"{scheme}+cluster://{rest}"
        raise StoreMismatchError(
            f"scheme of {options.name}", f"{scheme}, but the server is a node of a cluster", allowed
        )
    if info.get("redis_mode") == "sentinel" or info.get("server_mode") == "sentinel":
        allowed = f"{scheme}+sentinel:// with the name of the primary after the hosts"
        raise StoreMismatchError(f"scheme of {options.name}", f"{scheme}, but the server is a Sentinel", allowed)


def _warn_of_silent(client: Client, options: Options) -> None:
    """Log a warning if no majority of the URL's Sentinels answers. Without a majority, no failover happens."""
    locator = client.locator
    if isinstance(locator, SentinelLocator) and options.topology is not None:
        silent, seeds = locator.silent, options.topology.seeds
        if 2 * len(silent) >= len(seeds):
            problem = f"{len(silent)} of {len(seeds)} Sentinels do not answer ({'; '.join(silent)}), so no failover can"
            log.warning(
                "%s: %s", options.name, with_remedy(f"{problem} happen", "start the Sentinels, or correct the URL")
            )


def _check_role(name: str, info: dict[str, str]) -> None:
    if info.get("role") == "slave":
        primary = f"{info.get('master_host', '?')}:{info.get('master_port', '?')}"
        raise StoreMismatchError(f"role of {name}", "replica", f"the primary, which is {primary}")


async def _check_coverage(client: Client, name: str) -> None:
    """Warn of a cluster that refuses all calls while one primary is away: its other shards do not go on then."""
    try:
        found = await _values_of(client, "cluster-require-full-coverage")
    except Fault as fault:
        if not fault.is_refused:
            raise
        return
    if found[:1] == [b"yes"]:
        problem = "cluster-require-full-coverage is yes; while one primary is away, the shards of all nodes stand still"
        mend = "CONFIG SET cluster-require-full-coverage no, and the same in the server's configuration file"
        log.warning("%s: %s", name, with_remedy(problem, mend))


def _warn_of_min_replicas(options: Options, info: dict[str, str]) -> None:
    """Log a warning if the primary would take writes while it is cut off and another server replaces it."""
    topology = options.topology
    if topology is None or topology.kind != "sentinel" or "min_slaves_good_slaves" in info:
        return  # INFO has this field only with the setting.
    problem = "min-replicas-to-write is 0; a primary that is cut off takes commands, which its failover loses"
    mend = "CONFIG SET min-replicas-to-write 1 on all servers, and the same in their configuration files"
    log.warning("%s: %s", options.name, with_remedy(problem, mend))


def _check_replicas(name: str, options: Options, info: dict[str, str]) -> None:
    """Compare the number in `durability=replicated:<n>` with the replicas. Too few may be away for a short time."""
    level, wanted = options.durability
    if level != "replicated" or "connected_slaves" not in info:
        return
    found = int(info["connected_slaves"])
    if found < wanted:
        problem = (
            f"durability=replicated:{wanted} waits for {wanted} replicas, but {found} are connected; "
            "the outcome of each command is unknown"
        )
        log.error("%s: %s", name, with_remedy(problem, f"start the replicas, or {_level_for(found)}"))
    elif found > wanted:
        problem = (
            f"durability=replicated:{wanted} waits for {wanted} of {found} replicas; "
            "a failover to another replica loses acknowledged messages"
        )
        log.warning("%s: %s", name, with_remedy(problem, _level_for(found)))


def _level_for(replicas: int) -> str:
    return f"put durability={f'replicated:{replicas}' if replicas else 'memory'} into the URL"


async def _check_settings(client: Client, options: Options, info: dict[str, str], name: str) -> None:
    policy = info.get("maxmemory_policy") or await _setting(client, name, "maxmemory-policy")
    if policy is not None and policy != "noeviction":
        raise StoreMismatchError(
            f"maxmemory-policy of {name}",
            f"{policy}, which drops messages when memory is short",
            "noeviction (CONFIG SET maxmemory-policy noeviction, and the same in the server's configuration file)",
        )
    level, _ = options.durability
    if (
        level == "fsynced"
        and "redis_version" in info
        and "valkey_version" not in info
        and _version(info) < LEAST_FSYNCED
    ):
        shown = info.get("redis_version", "unknown")
        raise StoreMismatchError(
            f"version of {name}", f"Redis {shown}", "Redis 7.2 or later, which durability=fsynced needs"
        )
    if info.get("aof_enabled") == "0" and level == "fsynced":
        raise StoreMismatchError(f"appendonly of {name}", "no, so nothing can be fsynced", "yes, or durability=memory")
    if info.get("aof_enabled") == "0":
        problem = "appendonly is off; acknowledged messages are lost when the server ends"
        mend = "CONFIG SET appendonly yes, and the same in the server's configuration file"
        log.warning("%s: %s", name, with_remedy(problem, mend))


async def _setting(client: Client, name: str, setting: str) -> str | None:
    try:
        values = await _values_of(client, setting)
    except Fault as fault:
        if not fault.is_refused:
            raise
        log.warning("%s: CONFIG GET is not allowed; make sure that %s is noeviction", name, setting)
        return None
    return values[0].decode() if values else None


async def _values_of(client: Client, setting: str) -> list[bytes]:
    """Return the value of a setting, in a list; an empty list if the server does not know the setting."""
    reply = await client.command("CONFIG", "GET", setting)
    return list(reply.values()) if isinstance(reply, dict) else list(reply)[1::2]


async def _check_layout(client: Client, keys: Keys, name: str) -> bytes:
    meta = keys.key("meta")
    wanted = {"schema": keys.schema, "shards": str(keys.shards), "uuid": uuid4().hex}
    if None in await client.command("HMGET", meta, *wanted):  # A full server refuses writes, so write only if needed.
        for field, value in wanted.items():
            await client.command("HSETNX", meta, field, value)
    schema, shards, uuid = await client.command("HMGET", meta, *wanted)
    check_layout(keys, name, schema, shards)
    return bytes(uuid)


async def _check_scripts(client: Client, keys: Keys, options: Options, name: str) -> None:
    """Check that scripts can run, and that they can use keys which the call does not declare."""
    text = b"return redis.call('EXISTS', KEYS[1], ARGV[1])"
    sha = hashlib.sha1(text, usedforsecurity=False).hexdigest()
    arguments: tuple[Arg, ...] = (*counted(options, [keys.key("meta")]), keys.key("logs"))
    try:
        await client.commands([("EVAL", text, *arguments), ("EVALSHA", sha, *arguments)])
    except Fault as fault:
        if not fault.is_refused:
            raise
        raise StoreMismatchError(
            f"answer of {name} to a script",
            f"'{fault.reason}'",
            f"EVAL and EVALSHA for this user, in scripts that may use all keys {keys.tag}* and not only declared keys",
        ) from fault


def check_layout(keys: Keys, name: str, schema: object, shards: object) -> None:
    """Refuse a namespace whose key layout differs from the layout of this version.

    Raises:
        StoreMismatchError: The key layouts differ.
    """
    if (_shown(schema), _shown(shards)) != (keys.schema, str(keys.shards)):
        shown = f"schema {_shown(schema)}, {_shown(shards)} shards"
        wanted = f"schema {keys.schema}, {keys.shards} shards"
        raise StoreMismatchError(f"layout of {keys.tag}* on {name}", shown, wanted)


def _shown(value: object) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


async def server_time_ms(client: Client) -> float:
    """Return the server's time in epoch ms."""
    seconds, micros = await client.command("TIME")
    return int(seconds) * 1000 + int(micros) / 1000

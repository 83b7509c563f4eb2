"""Redis servers that tests start, and which of them the gate uses; `aiodelay.testing.servers` finds them."""

from __future__ import annotations

import time

from aiodelay.testing.servers import Found, RedisServer, redis_programs, redis_servers, serving

__all__ = [
    "Found",
    "RedisServer",
    "is_of_the_gate",
    "redis_products",
    "redis_programs",
    "redis_servers",
    "replicate",
    "serving",
    "start",
]

REPLICATES_S = 20.0


def redis_products() -> list[Found]:
    """Return one program of each product, the first found: enough for tests that take long."""
    return list({found.name.partition("-")[0]: found for found in reversed(redis_programs())}.values())


def is_of_the_gate(found: Found, *, valkey_too: bool) -> bool:
    """Say whether the gate tests a rule on this server: the first one found, and a Valkey if asked for.

    The first one is the server that is given, else the newest Redis. All others are for the night.
    """
    firsts = [redis_servers()[0], redis_programs()[0]]
    if valkey_too:
        firsts += [each for each in redis_products() if each.name.startswith("valkey")]
    return found in firsts


def start(program: str, *options: str) -> RedisServer:
    """Start a server."""
    server = RedisServer(program, *options)
    server.start()
    return server


def replicate(replica: RedisServer, port: int) -> None:
    """Make a server the replica of the one at a port; return when it has what that one holds."""
    replica.command("REPLICAOF", "127.0.0.1", str(port))
    deadline = time.monotonic() + REPLICATES_S
    while b"master_link_status:up" not in replica.command("INFO", "replication"):
        assert time.monotonic() < deadline, replica.log[-2000:]
        time.sleep(0.02)

"""Start Redis servers for tests, and choose the servers of the gate. `aiodelay.testing.servers` finds them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from aiodelay.testing.servers import Found, RedisServer, redis_programs, redis_servers, serving

from .processes import PATIENCE_S
from .waiting import until_sync

__all__ = [
    "Found",
    "RedisServer",
    "is_of_the_gate",
    "offset_of",
    "redis_products",
    "redis_programs",
    "redis_servers",
    "replicate",
    "replicated_until_ns",
    "serving",
    "start",
    "stopped",
]

REPLICATES_S = 60.0


def redis_products() -> list[Found]:
    """Return the first program found of each product, which is enough for slow tests."""
    return list({found.name.partition("-")[0]: found for found in reversed(redis_programs())}.values())


def is_of_the_gate(found: Found, *, valkey_too: bool) -> bool:
    """Return whether the gate tests a rule here: on the first server or program, or with `valkey_too` on a Valkey.

    The first server is the given server, else the newest Redis. Nightly tests use the servers that the gate leaves out.
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


@contextmanager
def stopped(server: RedisServer) -> Iterator[None]:
    """Let a server stand still, as if its machine had no power."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def replicate(replica: RedisServer, port: int) -> None:
    """Make a server the replica of the server at a port. Return when the replica has all its data."""
    replica.command("REPLICAOF", "127.0.0.1", str(port))
    deadline = time.monotonic() + REPLICATES_S
    while b"master_link_status:up" not in replica.command("INFO", "replication"):
        assert time.monotonic() < deadline, replica.log[-2000:]
        time.sleep(0.02)


def replicated_until_ns(server: RedisServer, replica: RedisServer) -> int:
    """Return a time before which nothing was answered that the replica does not have."""
    at_ns, written = time.monotonic_ns(), offset_of(server, "master_repl_offset")

    def has_caught_up() -> bool:
        is_of_server = _replication_of(server, "master_replid") == _replication_of(replica, "master_replid")
        return is_of_server and offset_of(replica, "slave_repl_offset") >= written

    until_sync(has_caught_up, "the replica has what was answered", PATIENCE_S)
    return at_ns


def offset_of(server: RedisServer, field: str) -> int:
    """Return a number from a server's report about replication."""
    return int(_replication_of(server, field))


def _replication_of(server: RedisServer, field: str) -> str:
    found = re.search(rf"\r\n{field}:(\w+)\r\n", server.command("INFO", "replication").decode())
    assert found is not None, f"the server reports no {field}"
    return found[1]

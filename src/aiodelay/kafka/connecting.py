"""The first connection of aiokafka's clients, but for two faults.

A start that is cancelled leaves it open (K20), and one host that is silent takes all the time there is (K25).
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

from aiokafka import client
from aiokafka.conn import collect_hosts, create_conn

__all__ = ["install"]

_hosts: ContextVar[int] = ContextVar("_hosts")
"""How many hosts the client that starts may ask, one after the other."""


def install() -> None:
    """Have aiokafka's clients connect so; repeating it changes nothing."""
    client.create_conn, client.collect_hosts = _create_conn, _collect_hosts


def _collect_hosts(servers: Sequence[str]) -> Any:  # noqa: ANN401 - aiokafka's
    found = collect_hosts(servers)
    _hosts.set(len(found))
    return found


async def _create_conn(*where: Any, on_close: Any = None, **options: Any) -> Any:  # noqa: ANN401 - aiokafka's
    if on_close is not None:  # of all connections, only the first one belongs to no client yet
        return await create_conn(*where, on_close=on_close, **options)
    options["request_timeout_ms"] //= _hosts.get()
    connection = await create_conn(*where, **options)
    connection.send = partial(_send_first, connection)
    return connection


async def _send_first(connection: Any, request: Any) -> Any:  # noqa: ANN401 - aiokafka's
    del connection.send
    answer: Awaitable[Any] = connection.send(request)
    try:
        return await answer
    except BaseException:
        connection.close()
        raise

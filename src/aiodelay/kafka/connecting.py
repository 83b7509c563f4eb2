"""The first connection of aiokafka's clients, but that a start that is cancelled does not leave it open (K20)."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import Any

from aiokafka import client
from aiokafka.conn import create_conn

__all__ = ["install"]


def install() -> None:
    """Have aiokafka's clients connect so; repeating it changes nothing."""
    client.create_conn = _create_conn


async def _create_conn(*where: Any, on_close: Any = None, **options: Any) -> Any:  # noqa: ANN401 - aiokafka's
    connection = await create_conn(*where, on_close=on_close, **options)
    if on_close is None:  # of all connections, only the first one belongs to no client yet
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

"""How aiokafka's clients ask who leads which partition: with a pause where the last answer has left that open (K26)."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from aiokafka.client import AIOKafkaClient
from msgspec import Struct

from aiodelay.pausing import pause_s

__all__ = ["hurry", "install"]

LONGEST_PAUSE_S = 0.5

_update = AIOKafkaClient._metadata_update


class _Asked(Struct):
    """How often in a row there was no answer, or a leader missing in it; and whether somebody waits for the next."""

    is_urgent: asyncio.Event
    in_vain: int = 0


_asked: WeakKeyDictionary[Any, _Asked] = WeakKeyDictionary()


def install() -> None:
    """Have aiokafka's clients ask so; repeating it changes nothing."""
    AIOKafkaClient._metadata_update = _metadata_update


def hurry(client: Any) -> None:  # noqa: ANN401 - aiokafka's
    """End the pause that a client makes, or would make next."""
    _asked_of(client).is_urgent.set()


async def _metadata_update(client: Any, cluster: Any, topics: Collection[str] | None) -> Any:  # noqa: ANN401 - aiokafka's
    asked = _asked_of(client)
    if asked.in_vain:
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s(asked.in_vain, longest_s=LONGEST_PAUSE_S)):
                await asked.is_urgent.wait()
    asked.is_urgent.clear()
    is_updated = await _update(client, cluster, topics)
    is_whole = is_updated and all(_has_leaders(cluster, topic) for topic in topics or ())
    asked.in_vain = 0 if is_whole else asked.in_vain + 1
    if topics is not None and topics != client._topics:  # others are wanted now
        asked.is_urgent.set()
        if not client._md_update_waiter.done():  # else aiokafka asks for them when it would have asked anyway
            client._md_update_waiter.set_result(None)
    return is_updated


def _asked_of(client: Any) -> _Asked:  # noqa: ANN401 - aiokafka's
    return _asked.setdefault(client, _Asked(asyncio.Event()))


def _has_leaders(cluster: Any, topic: str) -> bool:  # noqa: ANN401 - aiokafka's
    partitions = cluster.partitions_for_topic(topic)
    return partitions is not None and partitions == cluster.available_partitions_for_topic(topic)

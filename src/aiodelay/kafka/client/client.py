"""How aiokafka's clients ask who leads which partition.

They pause where the last answer has left that open (K26), and a producer of ours asks only for topics that it has been
given (K27).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from aiokafka.client import AIOKafkaClient
from msgspec import Struct

from aiodelay.pausing import pause_s

__all__ = ["ask_for_named_topics", "hurry", "install"]

LONGEST_PAUSE_S = 0.5

_update = AIOKafkaClient._metadata_update


class _NoTopic(frozenset[str]):
    """No topic: aiokafka asks for all topics where a collection of them is false."""

    def __bool__(self) -> bool:
        return True


class _Asked(Struct):
    """How a client asks.

    Attributes:
        is_urgent: Somebody waits for the next answer.
        in_vain: How often in a row there was no answer, or a leader missing in it.
        unnamed: What it asks for while it has been given no topic; None: all topics.
    """

    is_urgent: asyncio.Event
    in_vain: int = 0
    unnamed: Collection[str] | None = None


_asked: WeakKeyDictionary[Any, _Asked] = WeakKeyDictionary()


def install() -> None:
    """Have aiokafka's clients ask so; repeating it changes nothing."""
    AIOKafkaClient._metadata_update = _metadata_update


def ask_for_named_topics(client: Any) -> None:  # noqa: ANN401 - aiokafka's
    """Have a client never ask for all topics of its cluster, of which there may be thousands."""
    _asked_of(client).unnamed = _NoTopic()


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
    is_updated = await _update(client, cluster, asked.unnamed if topics == set() else topics)
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

"""How aiokafka's clients ask who leads which partition: with a pause where the last answer has left that open (K26)."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

from aiokafka.client import AIOKafkaClient
from msgspec import Struct

from aiodelay.pausing import pause_s

__all__ = ["install"]

LONGEST_PAUSE_S = 0.5

_update = AIOKafkaClient._metadata_update


class _Asked(Struct):
    """How often in a row the answer was missing, or no leader was in it; and before when it is not asked again."""

    in_vain: int = 0
    again_s: float = 0.0


_asked: WeakKeyDictionary[Any, _Asked] = WeakKeyDictionary()


def install() -> None:
    """Have aiokafka's clients ask so; repeating it changes nothing."""
    AIOKafkaClient._metadata_update = _metadata_update


async def _metadata_update(client: Any, cluster: Any, topics: Collection[str]) -> Any:  # noqa: ANN401 - aiokafka's
    asked = _asked.setdefault(client, _Asked())
    now_s = asyncio.get_running_loop().time
    await asyncio.sleep(asked.again_s - now_s())
    is_updated = await _update(client, cluster, topics)
    if is_updated and all(_has_leaders(cluster, topic) for topic in topics):
        asked.in_vain, asked.again_s = 0, 0.0
    else:
        asked.in_vain += 1
        asked.again_s = now_s() + pause_s(asked.in_vain, longest_s=LONGEST_PAUSE_S)
    return is_updated


def _has_leaders(cluster: Any, topic: str) -> bool:  # noqa: ANN401 - aiokafka's
    partitions = cluster.partitions_for_topic(topic)
    return partitions is not None and partitions == cluster.available_partitions_for_topic(topic)

"""`keys_since`: finds the keys that other writers have just written to a partition. An owner calls it before a commit.

The function also reads records beyond the start of an open transaction, which a `read_committed` reader cannot see yet.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiokafka import TopicPartition
from aiokafka.errors import LeaderNotAvailableError, for_code
from aiokafka.protocol.fetch import FetchRequest

from ._overrides.record_batches import Records
from .client import Client

__all__ = ["keys_since"]

MOST_BYTES = 1 << 20
_UNCOMMITTED = 0


async def keys_since(client: Client, place: TopicPartition, offset: int) -> Mapping[bytes, int]:
    """Read the records from an offset on, as many as one answer holds. Return the last offset of each key.

    Records of transactions are left out, because they may not be committed yet. Owners and intakes write such records.

    Args:
        client: A connected client.
        place: The partition.
        offset: The first offset to read.

    Raises:
        KafkaError, OSError: The partition cannot be read.
    """
    leader = client.cluster.leader_for_partition(place)
    if leader is None or leader < 0:
        raise LeaderNotAvailableError
    asked = [(place.topic, [(place.partition, offset, MOST_BYTES)])]
    answer = await client.send(leader, FetchRequest(0, 0, MOST_BYTES, _UNCOMMITTED, asked))
    ((_, ((_, code, *_, data),)),) = answer.topics
    if code:
        raise for_code(code)(place)
    return _keys(Records(data), offset) if data else {}


def _keys(records: Records, offset: int) -> Mapping[bytes, int]:
    found: dict[bytes, int] = {}
    while records.has_next():
        batch = records.next_batch()
        if batch.is_transactional or batch.is_control_batch:
            continue
        for record in batch:
            if record.offset >= offset and record.key is not None:
                found[record.key] = record.offset
    return found

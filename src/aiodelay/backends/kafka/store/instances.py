"""`instances_of`: lists the processes that share the partitions of a store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from aiokafka import TopicPartition

from aiodelay.backends.kafka.client import UNAVAILABLE, reason_of
from aiodelay.core.dict_table.table import SERVED_WINDOW_MS
from aiodelay.core.values import Instance
from aiodelay.errors import StoreUnavailableError

from .assignment import Assignment

__all__ = ["instances_of"]


async def instances_of(assignment: Assignment, *, name: str, instance: str, now_ms: int) -> Sequence[Instance]:
    """List this process's workers and the other members of the topics' groups, with their partitions.

    Args:
        assignment: The partitions that this process owns.
        name: The name of the store for error messages.
        instance: The name that the user gave this process; "" = none.
        now_ms: The time of the store.

    Raises:
        StoreUnavailableError: A group does not answer.
    """
    here = _parts(assignment.partitions)
    found = [
        Instance(instance or each.name, tuple(sorted(each.lanes)), each.seen_ms, here)
        for each in assignment.waiters.workers
        if each.seen_ms > now_ms - SERVED_WINDOW_MS
    ]
    others: defaultdict[str, list[TopicPartition]] = defaultdict(list)
    try:
        for group in assignment.groups.values():
            for member, places in (await group.others()).items():
                others[member] += places
    except UNAVAILABLE as error:
        raise StoreUnavailableError(name, reason_of(error)) from error
    found += [Instance(member, None, now_ms, _parts(places)) for member, places in others.items()]
    return sorted(found, key=lambda each: each.name)


def _parts(places: Iterable[TopicPartition]) -> tuple[str, ...]:
    return tuple(f"{place.topic}/{place.partition}" for place in sorted(places))

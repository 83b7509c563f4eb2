"""`Placement`: the number of a partition, and the checks of messages that are read from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from aiodelay.backends.kafka import records
from aiodelay.core.values import Envelope
from aiodelay.errors import RecordFormatError, TargetNotAllowedError

__all__ = ["Placement"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")


class Placement:
    """The place of one partition in its topic.

    Args:
        name: The topic and partition, for logs.
        number: The number of the partition.
        partitions: The number of partitions of the topic.
        schedules: The schedules topics of the store. A message moved to one of them would become a schedule again.
    """

    name: str
    number: int
    partitions: int
    schedules: Collection[str]

    def __init__(self, name: str, number: int = 0, partitions: int = 1, schedules: Collection[str] = ()) -> None:
        self.name, self.number, self.partitions, self.schedules = name, number, partitions, schedules
        self.guard: Callable[[str], object] | None = None
        """Raises an error for a destination that other programs may not use; None = they may use all destinations."""
        self.is_mixed: bool = False
        """Whether the partition has keys that belong to another partition."""

    def unread(self) -> Placement:
        """Return a new placement, for reading the partition from its start. No misplaced key is known yet."""
        placement = Placement(self.name, self.number, self.partitions, self.schedules)
        placement.guard = self.guard
        return placement

    def check_address(self, envelope: Envelope, *, is_users: bool) -> None:
        """Check the destination of a message.

        Raises:
            RecordFormatError: The message may not go to its destination.
        """
        if envelope.lane == records.SINK and envelope.address in self.schedules:
            problem = f"it goes to {envelope.address}, a schedules topic, where it would become a schedule again"
            raise RecordFormatError(problem)
        if self.guard is not None and is_users and envelope.address:
            try:
                self.guard(f"{envelope.lane}:{envelope.address}")
            except TargetNotAllowedError as error:
                raise RecordFormatError(str(error)) from error

    def note_stray(self, key: bytes) -> None:
        """Note and log the first key that belongs to another partition. Its message is still delivered from here."""
        if self.partitions <= 1 or self.is_mixed:
            return
        own = records.partition_of(key, self.partitions)
        if own == self.number:
            return
        self.is_mixed = True
        log.warning(
            "%s: message %s is in this partition, but belongs to partition %d: its producer has another partitioner "
            "than Java's. All records of an id must go to one partition, or a replace or cancel misses the message",
            self.name,
            records.id_of(key),
            own,
        )

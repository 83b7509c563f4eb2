"""`Placement`: the number of a partition, and the check that a message belongs there."""

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
        number: The partition's.
        partitions: How many the topic has.
        schedules: The topics that hold the store's schedules: a message to one of them would come back.
    """

    name: str
    number: int
    partitions: int
    schedules: Collection[str]

    def __init__(self, name: str, number: int = 0, partitions: int = 1, schedules: Collection[str] = ()) -> None:
        self.name, self.number, self.partitions, self.schedules = name, number, partitions, schedules
        self.guard: Callable[[str], object] | None = None
        """Refuses a destination to which other programs' messages may not go."""
        self.is_mixed: bool = False
        """The partition holds keys whose own partition is another one."""

    def unread(self) -> Placement:
        """Return the placement for reading the partition from its start: no key of another partition is known yet."""
        placement = Placement(self.name, self.number, self.partitions, self.schedules)
        placement.guard = self.guard
        return placement

    def check_address(self, envelope: Envelope, *, is_users: bool) -> None:
        """Check where a message goes.

        Raises:
            RecordFormatError: It may not go there.
        """
        if envelope.lane == records.SINK and envelope.address in self.schedules:
            raise RecordFormatError(f"it goes to {envelope.address}, which holds schedules: there it would come back")
        if self.guard is not None and is_users and envelope.address:
            try:
                self.guard(f"{envelope.lane}:{envelope.address}")
            except TargetNotAllowedError as error:
                raise RecordFormatError(str(error)) from error

    def look_for_strays(self, key: bytes) -> None:
        """Note and log the first key that belongs to another partition. Its message is delivered from here."""
        if self.partitions <= 1 or self.is_mixed:
            return
        own = records.partition_of(key, self.partitions)
        if own == self.number:
            return
        self.is_mixed = True
        log.warning(
            "%s: message %s stands here, and its own partition is %d: who wrote it has another partitioner than "
            "Java's. What is written of one id must go to one partition, to replace and cancel what was before",
            self.name,
            records.id_of(key),
            own,
        )

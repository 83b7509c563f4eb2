"""`Readiness`: how many owned partitions are ready, why a partition is not ready, and which rights are missing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.topics.remedies import is_missing_right, remedied
from aiodelay.backends.kafka.topics.topic import missing_rights
from aiodelay.core.values import WorkStatus
from aiodelay.errors import StoreMismatchError

from .assignment import Assignment

__all__ = ["Readiness"]


class Readiness:
    """Answers the questions of users about an assignment.

    Args:
        cluster: The cluster of the topics.
        schedules: The schedules topics. The first one takes new messages.
        assignment: The partitions that this process owns.
    """

    def __init__(self, cluster: Cluster, schedules: Sequence[str], assignment: Assignment) -> None:
        self._cluster, self._schedules, self._assignment = cluster, schedules, assignment

    async def until_ready(self) -> None:
        """Wait until this process has partitions, and then until it has read them.

        Each of the two waits lasts at most as long as the store's timeout.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._cluster.timeout_ms / 1000):
                for group in self._assignment.groups.values():
                    await group.was_assigned.wait()
        await asyncio.gather(*(partition.until_ready() for partition in self._assignment.partitions.values()))

    def status(self) -> WorkStatus:
        """Return how many of the owned partitions are ready.

        If other processes own all partitions, this process counts as ready while the topics are known to exist.
        """
        assignment = self._assignment
        partitions, doubts = assignment.partitions.values(), assignment.watch.doubts
        ready, total = sum(partition.is_ready for partition in partitions), len(partitions)
        if (problem := self.problem()) is not None:
            return WorkStatus("ended", ready, total, str(problem))
        is_assigned = all(group.was_assigned.is_set() for group in assignment.groups.values())
        if ready == total and is_assigned and not doubts:
            return WorkStatus("ready", ready, total, assignment.fullness())
        whys = [*doubts.values()] if ready == total else []
        return WorkStatus("loading", ready, total, next(iter([*whys, *self._whys()]), ""))

    def problem(self) -> StoreMismatchError | None:
        """Return the error that stops the delivery of a topic or a partition until the process starts again."""
        assignment = self._assignment
        problems = [assignment.too_new, *assignment.lost.values()]
        problems += [each.problem for each in assignment.groups.values()]
        problems += [each.problem for each in assignment.partitions.values()]
        return next(filter(None, problems), None)

    def _whys(self) -> list[str]:
        """Return the known reasons why partitions do not serve."""
        assignment = self._assignment
        whys = [each.why for each in assignment.partitions.values()]
        whys += [each.why or each.silence for each in assignment.groups.values()]
        return [why for why in (*whys, assignment.reader.why) if why]

    async def missing_rights(self) -> Sequence[str]:
        """Return the rights that this process lacks, each with the command that grants the right.

        A process that only schedules needs the right to write to the topic that it schedules into. An owner also needs
        the rights to read, to join the group and to begin transactions. An owner has already tried to use these three.
        If one of them is missing, the reasons why its partitions do not serve name it.
        """
        if self._assignment.is_owner:
            found = await missing_rights(self._cluster, self._schedules, ("Read", "Write"))
            found += [why for why in self._whys() if is_missing_right(why)]
        else:
            found = await missing_rights(self._cluster, self._schedules[:1], ("Write",))
        return [remedied(each, self._cluster) for each in dict.fromkeys(found)]

    def lost_topic(self) -> str:
        """Return why a topic that this process schedules into is lost; "" = no such topic is lost.

        For an owner, return "": the status of the owner reports a lost topic.
        """
        return "" if self._assignment.is_owner else next(map(str, self._assignment.lost.values()), "")

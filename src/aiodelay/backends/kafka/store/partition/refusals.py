"""`Refusals`: reacts when topics refuse records of a transaction.

If a topic refuses all records, it counts as blocked. If it refuses one record for good, the message becomes a dead
letter.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from aiodelay.backends.kafka.client import PERMANENT, TOO_LARGE, AbortedError, Outgoing, Written, reason_of
from aiodelay.backends.kafka.pending.changes import Change
from aiodelay.backends.kafka.pending.suspects import Suspects
from aiodelay.backends.kafka.topics.targets import Targets, refused_topics
from aiodelay.core.values import Dead

from .batch import Batch
from .read_progress import ReadProgress

__all__ = ["Refusals"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")


class Refusals:
    """Handles the refusals that one partition's writer meets.

    Args:
        topic: The partition's own topic.
        history: The history topic; "" = none.
        progress: The partition's index.
        targets: Knows which topics take messages.
    """

    suspects: Suspects

    def __init__(self, topic: str, history: str, progress: ReadProgress, targets: Targets) -> None:
        self._topic, self._history, self._progress, self._targets = topic, history, progress, targets
        self.suspects = Suspects()
        """Changes that were refused together. At least one of them may be refused for good."""

    # --- which topic has refused --------------------------------------------------------------------------

    def note_topics(self, error: AbortedError, outgoing: Sequence[Outgoing]) -> bool:
        """Note the topics that refuse all records now. If there are any, return True: no single record is at fault."""
        failed = [(outgoing[each.indices[0]].topic, each.error) for each in error.written if each.error is not None]
        refused: dict[str, str] = {}
        for topic, why in failed:
            named = [topic] if topic == self._history else refused_topics(why, topic)
            refused |= dict.fromkeys(named, reason_of(why))
        if self._topic not in refused:  # if the partition itself refuses, the error says nothing about other topics
            for topic, reason in refused.items():
                self._targets.refused(topic, reason)
        return bool(refused)

    def is_by_partition(
        self,
        error: AbortedError,
        outgoing: Sequence[Outgoing],
        kinds: tuple[type[Exception], ...] = PERMANENT,
    ) -> bool:
        """Say whether the partition itself has refused a record with an error of these kinds."""
        failed = (each for each in error.written if isinstance(each.error, kinds))
        return any(outgoing[each.indices[0]].topic == self._topic for each in failed)

    def is_too_large(self, error: AbortedError, outgoing: Sequence[Outgoing]) -> bool:
        """Say whether the partition itself has refused a record as too large."""
        return self.is_by_partition(error, outgoing, TOO_LARGE)

    # --- records that a target topic refuses for good -----------------------------------------------------

    def set_apart(self, written: Sequence[Written], batch: Batch) -> None:
        """Give up a message whose record was refused alone. Halve records refused together, to retry each half."""
        changes = batch.change_of_each_record()
        left = dict.fromkeys(changes)
        for each in written:
            if not isinstance(each.error, PERMANENT):
                continue
            refused = [changes[i] for i in each.indices]
            for change in refused:
                left.pop(change, None)
            record = batch.outgoing[each.indices[0]]
            if len(refused) > 1:
                self._targets.doubt(record.topic)
                self.suspects.halve(refused)
            else:
                if isinstance(each.error, TOO_LARGE):
                    self._targets.found_too_large(record)
                self._give_up(refused[0], f"topic {record.topic} refuses its record: {reason_of(each.error)}")
        self._progress.index.log.changes.extendleft(reversed(left))

    async def give_up_large(self) -> None:
        """Give up suspects that are larger than the limit of their topic, if the limit may be read.

        Raises:
            StoreUnavailableError: The cluster does not answer.
        """
        await self._targets.confirm({record.topic for change in self.suspects for record in change.targets})
        large = {change: excess for change in self.suspects if (excess := self.excess(change))}
        self.suspects.discard(large)
        for change, excess in large.items():
            self._give_up(change, excess)

    def excess(self, change: Change) -> str:
        """Return why a message is too large for its topic. Return "" if it is not, or if the limit is unknown."""
        for record in change.targets:
            if excess := self._targets.excess(record):
                return excess
        return ""

    def _give_up(self, change: Change, why: str) -> None:
        """Make a dead letter of a message that its topic never takes."""
        assert change.entry is not None
        record, then = change.entry.record, None if change.put is None else change.put[1]
        key, index = (record.id, record.revision, change.entry.token), self._progress.index
        if index.decisions.end_instead(change, Dead(*key, "not_retryable", record.attempt + 1, why, then)) is not None:
            log.error("%s: message %s becomes a dead letter: %s", index.name, record.id, why)
        change.tell(written=False)

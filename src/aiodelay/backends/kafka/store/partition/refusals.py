"""`Refusals`: what follows when a topic refuses a transaction's records: a topic waits, or a message is given up."""

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
    """The refusals of one partition's writer.

    Args:
        topic: The partition's own topic.
        history: The history topic; "" = none.
        progress: The partition's index.
        targets: Which topics take messages.
    """

    suspects: Suspects

    def __init__(self, topic: str, history: str, progress: ReadProgress, targets: Targets) -> None:
        self._topic, self._history, self._progress, self._targets = topic, history, progress, targets
        self.suspects = Suspects()
        """Changes of which one may be refused for good."""

    # --- who has refused what -----------------------------------------------------------------------------

    def note_topics(self, error: AbortedError, outgoing: Sequence[Outgoing]) -> bool:
        """Note the topics that refuse all records now; say whether there are any: then no record is at fault."""
        failed = [(outgoing[each.indices[0]].topic, each.error) for each in error.written if each.error is not None]
        refused: dict[str, str] = {}
        for topic, why in failed:
            named = [topic] if topic == self._history else refused_topics(why, topic)
            refused |= dict.fromkeys(named, reason_of(why))
        if self._topic not in refused:  # otherwise nothing is known of the others
            for topic, reason in refused.items():
                self._targets.refused(topic, reason)
        return bool(refused)

    def is_by_partition(
        self,
        error: AbortedError,
        outgoing: Sequence[Outgoing],
        kinds: tuple[type[Exception], ...] = PERMANENT,
    ) -> bool:
        """Say whether the partition itself has refused a record, for one of these kinds of error."""
        failed = (each for each in error.written if isinstance(each.error, kinds))
        return any(outgoing[each.indices[0]].topic == self._topic for each in failed)

    def is_too_large(self, error: AbortedError, outgoing: Sequence[Outgoing]) -> bool:
        """Say whether the partition itself has no room for a record."""
        return self.is_by_partition(error, outgoing, TOO_LARGE)

    # --- what a target topic refuses of one message -------------------------------------------------------

    def set_apart(self, written: Sequence[Written], batch: Batch) -> None:
        """Give up a message whose record was refused alone; try records apart that were refused together."""
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
        """Give up suspects that are larger than what their topics take, as far as that may be read.

        Raises:
            StoreUnavailableError: The cluster does not answer.
        """
        await self._targets.confirm({record.topic for change in self.suspects for record in change.targets})
        large = {change: excess for change in self.suspects if (excess := self.excess(change))}
        self.suspects.discard(large)
        for change, excess in large.items():
            self._give_up(change, excess)

    def excess(self, change: Change) -> str:
        """Say why a message is too large for its topic; "" if it is not, as far as is known."""
        return next((excess for record in change.targets if (excess := self._targets.excess(record))), "")

    def _give_up(self, change: Change, why: str) -> None:
        """Make a dead letter of a message that its topic does not take, now or later."""
        assert change.entry is not None
        record, then = change.entry.record, None if change.put is None else change.put[1]
        key, index = (record.id, record.revision, change.entry.token), self._progress.index
        if index.decisions.end_instead(change, Dead(*key, "not_retryable", record.attempt + 1, why, then)) is not None:
            log.error("%s: message %s becomes a dead letter: %s", index.name, record.id, why)
        change.tell(written=False)

"""`HistoryTopic`: whether the history topic takes entries now. The partition's writer asks before each transaction."""

from __future__ import annotations

import logging
from contextlib import suppress

from aiodelay.backends.kafka.topics.targets import Targets
from aiodelay.errors import StoreUnavailableError
from aiodelay.ports.clock import Clock

__all__ = ["HistoryTopic"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")


class HistoryTopic:
    """The state of the history topic, for the writer of one partition.

    Args:
        topic: The topic; "" = none.
        targets: Knows which topics take messages.
        clock: The clock of the store.
        name: The topic and the number of the partition, for logs.
    """

    def __init__(self, topic: str, targets: Targets, clock: Clock, *, name: str) -> None:
        self.topic = topic
        self._targets, self._clock, self._name = targets, clock, name
        self._was_open = True

    async def is_open(self) -> bool:
        """Say whether the topic takes entries. While it does not, entries wait in memory."""
        topic, targets = self.topic, self._targets
        if not topic or topic in targets.known():
            return bool(topic)
        blocked = targets.blocked.get(topic)
        if blocked is None or blocked.until_ms <= self._clock.now_ms():
            with suppress(StoreUnavailableError):
                await targets.inspect([topic])
        is_open = topic in targets.known()
        if self._was_open != is_open:
            level = logging.INFO if is_open else logging.ERROR
            what = "takes entries again" if is_open else "takes no entries now, so they wait in memory"
            log.log(level, "%s: history topic %s %s", self._name, topic, what)
        self._was_open = is_open
        return is_open

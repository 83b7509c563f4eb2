"""A thread that reports to a store or source that this process lives, even while a handler blocks the event loop.

So only the end of a process counts against a suspect, not a blocked event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from threading import Event, Thread

from aiodelay.ports import Feed

__all__ = ["Heartbeat"]

log: logging.Logger = logging.getLogger("aiodelay.heartbeat")

JOIN_S = 0.1
"""Longest wait for the thread's end, in seconds. If a beat takes longer, the thread ends after the beat."""


class Heartbeat:
    """Sends beats from `start` to `stop`, while this process holds suspects.

    Args:
        work: A store's dispatching side, or a feed of a source.
        interval_s: The time between two beats.
    """

    def __init__(self, work: Feed, interval_s: float) -> None:
        self._work, self._interval_s = work, interval_s
        self._stop = Event()
        self._thread: Thread | None = None

    def start(self, suspects: Callable[[], Collection[str]]) -> None:
        """Start the thread, unless it already runs. The thread calls `suspects` for the ids that each beat reports."""
        if self._thread is None:
            self._thread = Thread(target=self._run, args=(suspects,), name="aiodelay heartbeat", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _run(self, suspects: Callable[[], Collection[str]]) -> None:
        while not self._stop.wait(self._interval_s):
            if ids := suspects():
                self._beat(ids)

    def _beat(self, ids: Collection[str]) -> None:
        try:
            self._work.beat(ids)
        except Exception as error:  # noqa: BLE001 - the next beat makes up for it
            log.debug("a heartbeat failed: %r", error)

"""`FailoverProbe`: notes when servers work again after a failover, and how long a client needs from then on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from .waiting import until_sync

__all__ = ["FailoverProbe"]

STEP_S = 0.05
FAILOVER_S = 60.0


class FailoverProbe:
    """Asks servers again and again whether they work again, in a thread of its own.

    The probe counts its steps as its clock. A slow machine slows down the probe together with the client to measure.

    Args:
        works: Asks the servers. If it raises, they do not work.

    Attributes:
        works_ns: When the servers have first worked again; 0 while they do not.
    """

    def __init__(self, works: Callable[[], bool]) -> None:
        self._works = works
        self._steps_ns: list[int] = []
        self.works_ns: int = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="failover probe")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def wait(self) -> None:
        """Wait until the servers work again."""
        until_sync(lambda: self.works_ns > 0, "the servers work again", FAILOVER_S)

    def seconds_until(self, at_ns: int) -> float:
        """Return the probe's seconds from the servers' first answer until a monotonic time; 0 if it is earlier."""
        assert self.works_ns, "the servers do not work"
        return STEP_S * sum(self.works_ns <= each <= at_ns for each in self._steps_ns)

    def _run(self) -> None:
        while not self._is_over.wait(STEP_S):
            with suppress(OSError, AssertionError):
                if not self.works_ns and self._works():
                    self.works_ns = time.monotonic_ns()
            self._steps_ns.append(time.monotonic_ns())

"""SIGINT and SIGTERM as the start of an orderly end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from types import FrameType

__all__ = ["SAME_S", "Stop", "end_by", "handled_numbers", "stop_signals", "tell_end"]

log: logging.Logger = logging.getLogger("aiodelay.cli")

SAME_S = 0.3
"""A signal that comes so soon after the first one belongs to it: a process manager and a shell may both send one."""


class Stop(asyncio.Event):
    """An event that asks the process to end in order."""

    _opening: asyncio.Timeout | None = None

    def set(self) -> None:
        """Ask for the end; an opening under way is cancelled."""
        super().set()
        if self._opening is not None:
            self._opening.reschedule(asyncio.get_running_loop().time())

    async def opens(self, stack: AsyncExitStack, what: AbstractAsyncContextManager[object]) -> bool:
        """Enter a context, unless the end is asked for first: opening may wait for a store that does not answer.

        Args:
            stack: Leaves the context at its own end.
            what: The context. It is entered in the caller's task.

        Returns:
            Whether it was entered.
        """
        if self.is_set():
            return False
        opening = asyncio.timeout(None)
        try:
            async with opening:
                self._opening = opening
                await stack.enter_async_context(what)
        except TimeoutError:
            if not opening.expired():
                raise
            return False
        finally:
            self._opening = None
        return True


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Yield an event that the first SIGINT, SIGTERM or SIGHUP sets; a later signal ends the process at once.

    Signals within `SAME_S` of the first one are ignored. Python's own handlers are used, so that the later signal works
    even while something blocks the event loop; `loop.add_signal_handler` would have to wait for the loop. SIGHUP is
    left alone where it is ignored, as under `nohup`.
    """
    loop, stop = asyncio.get_running_loop(), Stop()
    first_s: float | None = None

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal first_s
        now_s = time.monotonic()
        if first_s is None:
            first_s = now_s
            loop.call_soon_threadsafe(stop.set)
        elif now_s - first_s >= SAME_S:
            signal.signal(number, signal.SIG_DFL)  # if writing the log gets stuck, the next signal ends the process
            tell_end(number)
            end_by(number)

    before = {number: signal.signal(number, on_signal) for number in handled_numbers()}
    try:
        yield stop
    finally:
        if first_s is None:  # else the handler stays until the process has ended
            for number, handler in before.items():
                signal.signal(number, handler)


def handled_numbers() -> list[int]:
    """Return the signals that ask for an orderly end: SIGINT, SIGTERM, and SIGHUP unless it is ignored or handled."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        numbers.append(signal.SIGHUP)
    return [*numbers]


def tell_end(number: int) -> None:
    """Say that a later signal ends the process at once."""
    log.warning("ending at once on a later %s; messages in flight are delivered again", signal.Signals(number).name)


def end_by(number: int) -> None:
    """End the process as a signal does by default."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)

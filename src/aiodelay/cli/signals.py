"""`stop_signals`: turns the first SIGINT, SIGTERM or SIGHUP into an orderly end of the process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from types import FrameType

__all__ = ["SAME_S", "Stop", "end_by", "handled_numbers", "log_end", "stop_signals"]

log: logging.Logger = logging.getLogger("aiodelay.cli")

SAME_S = 0.3
"""Seconds in which further signals count as the first signal: a process manager and a shell may both send one."""


class Stop(asyncio.Event):
    """The event that asks the process to end in order."""

    _opening: asyncio.Timeout | None = None

    def set(self) -> None:
        """Ask for the end. If `opens` is still entering its context, cancel it."""
        super().set()
        if self._opening is not None:
            self._opening.reschedule(asyncio.get_running_loop().time())

    async def opens(self, stack: AsyncExitStack, what: AbstractAsyncContextManager[object]) -> bool:
        """Enter a context. If the end is asked for before the context is entered, give up.

        To enter may take long if a store does not answer.

        Args:
            stack: The stack that leaves the context later.
            what: The context. The task of the caller enters it.

        Returns:
            Whether the context was entered.
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
    """Yield an event that the first SIGINT, SIGTERM or SIGHUP sets. A later signal ends the process at once.

    Signals within `SAME_S` of the first signal are ignored. The function uses `signal.signal`, whose handlers run even
    while code blocks the event loop. Handlers of `loop.add_signal_handler` would have to wait for the loop. If SIGHUP
    is ignored already, as under `nohup`, it stays ignored.
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
            signal.signal(number, signal.SIG_DFL)  # if the log line blocks, the next signal still ends the process
            log_end(number)
            end_by(number)

    before = {number: signal.signal(number, on_signal) for number in handled_numbers()}
    try:
        yield stop
    finally:
        if first_s is None:  # after a signal, the handlers stay set: a later signal must end the process
            for number, handler in before.items():
                signal.signal(number, handler)


def handled_numbers() -> list[int]:
    """Return the signals that ask for an orderly end: SIGINT and SIGTERM; also SIGHUP if it has its default action."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        numbers.append(signal.SIGHUP)
    return [*numbers]


def log_end(number: int) -> None:
    """Log that a later signal ends the process at once."""
    name = signal.Signals(number).name
    log.warning("a later %s has come: the process ends at once; messages in flight are delivered again", name)


def end_by(number: int) -> None:
    """End the process by the default action of a signal."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)

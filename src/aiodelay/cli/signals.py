"""SIGINT and SIGTERM as the start of an orderly end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from types import FrameType

__all__ = ["Stop", "stop_signals"]


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
    """Yield an event that the first SIGINT, SIGTERM or SIGHUP sets; the second one ends the process at once.

    The signals' default action is put back at the first one, so that the second works even while something blocks the
    event loop; `loop.add_signal_handler` would have to wait for the loop. SIGHUP is left alone where it is ignored, as
    under `nohup`.
    """
    loop, stop = asyncio.get_running_loop(), Stop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        numbers.append(signal.SIGHUP)

    def begin_to_stop(number: int, frame: FrameType | None) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_DFL)
        loop.call_soon_threadsafe(stop.set)

    before = {number: signal.signal(number, begin_to_stop) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is begin_to_stop:  # else it came: what follows ends the process at once
                signal.signal(number, handler)

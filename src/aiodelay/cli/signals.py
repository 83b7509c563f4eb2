"""SIGINT and SIGTERM as the start of an orderly end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["stop_signals"]


@contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """Yield an event that the first SIGINT, SIGTERM or SIGHUP sets; the second one ends the process at once.

    The signals' default action is put back at the first one, so that the second works even while something blocks the
    event loop; `loop.add_signal_handler` would have to wait for the loop. SIGHUP is left alone where it is ignored, as
    under `nohup`.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
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

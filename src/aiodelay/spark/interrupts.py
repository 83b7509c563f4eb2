"""Handling of Ctrl-C in jobs that run until they are interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["noted_interrupts"]


@contextmanager
def noted_interrupts() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C (SIGINT) sets. Inside the block, Ctrl-C does not raise `KeyboardInterrupt`.

    An exception in the middle of a call to Spark can make the client of a Connect session wait for ever. Only the main
    thread receives signals. If another thread enters the block, the event is never set.
    """
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)

"""Let a process run out of memory."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from pathlib import Path

__all__ = ["listen_for_memory_faults", "take_memory"]

_TAKE = signal.SIGUSR2
_PIECES = (1 << 20, 1 << 16, 1 << 12)
"""The sizes of the pieces that are taken, in bytes. After that, a larger piece is no longer free."""


def listen_for_memory_faults(loop: asyncio.AbstractEventLoop) -> None:
    """Let another process call `take_memory` for this process."""
    taken: list[bytearray] = []

    def take() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE"), resource.RLIM_INFINITY))
        for size in _PIECES:
            try:
                while True:
                    taken.append(bytearray(size))
            except MemoryError:
                continue

    loop.add_signal_handler(_TAKE, take)


def take_memory(pid: int) -> None:
    """Let a process take all memory that it has free, and allow it no more. Its memory does not come back."""
    os.kill(pid, _TAKE)

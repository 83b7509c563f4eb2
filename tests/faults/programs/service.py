"""`aiodelay serve` that prints its resources on SIGUSR1, as JSON: tasks by name, threads, files, memory."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
from collections import Counter
from pathlib import Path

from aiodelay.cli import main
from tests.support.sessions import shorten_sessions


def tell(*_: object) -> None:
    """Write it; a signal's handler runs between two steps of the loop, or within one."""
    resident = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    held = {
        "tasks": Counter(map(name_of, asyncio.all_tasks(asyncio.get_running_loop()))),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "kb": int(resident[1]) if resident else 0,
    }
    print(json.dumps(held), flush=True)


def name_of(task: asyncio.Task[object]) -> str:
    """Return what a task is called, or runs."""
    return re.sub(r"^Task-\d+$", getattr(task.get_coro(), "__qualname__", ""), task.get_name())


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, tell)
    shorten_sessions()
    main()

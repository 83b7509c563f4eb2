"""The open files and threads of this process, which a test compares before and after its work."""

from __future__ import annotations

import os
import threading
from pathlib import Path

__all__ = ["open_files", "threads"]


def open_files() -> set[str]:
    """Return the number and the target of each file descriptor."""
    names = (Path("/dev/fd") / name for name in os.listdir("/dev/fd"))
    return {f"{name.name} {os.readlink(name)}" for name in names if name.is_symlink()}


def threads() -> set[threading.Thread]:
    """Return all threads, except threads of aiodelay that are about to end."""
    for thread in threading.enumerate():
        if thread.name.startswith("aiodelay"):
            thread.join(5)
    return set(threading.enumerate())

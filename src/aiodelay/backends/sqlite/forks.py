"""Refuses a file that this process had open when it was forked.

SQLite keeps the locks of a file per process, and notes them in memory. A forked child has these notes, but not the
locks. If the child opens the file again, SQLite takes no lock for it. Another process may then delete the write-ahead
log that the child writes into. See "How To Corrupt An SQLite Database File", section 2.6.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TypeAlias

from aiodelay.errors import WrongLoopError

__all__ = ["Identity", "check_not_inherited", "note_closed", "note_opened"]

Identity: TypeAlias = tuple[int, int]
_open: Counter[Identity] = Counter()
_inherited: set[Identity] = set()


def check_not_inherited(path: str) -> None:
    """Refuse a file that was open when this process was forked.

    Raises:
        WrongLoopError: The file was open.
    """
    try:
        found = os.stat(path)
    except OSError:
        return
    if (found.st_dev, found.st_ino) in _inherited:
        raise WrongLoopError(
            "store", f"process: {path!r} was open when this process was forked. Close it before a fork"
        )


def note_opened(path: str) -> Identity:
    """Note a connection to a file. Return the identity of the file for `note_closed`."""
    found = os.stat(path)
    identity = found.st_dev, found.st_ino
    _open[identity] += 1
    return identity


def note_closed(identity: Identity) -> None:
    """Note that a connection is closed."""
    _open[identity] -= 1


def _inherit() -> None:
    _inherited.update(+_open)
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_inherit)

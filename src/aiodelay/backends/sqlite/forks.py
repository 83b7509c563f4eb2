"""Keeps a forked child away from the files that were open at the fork.

SQLite keeps the locks of a file per process, and notes them in memory. A forked child has these notes, but not the
locks. If the child opens the file again, SQLite takes no lock for it. Another process may then delete the write-ahead
log that the child writes into. The child must not close the inherited connections either. See "How To Corrupt An SQLite
Database File", section 2.6.
"""

from __future__ import annotations

import ctypes
import os
import sqlite3

from aiodelay.errors import WrongLoopError

from .file_identity import identity_of

__all__ = ["check_not_inherited", "note_closed", "note_opened"]

_open: dict[int, tuple[sqlite3.Connection, tuple[int, int] | None]] = {}
_inherited: set[tuple[int, int]] = set()


def check_not_inherited(path: str) -> None:
    """Refuse a file that was open when this process was forked.

    Raises:
        WrongLoopError: The file was open.
    """
    if identity_of(path) in _inherited:
        raise WrongLoopError(
            "store", f"process: {path!r} was open when this process was forked. Close it before a fork"
        )


def note_opened(connection: sqlite3.Connection, path: str) -> None:
    """Note a connection to a file. The caller calls `note_closed` when it has closed the connection."""
    _open[id(connection)] = connection, identity_of(path)


def note_closed(connection: sqlite3.Connection) -> None:
    """Note that a connection is closed."""
    _open.pop(id(connection), None)


def _inherit() -> None:
    for connection, identity in _open.values():
        if identity is not None:
            _inherited.add(identity)
        # Python must never close it: a thread of the parent may have held a lock inside SQLite.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_inherit)

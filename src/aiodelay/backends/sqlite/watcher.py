"""Noticing what other processes write: a thread that asks `PRAGMA data_version`, which costs no more than a lock."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable

from .connection import file_uri

__all__ = ["Watcher"]

POLL_S = 0.05


class Watcher:
    """Calls `changed`, in its own thread, within 50 ms of a commit by another connection.

    The store's own writer counts as such; it knows better whose commits those were.

    Args:
        path: The file.
        changed: Must not block.
    """

    def __init__(self, path: str, changed: Callable[[], object]) -> None:
        self._path, self._changed = path, changed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aiodelay-sqlite-watcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Have the thread end."""
        self._stop.set()

    def join(self) -> None:
        """Wait until it has ended: a few ms after `stop`."""
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                connection = sqlite3.connect(file_uri(self._path), isolation_level=None, uri=True)
                try:
                    self._watch(connection)
                finally:
                    connection.close()
            except sqlite3.Error:  # the safety poll goes on; perhaps the file can be opened again
                self._stop.wait(1)

    def _watch(self, connection: sqlite3.Connection) -> None:
        (seen,) = connection.execute("PRAGMA data_version").fetchone()
        self._changed()  # what was written before this connection was there
        while not self._stop.wait(POLL_S):
            (version,) = connection.execute("PRAGMA data_version").fetchone()
            if version != seen:
                seen = version
                self._changed()

"""`Watcher`: a thread that notices writes of other processes.

The thread reads `PRAGMA data_version` in short intervals. One read takes about as long as taking a lock.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable

from .connection import file_uri
from .forks import note_closed, note_opened

__all__ = ["Watcher"]

POLL_S = 0.05


class Watcher:
    """Calls `changed` in its own thread within 50 ms of a commit on another connection.

    The other connection may be the connection of this store's own writer. `Writer.look_around` finds out whether it
    was.

    Args:
        path: The path of the file.
        changed: The function to call. It must not block.
    """

    def __init__(self, path: str, changed: Callable[[], object]) -> None:
        self._path, self._changed = path, changed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aiodelay-sqlite-watcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Tell the thread to end. Do not wait for it."""
        self._stop.set()

    def join(self) -> None:
        """Wait until the thread has ended. This takes a few ms after `stop`."""
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                connection = sqlite3.connect(file_uri(self._path), isolation_level=None, uri=True)
                note_opened(connection, self._path)
                try:
                    self._watch(connection)
                finally:
                    connection.close()
                    note_closed(connection)
            except sqlite3.Error:  # Try to open the file again later. Until then, the safety poll finds due messages.
                self._stop.wait(1)

    def _watch(self, connection: sqlite3.Connection) -> None:
        (seen,) = connection.execute("PRAGMA data_version").fetchone()
        self._changed()  # Race: another process may have written before this connection read its first version.
        while not self._stop.wait(POLL_S):
            (version,) = connection.execute("PRAGMA data_version").fetchone()
            if version != seen:
                seen = version
                self._changed()

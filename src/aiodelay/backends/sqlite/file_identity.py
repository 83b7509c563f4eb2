"""`FileIdentity`: detects that somebody has deleted or replaced the file of an open store.

The process that opened the file then still writes into the old file, and other processes do not see its messages.
"""

from __future__ import annotations

import os
from contextlib import suppress

from aiodelay.backends.private_files import make_private
from aiodelay.ports.clock import SystemClock

__all__ = ["FileIdentity", "note_of"]

NOTED_MS = 60_000
"""How long a process's note that its file is gone stays valid. The process renews the note every 5 s."""
NOTE = "-vanished"


class FileIdentity:
    """The identity of the file that a store has opened.

    Args:
        path: The path of the file. Create this object right after the file was opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._opened = _identity(path)
        self._has_note = False

    def loss(self) -> str:
        """Describe how the file was lost; "" while the path still leads to the opened file."""
        found = _identity(self._path)
        if found == self._opened:
            return ""
        if found is None:
            return f"there is no file {self._path!r} any more; this process still writes into the deleted file"
        return f"another file has taken the place of {self._path!r}; this process still writes into the old file"

    def vanished(self) -> str:
        """Describe how the file was lost, and write a note next to the path; "" while the path leads to the file."""
        loss = self.loss()
        if loss:
            self._write_note()
        else:
            self.forget_note()
        return loss

    def _write_note(self) -> None:
        with suppress(OSError):  # The note is a help only: the log and the alarm report the loss too.
            make_private(self._path + NOTE)
            os.utime(self._path + NOTE)
            self._has_note = True

    def forget_note(self) -> None:
        """Delete the note of this process, if it has written one."""
        if self._has_note:
            with suppress(OSError):
                os.unlink(self._path + NOTE)
            self._has_note = False


def note_of(path: str) -> str:
    """Describe another process's note of the last minute that its file is no longer at this path; "" if none."""
    try:
        noted_ms = os.stat(path + NOTE).st_mtime_ns // 1_000_000
    except OSError:
        return ""
    if SystemClock().now_ms() - noted_ms > NOTED_MS:
        return ""
    return f"a process has a file open that was at {path!r} and was deleted or replaced; its messages are in that file"


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino

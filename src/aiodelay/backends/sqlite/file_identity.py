"""`FileIdentity`: detects that somebody has deleted or replaced the file of an open store.

After such a change, the process that has the store open still writes into the old file. Other processes do not see the
messages there.
"""

from __future__ import annotations

import os
from contextlib import suppress

from aiodelay.backends.private_files import make_private
from aiodelay.ports.clock import SystemClock

__all__ = ["FileIdentity", "identity_of", "note_of"]

NOTED_MS = 60_000
"""How long the note next to the path is valid, in ms.

A process that finds that its file is gone writes the note, and renews it every 5 s.
"""
NOTE = "-vanished"


class FileIdentity:
    """The identity of the file that a store has opened.

    Args:
        path: The path of the file. The caller creates this object right after it has opened the file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._opened = identity_of(path)
        self._has_note = False

    def loss(self) -> str:
        """Describe how the file was lost, or return "" if the path still leads to the opened file."""
        found = identity_of(self._path)
        if found == self._opened:
            return ""
        if found is None:
            return f"there is no file {self._path!r} any more; this process still writes into the deleted file"
        return f"another file has taken the place of {self._path!r}; this process still writes into the old file"

    def vanished(self) -> str:
        """Describe how the file was lost and write a note next to the path. Return "" if the file is not lost."""
        loss = self.loss()
        if loss:
            self._write_note()
        else:
            self.forget_note()
        return loss

    def _write_note(self) -> None:
        with suppress(OSError):  # The note is not essential, because the log and the alarm report the loss too.
            make_private(self._path + NOTE)
            os.utime(self._path + NOTE)
            self._has_note = True

    def forget_note(self) -> None:
        """Delete the note, if this object has written one."""
        if self._has_note:
            with suppress(OSError):
                os.unlink(self._path + NOTE)
            self._has_note = False


def note_of(path: str) -> str:
    """Describe the loss that a note of the last minute reports for a file at this path.

    Return "" without such a note.
    """
    try:
        noted_ms = os.stat(path + NOTE).st_mtime_ns // 1_000_000
    except OSError:
        return ""
    if SystemClock().now_ms() - noted_ms > NOTED_MS:
        return ""
    return f"the file {path!r} was deleted or replaced, but a process still keeps its messages in the old file"


def identity_of(path: str) -> tuple[int, int] | None:
    """Return the device and the inode of the file at a path; None if there is no file, or it cannot be asked."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino

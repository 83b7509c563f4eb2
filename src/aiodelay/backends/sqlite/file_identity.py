"""Which file a path leads to: a running process keeps the file that it opened, whatever takes its place."""

from __future__ import annotations

import os
from contextlib import suppress

from aiodelay.backends.private_files import make_private
from aiodelay.ports.clock import SystemClock

__all__ = ["FileIdentity", "note_of"]

NOTED_MS = 60_000
"""How long a process's note counts that its file is gone; it renews the note every 5 s."""
NOTE = "-vanished"


class FileIdentity:
    """The file that a store was opened on.

    Args:
        path: The file; it was opened just now.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._opened = _identity(path)
        self._has_note = False

    def loss(self) -> str:
        """Return how the file was lost; "" while the path leads to it."""
        found = _identity(self._path)
        if found == self._opened:
            return ""
        if found is None:
            return f"there is no file {self._path!r} any more; this process still writes into the deleted file"
        return f"another file has taken the place of {self._path!r}; this process still writes into the old file"

    def vanished(self) -> str:
        """Return how the file was lost; "" while the path leads to it. Write a note of the loss beside the path."""
        loss = self.loss()
        if loss:
            self._write_note()
        else:
            self.forget_note()
        return loss

    def _write_note(self) -> None:
        with suppress(OSError):  # a note may fail: the log and the alarm tell as well
            make_private(self._path + NOTE)
            os.utime(self._path + NOTE)
            self._has_note = True

    def forget_note(self) -> None:
        """Delete the note that this process has written, if it has."""
        if self._has_note:
            with suppress(OSError):
                os.unlink(self._path + NOTE)
            self._has_note = False


def note_of(path: str) -> str:
    """Return what another process has noted within the last minute: that its file was not at this path any more."""
    try:
        noted_ms = os.stat(path + NOTE).st_mtime_ns // 1_000_000
    except OSError:
        return ""
    if SystemClock().now_ms() - noted_ms > NOTED_MS:
        return ""
    return (
        f"a process has a file open that stood at {path!r} and was deleted or replaced; its messages are in that file"
    )


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino

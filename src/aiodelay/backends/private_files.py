"""New files that hold messages: for their owner alone."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["make_private"]

OWNER_ONLY = 0o600


def make_private(path: str) -> None:
    """Make an empty file that its owner alone may read and write, unless there is a file or none can be made."""
    with suppress(OSError):  # the caller opens the file next, and gets the error
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, OWNER_ONLY))

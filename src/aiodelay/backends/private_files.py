"""Creates files that hold messages. Only the owner of such a file may read and write it."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["make_private"]

OWNER_ONLY = 0o600


def make_private(path: str) -> None:
    """Create an empty file that only its owner may read and write.

    If the file exists or cannot be created, do nothing.
    """
    with suppress(OSError):  # The caller opens the file next, and sees the same error there.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, OWNER_ONLY))

"""Message ids and op ids. A generated message id is a UUIDv7 as 32 hexadecimal digits, so ids sort by creation."""

from __future__ import annotations

import os
import sys

if sys.version_info >= (3, 14):
    from uuid import uuid7
else:
    from uuid_utils import uuid7

__all__ = ["new_id", "new_op"]


def new_id() -> str:
    """Return a new, unique message id."""
    return uuid7().hex


def new_op() -> bytes:
    """Return 8 random bytes: the id of one command, however often it is sent."""
    return os.urandom(8)

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
    """Return a new op: 8 random bytes that identify one command. A repeat of the command has the same op."""
    return os.urandom(8)

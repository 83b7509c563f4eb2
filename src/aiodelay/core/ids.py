"""Ids and op ids. A message's own id is a UUIDv7 as 32 hexadecimal digits: it sorts by the time it was made."""

from __future__ import annotations

import os
import sys

if sys.version_info >= (3, 14):
    from uuid import uuid7
else:
    from uuid_utils import uuid7

__all__ = ["new_id", "new_op"]


def new_id() -> str:
    """Return a message id that nobody else has."""
    return uuid7().hex


def new_op() -> bytes:
    """Return 8 random bytes: one command, however often it is sent."""
    return os.urandom(8)

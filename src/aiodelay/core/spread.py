"""Spreads messages that are due at the same time over a span of time.

The id of a message gives its place in the span. So it has the same place each day, and a repeated call changes nothing.
"""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["spread_ms_of"]

_BITS = 64


def spread_ms_of(message_id: str, span_ms: int) -> int:
    """Return by how many ms the due time of a message moves: 0 to `span_ms` - 1, evenly distributed over the ids."""
    digest = blake2b(message_id.encode("utf-8", "surrogatepass"), digest_size=_BITS // 8).digest()
    return int.from_bytes(digest, "big") * span_ms >> _BITS

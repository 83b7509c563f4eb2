"""Empty stores that other processes can read in parts: SQLite, and a server of each Redis product."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.servers import Found, redis_products, serving

__all__ = ["SHARED_STORES", "empty_store"]

SHARED_STORES: tuple[str | Found, ...] = ("sqlite", *redis_products())


@contextmanager
def empty_store(kind: str | Found, folder: Path, query: str = "") -> Iterator[str]:
    """Yield the URL of an empty store of one kind of `SHARED_STORES`, with a query such as `?journal=200`."""
    if isinstance(kind, str):
        yield f"sqlite:///{folder / 'delay.db'}{query}"
        return
    with serving(kind) as server:
        yield f"{server}{query}"

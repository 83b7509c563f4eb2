"""The embedded, durable store: `sqlite:///file`."""

from __future__ import annotations

from .store import SqliteStore, open_store

__all__ = ["SqliteStore", "open_store"]

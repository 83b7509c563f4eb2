"""The SQLite store, `sqlite:///file`: an embedded, durable store that needs no server.

Begin with `store`. `schema.sql` defines the tables. Only the thread of `writer` writes to them.
"""

from __future__ import annotations

from .store import SqliteStore, open_store

__all__ = ["SqliteStore", "open_store"]

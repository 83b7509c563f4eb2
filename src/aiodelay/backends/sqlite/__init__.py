"""The SQLite store, `sqlite:///file`: a durable store in a file. It needs no server.

Begin with the module `store`. `schema.sql` defines the tables. Only the thread of `Writer` writes to them.
"""

from __future__ import annotations

from .store import SqliteStore, open_store

__all__ = ["SqliteStore", "open_store"]

"""The embedded, durable store: `sqlite:///file`.

Begin with `store`; `schema.sql` has the tables, and the one thread of `writer` writes them.
"""

from __future__ import annotations

from .store import SqliteStore, open_store

__all__ = ["SqliteStore", "open_store"]

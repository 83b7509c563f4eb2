"""The SQLite store, for users. The public names of `aiodelay.backends.sqlite`."""

from aiodelay.backends.sqlite import SqliteStore, open_store

__all__ = ["SqliteStore", "open_store"]

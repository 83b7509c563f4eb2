"""The memory store, for users. The public names of `aiodelay.backends.memory`."""

from aiodelay.backends.memory import MemoryStore, open_store

__all__ = ["MemoryStore", "open_store"]

"""`memory://`: the reference store, the specification in code; it survives nothing."""

from .store import MemoryStore, open_store

__all__ = ["MemoryStore", "open_store"]

"""The memory store, `memory://`. It is the reference for all other stores, and loses its messages with the process."""

from .store import MemoryStore, open_store

__all__ = ["MemoryStore", "open_store"]

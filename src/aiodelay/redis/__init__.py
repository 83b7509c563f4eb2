"""`redis://`, `rediss://`, `unix://`, `valkey://`, `valkeys://`: the store that several machines share."""

from .store import RedisStore, open_store

__all__ = ["RedisStore", "open_store"]

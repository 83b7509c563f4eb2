"""`redis://`, `rediss://`, `unix://`, `valkey://`, `valkeys://`: the store that several machines share."""

from .lists import RedisListSink, open_list_sink
from .store import RedisStore, open_store

__all__ = ["RedisListSink", "RedisStore", "open_list_sink", "open_store"]

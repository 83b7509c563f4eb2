"""`redis://`, `rediss://`, `unix://`, `valkey://`, `valkeys://`: the store that several machines share."""

from .lists import RedisListSink, open_list_sink
from .store import RedisStore, open_store
from .taking import RedisListSource, open_list_source

__all__ = ["RedisListSink", "RedisListSource", "RedisStore", "open_list_sink", "open_list_source", "open_store"]

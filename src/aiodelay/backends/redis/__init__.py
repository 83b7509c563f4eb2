"""The Redis store, and the lists, topics and logs on a Redis server. Any number of machines can share them.

The store has the URL schemes `redis://`, `rediss://`, `unix://`, `valkey://` and `valkeys://`. All of
these except `unix://` also exist with `+cluster` and `+sentinel`.
"""

from aiodelay.errors import missing_extra as _missing_extra

try:
    from .fanout.sink import RedisFanoutSink, open_fanout_sink
    from .fanout.source import RedisFanoutSource, open_fanout_source
    from .fanout.topics import Consumer, RedisFanout, Topic
    from .lists.sink import RedisListSink, open_list_sink
    from .lists.source import RedisListSource, open_list_source
    from .log.entries import LogEntry, LogMessage, LogStart
    from .log.log import RedisLog, open_log
    from .log.topics import LogConsumer, LogTopic
    from .sharded.store import ShardedStore, open_store
    from .store.store import RedisStore
except ImportError as _error:
    raise _missing_extra(_error, "aiodelay.redis", "redis") from _error

__all__ = [
    "Consumer",
    "LogConsumer",
    "LogEntry",
    "LogMessage",
    "LogStart",
    "LogTopic",
    "RedisFanout",
    "RedisFanoutSink",
    "RedisFanoutSource",
    "RedisListSink",
    "RedisListSource",
    "RedisLog",
    "RedisStore",
    "ShardedStore",
    "Topic",
    "open_fanout_sink",
    "open_fanout_source",
    "open_list_sink",
    "open_list_source",
    "open_log",
    "open_store",
]

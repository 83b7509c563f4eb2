"""Kafka: a compacted topic as the only database, and topics as destinations and sources."""

from aiodelay.errors import missing_extra as _missing_extra

try:
    from .sink import KafkaSink, open_sink
    from .source import KafkaSource, open_source
    from .store.store import KafkaStore, open_store
except ImportError as _error:
    raise _missing_extra(_error, "aiodelay.kafka", "kafka") from _error

__all__ = ["KafkaSink", "KafkaSource", "KafkaStore", "open_sink", "open_source", "open_store"]

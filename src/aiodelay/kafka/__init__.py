"""Kafka: a compacted topic as the only database, and topics as destinations and sources."""

from .sink import KafkaSink, open_sink
from .source import KafkaSource, open_source
from .store import KafkaStore, open_store

__all__ = ["KafkaSink", "KafkaSource", "KafkaStore", "open_sink", "open_source", "open_store"]

"""Kafka: a compacted topic as the only database, and topics as destinations."""

from .sink import KafkaSink, open_sink
from .store import KafkaStore, open_store

__all__ = ["KafkaSink", "KafkaStore", "open_sink", "open_store"]

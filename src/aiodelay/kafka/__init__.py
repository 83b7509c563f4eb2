"""Kafka: a compacted topic as the only database, and topics as destinations."""

from .sink import KafkaSink, open_sink

__all__ = ["KafkaSink", "open_sink"]

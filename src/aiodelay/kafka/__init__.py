"""Public names for Kafka: the sink, the source and the store of `aiodelay.backends.kafka`."""

from aiodelay.backends.kafka import KafkaSink, KafkaSource, KafkaStore, open_sink, open_source, open_store

__all__ = ["KafkaSink", "KafkaSource", "KafkaStore", "open_sink", "open_source", "open_store"]

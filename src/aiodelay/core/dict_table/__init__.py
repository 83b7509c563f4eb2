"""The interface `Table`, implemented with dicts, for the memory store and the pending messages of a Kafka partition."""

__all__: list[str] = []

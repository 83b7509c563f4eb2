"""Fan-out topics on a Redis server. Each consumer of such a topic gets every message."""

__all__: list[str] = []

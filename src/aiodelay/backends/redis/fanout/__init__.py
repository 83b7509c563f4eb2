"""Fan-out topics: each consumer of such a topic gets every message."""

__all__: list[str] = []

"""Fan-out: topics whose consumers each get every message."""

__all__: list[str] = []

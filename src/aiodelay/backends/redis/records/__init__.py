"""How keys, records and list elements are written in Redis, and how they are read."""

__all__: list[str] = []

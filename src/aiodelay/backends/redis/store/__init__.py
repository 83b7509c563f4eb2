"""The Redis store. Begin with `store` (commands) and `work` (claims and settlements)."""

__all__: list[str] = []

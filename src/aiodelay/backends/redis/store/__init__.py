"""The Redis store. Read the modules `store` (commands) and `work` (claims and settlements) first."""

__all__: list[str] = []

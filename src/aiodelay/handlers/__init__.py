"""What the engine runs: handlers and their event types, the context they get, their dependencies and middleware."""

__all__: list[str] = []

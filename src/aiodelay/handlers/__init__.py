"""Handlers and their event types, with the contexts, dependencies and middleware that the engine runs them with."""

__all__: list[str] = []

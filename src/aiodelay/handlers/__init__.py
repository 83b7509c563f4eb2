"""Handlers and their event types, and the contexts, dependencies and middleware for their runs."""

__all__: list[str] = []

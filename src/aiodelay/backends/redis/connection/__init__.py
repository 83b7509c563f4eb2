"""Connections to a Redis server: client, options, Lua scripts, wake-ups, and the checks when a store opens."""

__all__: list[str] = []

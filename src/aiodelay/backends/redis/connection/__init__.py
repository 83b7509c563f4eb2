"""The connections to a Redis server: client, options, Lua scripts, wake-ups, and the checks of a store that opens."""

__all__: list[str] = []

"""A connection to Redis: client, options, scripts, wake-ups, and the checks when a store opens."""

__all__: list[str] = []

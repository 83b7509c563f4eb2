"""Logs on a Redis server: topics that keep their messages. Consumers read the messages by index."""

__all__: list[str] = []

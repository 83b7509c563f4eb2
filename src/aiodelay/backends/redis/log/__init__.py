"""Topic logs: topics that keep their messages. Consumers read the messages by index."""

__all__: list[str] = []

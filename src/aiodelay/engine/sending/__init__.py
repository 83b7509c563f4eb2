"""The way of a command to the store: it is composed, sent in a group, and repeated while its outcome is unknown."""

__all__: list[str] = []

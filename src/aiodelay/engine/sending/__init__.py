"""The way of a command to the store: composed, sent in groups, and repeated while its outcome is unknown."""

__all__: list[str] = []

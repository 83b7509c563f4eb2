"""A command's way to the store: composed, sent in groups, repeated while its outcome is in doubt."""

__all__: list[str] = []

"""The topic log: topics that are kept and read by index."""

__all__: list[str] = []

"""Old path of `aiodelay.backends.registry`, which goes on working."""

from aiodelay.backends.registry import open_sink, open_source, open_store

__all__ = ["open_sink", "open_source", "open_store"]

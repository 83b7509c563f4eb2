"""The old import path of `aiodelay.backends.registry`, kept for existing programs."""

from aiodelay.backends.registry import open_sink, open_source, open_store

__all__ = ["open_sink", "open_source", "open_store"]

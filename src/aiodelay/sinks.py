"""The old import path of `aiodelay.backends.stdout`, kept for existing programs."""

from aiodelay.backends.stdout import StdoutSink, open_stdout

__all__ = ["StdoutSink", "open_stdout"]

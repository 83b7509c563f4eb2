"""Old path of `aiodelay.backends.stdout`, which goes on working."""

from aiodelay.backends.stdout import StdoutSink, open_stdout

__all__ = ["StdoutSink", "open_stdout"]

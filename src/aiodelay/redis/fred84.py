"""Old path of `aiodelay.importers.fred84`, which goes on working."""

from aiodelay.importers.fred84 import import_fred84, simple_name

__all__ = ["import_fred84", "simple_name"]

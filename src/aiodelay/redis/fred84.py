"""Old import path of `aiodelay.importers.fred84`. Both paths work."""

from aiodelay.importers.fred84 import import_fred84, simple_name

__all__ = ["import_fred84", "simple_name"]

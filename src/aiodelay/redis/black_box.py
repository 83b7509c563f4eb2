"""Old import path of `aiodelay.importers.black_box`. Both paths work."""

from aiodelay.importers.black_box import take_over_black_box

__all__ = ["take_over_black_box"]

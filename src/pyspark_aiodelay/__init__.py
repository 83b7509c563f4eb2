"""Registers `format("aiodelay")` in Spark, which imports modules named `pyspark_…` when it searches for a format."""

from __future__ import annotations

try:
    from aiodelay.spark.source import AiodelaySource as DefaultSource
except ImportError:  # Spark imports this module for other formats too, also without our packages
    pass
else:
    __all__ = ["DefaultSource"]

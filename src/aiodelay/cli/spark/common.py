"""Shared code of the commands of `aiodelay spark`: options for Spark, reading of texts, running a job in a session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from aiodelay.errors import ConfigurationError, MissingExtraError, shortened

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from aiodelay.spark.summary import Summary

__all__ = ["Cluster", "mapping_of", "read_settings", "run_job"]

_LOGGING = Path(__file__).with_name("log4j2.properties")
_OWN_SETTINGS = {
    "spark.ui.showConsoleProgress": f"{sys.stderr.isatty()}".lower(),
    "spark.python.sql.dataFrameDebugging.enabled": "false",  # otherwise Spark logs a trace before our error line
    "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}",
}
"""Settings for a new local Spark. A Connect server already runs and cannot change them."""
_CLIENTS = ("google", "grpc", "numpy", "pandas", "py4j", "pyarrow", "pyspark", "zstandard")
"""Import names of the Python packages that Spark needs."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Options that every job has: where Spark runs, its settings, and how many rows may be rejected.

    Attributes:
        master: Where Spark runs, such as spark://host:7077, local[4], or sc://host for Spark Connect. Default: the
            master that Spark's own configuration names, or else all cores of this machine.
        conf: A setting of Spark, as NAME=VALUE. May be repeated.
        max_rejected: The part of the rows, 0 to 1, that may be rejected. If more rows are rejected, the exit
            code is 1.
    """

    master: str | None = None
    conf: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    max_rejected: Annotated[float, Parameter(validator=Number(gte=0, lte=1))] = 0.0


def mapping_of(given: tuple[str, ...]) -> Mapping[str, str] | None:
    """Return the mapping from all `--map` options; None if there are none."""
    from aiodelay.spark.jobs.mapping import read_mapping  # noqa: PLC0415 - `--help` needs no Spark

    return read_mapping(",".join(given)) if given else None


def read_settings(flag: str, texts: tuple[str, ...], prefix: str = "") -> dict[str, str]:
    """Return the settings from texts of the form NAME=VALUE. Each name must begin with the prefix.

    Raises:
        ConfigurationError: A text does not have this form, or a name lacks the prefix.
    """
    settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or not name.startswith(prefix):
            raise ConfigurationError(flag, shortened(name), f"{prefix}NAME=VALUE")
        settings[name] = value
    return settings


def run_job(job: Callable[[SparkSession], Summary], cluster: Cluster) -> Summary:
    """Run a job in a new Spark session, and return its summary.

    Raises:
        AiodelayError: The job failed. An error of Spark becomes the aiodelay error behind it, or `SparkFailedError`.
    """
    settings = read_settings("--conf", cluster.conf, "spark.")
    try:
        from py4j.protocol import Py4JError  # noqa: PLC0415 - may be missing; `--help` works without it
        from pyspark.errors import PySparkException  # noqa: PLC0415

        from aiodelay.spark.errors import clear_error  # noqa: PLC0415
        from aiodelay.spark.session import is_elsewhere, local_session  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    try:
        spark = local_session(cluster.master, settings if is_elsewhere(cluster.master) else _OWN_SETTINGS | settings)
        try:
            return job(spark)
        finally:
            spark.stop()
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    except (PySparkException, Py4JError) as error:
        raise clear_error(error) from error


def _missing(error: ModuleNotFoundError) -> Exception:
    if (error.name or "").partition(".")[0] not in _CLIENTS:
        return error
    return MissingExtraError("spark", f"missing {error.name}", "pip install 'aiodelay[spark-local]'")

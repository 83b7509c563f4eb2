"""What the commands of Spark's jobs share: where Spark runs, which store, and how a job ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from aiodelay.cli.errors import FAILED, NOT_UNDERSTOOD, CommandError
from aiodelay.cli.output import print_json
from aiodelay.errors import ConfigurationError, MissingExtraError, shortened

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from aiodelay.spark.summary import Summary

__all__ = ["Cluster", "Pace", "StorePlace", "Truth", "mapping_of", "read_settings", "run_job"]

_LOGGING = Path(__file__).with_name("log4j2.properties")
_OWN_SETTINGS = {
    "spark.ui.showConsoleProgress": f"{sys.stderr.isatty()}".lower(),
    "spark.python.sql.dataFrameDebugging.enabled": "false",  # else traces are logged before the error is told
    "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}",
}
"""What cannot be set any more where Spark runs already."""
_CLIENTS = ("google", "grpc", "numpy", "pandas", "py4j", "pyarrow", "pyspark", "zstandard")
"""What Spark needs in Python, by the name that is imported."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class StorePlace:
    """Which messages a job is about.

    Attributes:
        store: URL of the store, such as redis://host or sqlite:///delay.db; env:NAME or file:PATH if it holds a
            password: what stands in a variable or a file, here and on each executor.
        namespace: Whose messages, in a store that several applications share.
    """

    store: Annotated[str, Parameter(env_var="AIODELAY_STORE")]
    namespace: Annotated[str, Parameter(env_var="AIODELAY_NAMESPACE")] = "default"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How fast a job works on a store.

    Attributes:
        rate: Most messages a second, of all tasks together; 0 = no limit.
        concurrency: How many tasks work at once.
        timeout: How long a task asks again while the store does not answer.
    """

    rate: Annotated[int, Parameter(validator=Number(gte=0))] = 20_000
    concurrency: Annotated[int | None, Parameter(validator=Number(gte=1))] = None
    timeout: str = "60s"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Where Spark runs.

    Attributes:
        master: Such as spark://host:7077, local[4], or sc://host for Spark Connect; without it, what Spark is
            configured with, else all cores of this machine.
        conf: A setting of Spark, as NAME=VALUE; may be repeated.
        max_rejected: The part of the rows that may be rejected, 0 to 1, before the job has failed (exit code 1).
    """

    master: str | None = None
    conf: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    max_rejected: Annotated[float, Parameter(validator=Number(gte=0, lte=1))] = 0.0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """What should be pending in a store.

    Attributes:
        truth: parquet:DIR, csv:DIR, json:DIR, orc:DIR, or jdbc:URL?dbtable=TABLE.
        map: Where a message's columns come from, as of `backfill`; columns that it does not give are not compared.
        option: Spark's own for what is read, as NAME=VALUE, such as user=me; may be repeated.
        to: The destination of rows that give none: SINK:ADDRESS, or handler:TYPE.
        timezone: Where times without an offset were written down.
    """

    truth: str
    map: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    option: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    to: str | None = None
    timezone: str | None = None

    def frame(self, spark: SparkSession) -> DataFrame:
        """Return its rows."""
        from aiodelay.spark.jobs.sources import read_source  # noqa: PLC0415 - `--help` needs no Spark

        options = read_settings("--option", self.option)
        return read_source(spark, self.truth, options, field="truth")

    def mapping(self) -> Mapping[str, str] | None:
        """Return which columns are a message's."""
        return mapping_of(self.map)


def mapping_of(given: tuple[str, ...]) -> Mapping[str, str] | None:
    """Return where a message's columns come from, as `--map` says, however often; None if it says nothing."""
    from aiodelay.spark.jobs.mapping import read_mapping  # noqa: PLC0415 - as above

    return read_mapping(",".join(given)) if given else None


def read_settings(flag: str, texts: tuple[str, ...]) -> dict[str, str]:
    """Read NAME=VALUE, given as often as there are settings.

    Raises:
        ConfigurationError: One is not of that form.
    """
    settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigurationError(flag, shortened(name), "NAME=VALUE")
        settings[name] = value
    return settings


def run_job(job: Callable[[SparkSession], Summary], cluster: Cluster) -> int:
    """Run a job in a session, print its summary as a line of JSON, and return the exit code.

    Raises:
        AiodelayError: What ended the job.
        CommandError: The same, of a setting that is wrong.
    """
    try:
        summary = _run(job, cluster)
    except ConfigurationError as error:
        raise CommandError(f"{error}", exit_code=NOT_UNDERSTOOD) from error
    print_json(summary.shape())
    return 0 if summary.is_within(cluster.max_rejected) else FAILED


def _run(job: Callable[[SparkSession], Summary], cluster: Cluster) -> Summary:
    settings = _settings(cluster.conf)
    try:
        from py4j.protocol import Py4JError  # noqa: PLC0415 - may not be installed, and `--help` needs none of these
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


def _settings(given: tuple[str, ...]) -> dict[str, str]:
    settings = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.startswith("spark."):
            raise ConfigurationError("--conf", shortened(name), "spark.NAME=VALUE")
        settings[name] = value
    return settings


def _missing(error: ModuleNotFoundError) -> Exception:
    if (error.name or "").partition(".")[0] not in _CLIENTS:
        return error
    return MissingExtraError("spark", f"missing {error.name}", "pip install 'aiodelay[spark-local]'")

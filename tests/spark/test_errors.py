"""The error of a failed job: the aiodelay error behind Spark's error, from any place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from aiodelay.errors import AiodelayError, ConfigurationError, MessageIdError, StoreFullError, StoreUnavailableError
from aiodelay.spark.errors import SparkFailedError, clear_error
from aiodelay.spark.jobs.sources import read_source

REFUSED = StoreUnavailableError("redis://:***@h", "connection refused")


def failing(*errors: Exception) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Fail in a Python worker: with an error, or with one that the next was the cause of, or with several at once."""

    def work(batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            if len(errors) == 1:
                raise errors[0]
            if isinstance(errors[0], OSError):
                raise errors[1] from errors[0]
            raise ExceptionGroup("several", list(errors))
        yield from ()

    return work


def error_of(action: Callable[[], object]) -> AiodelayError:
    with pytest.raises(PySparkException) as caught:
        action()
    return clear_error(caught.value)


def in_worker(spark: SparkSession, *errors: Exception) -> AiodelayError:
    frame: DataFrame = spark.range(1, numPartitions=1).mapInArrow(failing(*errors), "id BIGINT")
    return error_of(frame.collect)


def test_an_error_of_ours_is_found_where_the_driver_raised_it(spark: SparkSession) -> None:
    error = error_of(spark.read.format("aiodelay").options(store="x", table="x").load)
    assert type(error).__name__ == "ConfigurationError"
    assert isinstance(error, ConfigurationError)
    assert str(error) == "option 'table' is 'x'; allowed: messages, dead, done, events"


@pytest.mark.parametrize(
    ("errors", "kind", "text"),
    [
        ([REFUSED], StoreUnavailableError, str(REFUSED)),
        ([ConnectionRefusedError(111, "refused"), REFUSED], StoreUnavailableError, str(REFUSED)),
        ([StoreFullError("redis", "OOM"), StoreFullError("redis", "OOM")], StoreFullError, "redis is full: OOM"),
        ([MessageIdError("id", "'a'", "b")], MessageIdError, "id is 'a'; allowed: b"),
        ([KeyError("column")], SparkFailedError, "Spark: KeyError: 'column'"),
    ],
)
def test_an_error_of_a_worker_is_found_under_its_traces(
    spark: SparkSession, errors: list[Exception], kind: type[AiodelayError], text: str
) -> None:
    error = in_worker(spark, *errors)
    assert isinstance(error, kind)
    assert str(error) == text


def test_an_error_of_a_stream_is_found(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("line\n")
    rows = spark.readStream.text(f"{tmp_path / 'in'}").mapInArrow(failing(REFUSED), "value STRING")
    query = rows.writeStream.format("noop").option("checkpointLocation", f"{tmp_path / 'checkpoint'}")
    error = error_of(query.trigger(availableNow=True).start().awaitTermination)
    assert isinstance(error, StoreUnavailableError)
    assert str(error) == str(REFUSED)


def test_an_error_of_java_is_told_by_its_own_line(spark: SparkSession) -> None:
    with pytest.raises(Py4JError) as caught:
        read_source(spark, "jdbc:nope://host/db?dbtable=orders")
    assert str(clear_error(caught.value)) == "Spark: java.sql.SQLException: No suitable driver"


def test_an_error_of_sparks_own_is_told_by_the_line_that_says_what_happened(spark: SparkSession) -> None:
    error = error_of(lambda: spark.read.parquet("/none/such"))
    assert str(error) == "Spark: [PATH_NOT_FOUND] Path does not exist: file:/none/such."
    error = error_of(spark.sql("SELECT raise_error('aiodelay.errors.NoSuchError: x')").collect)
    assert isinstance(error, SparkFailedError)


def test_an_error_of_ours_stays_itself() -> None:
    assert clear_error(REFUSED) is REFUSED

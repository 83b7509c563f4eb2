"""What several jobs do with what they are given: an SQL condition, a new folder, a file, a session's settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it

from aiodelay.errors import ConfigurationError, cut, shortened

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["problem_of_condition", "replacing", "setting", "writing_anew"]


def problem_of_condition(frame: DataFrame, condition: str) -> str | None:
    """Say why a frame's rows cannot be chosen by an SQL condition, to stand behind it in an error; None if they can."""
    try:
        (kind,) = frame.select(F.expr(condition)).schema.fields  # a Connect session knows a filter's without a look
    except PySparkException as error:
        reason = f"{error}".strip().partition("\n")[0]
        return f" ({cut(reason, 200)})"
    found = kind.dataType.simpleString()
    return None if found == "boolean" else f", of type {found}"


@contextmanager
def writing_anew(field: str, path: str, allowed: str) -> Iterator[None]:
    """Have a folder that is there already told as what it is.

    Raises:
        ConfigurationError: It is there.
    """
    try:
        yield
    except AnalysisException as error:
        if error.getCondition() != "PATH_ALREADY_EXISTS":
            raise
        raise ConfigurationError(field, shortened(path), allowed) from None


@contextmanager
def setting(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """Have a setting of the session for as long as a block: other streams of it keep theirs."""
    before = spark.conf.get(name, None)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, before)


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Open a file that takes the place of another when it is whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8", newline="") as file:
            yield file
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)

"""What several jobs do with what they are given: a choice, a condition in SQL, a folder, a file, a coroutine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it

from aiodelay.errors import ConfigurationError, cut, shortened

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["one_of", "problem_of_condition", "replacing", "run_coroutine", "setting", "writing_anew"]

T = TypeVar("T")
Text = TypeVar("Text", bound=str)


def one_of(name: str, value: Text, allowed: tuple[str, ...]) -> Text:
    """Return an option's value.

    Raises:
        ConfigurationError: It is none that is allowed.
    """
    if value not in allowed:
        raise ConfigurationError(name, shortened(value), ", ".join(allowed))
    return value


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where a loop runs already: that of a notebook."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, coroutine).result()


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

"""Helpers of several jobs: check a choice or an SQL condition, write a new folder or file, run a coroutine."""

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
    """Check that an option has an allowed value, and return the value.

    Raises:
        ConfigurationError: The value is not allowed.
    """
    if value not in allowed:
        raise ConfigurationError(name, shortened(value), ", ".join(allowed))
    return value


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread of its own, because in a notebook the calling thread already runs a loop."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, coroutine).result()


def problem_of_condition(frame: DataFrame, condition: str) -> str | None:
    """Return the reason why a text is not an SQL condition on a frame, as a suffix for an error text.

    If the text is a condition, return None.
    """
    try:
        (kind,) = frame.select(F.expr(condition)).schema.fields  # `where` checks nothing in a Connect session
    except PySparkException as error:
        reason = f"{error}".strip().partition("\n")[0]
        return f" ({cut(reason, 200)})"
    found = kind.dataType.simpleString()
    return None if found == "boolean" else f" (the given text has the type {found})"


@contextmanager
def writing_anew(field: str, path: str, allowed: str) -> Iterator[None]:
    """Convert Spark's error about an existing folder into a `ConfigurationError`.

    Raises:
        ConfigurationError: The folder already exists.
    """
    try:
        yield
    except AnalysisException as error:
        if error.getCondition() != "PATH_ALREADY_EXISTS":
            raise
        raise ConfigurationError(field, shortened(path), allowed) from None


@contextmanager
def setting(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """Change a setting of the session for a block, and restore it. Only streams that start in the block get it."""
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
    """Yield a temporary file. When the block has ended without an error, the file replaces the file `path`."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8", newline="") as file:
            yield file
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)

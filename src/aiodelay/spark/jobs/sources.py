"""Read the input of jobs: files and databases (`parquet:DIR`, `csv:…`, `jdbc:URL?dbtable=…`), and tables of a store."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, cast
from urllib.parse import unquote

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from aiodelay.errors import ConfigurationError, masked_url
from aiodelay.spark.options import read_table
from aiodelay.spark.schemas import SCHEMAS

__all__ = ["read_source", "stored"]

FILES: Final = ("parquet", "csv", "json", "orc")
_TABLE = re.compile(r"(?<=[?&;])dbtable=([^&;]*)[&;]?")
_SETTINGS: Final = {
    "csv": {"header": "true", "enforceSchema": "false"},
    # Otherwise Spark takes a time without a time zone as a time in the zone of the driver's machine.
    "jdbc": {"preferTimestampNTZ": "true"},
}


def read_source(
    spark: SparkSession, text: str, options: Mapping[str, str] | None = None, *, field: str = "from"
) -> DataFrame:
    """Read files, or a table of a database.

    The first line of CSV files has the names of the columns. All columns of CSV are text, so a due time keeps its
    offset.

    Args:
        spark: The session.
        text: `<format>:<folder, file or pattern>`, or `jdbc:<URL>?dbtable=<table>`.
        options: Options of Spark's reader, such as `user` and `password` of a database, or `delimiter`.
        field: The name of the option for errors.

    Raises:
        ConfigurationError: The text has another form, or the files do not exist.
    """
    kind, colon, place = text.partition(":")
    if not colon or not place or kind not in (*FILES, "jdbc"):
        allowed = f"{', '.join(f'{name}:DIR' for name in FILES)} or jdbc:URL?dbtable=TABLE"
        raise ConfigurationError(field, repr(masked_url(text)), allowed)
    settings = {**_SETTINGS.get(kind, {}), **(options or {})}
    if kind == "jdbc":
        settings |= _of_database(text)
    reader = spark.read.format(kind).options(**settings)
    try:
        return reader.load() if kind == "jdbc" else reader.load(place)
    except AnalysisException as error:
        raise ConfigurationError(
            field, repr(masked_url(text)), f"files or a table that Spark can read ({error.getCondition()})"
        ) from None


def _of_database(text: str) -> dict[str, str]:
    """Return the options `url` and, if the text names a table, `dbtable`."""
    found = _TABLE.search(text)
    url = (text[: found.start()] + text[found.end() :]).rstrip("?&;") if found else text
    return {"url": url} | ({"dbtable": unquote(found[1])} if found else {})


def stored(spark: SparkSession, *columns: str, **options: str) -> DataFrame:
    """Return a table of a store. Only the named columns are fetched; default: all columns.

    Args:
        spark: A session, classic or Connect.
        columns: Names of columns in `schemas.SCHEMAS`.
        options: Options of `format("aiodelay")`.

    Raises:
        ConfigurationError: There is no such table.
    """
    table = cast("StructType", StructType.fromDDL(SCHEMAS[read_table(options)]))
    schema = StructType([field for field in table.fields if not columns or field.name in columns])
    return spark.read.format("aiodelay").options(**options).schema(schema).load()

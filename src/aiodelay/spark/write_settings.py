"""The settings of a writer. The driver reads them from options and schema, and finds mistakes before tasks start."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, Literal, cast
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from msgspec import Struct
from pyspark.sql.types import StructType

from aiodelay.backends.registry import open_store
from aiodelay.core.durations import parse_duration
from aiodelay.core.validation import HANDLER_TARGET, check_namespace, check_type_name, split_target
from aiodelay.core.values import MAX_CLAIM_MESSAGES
from aiodelay.errors import ConfigurationError, TargetError, UnsupportedByStoreError, shortened
from aiodelay.operations.spark_options import WriteOptions
from aiodelay.ports import BulkLoad, Store
from aiodelay.scheduler import MOST_PAYLOAD

from .options import Options, store_url

__all__ = [
    "DEFAULT_RATE",
    "NO_COLUMNS",
    "WriteSettings",
    "destination_of",
    "read_settings",
    "store_of",
    "write_options",
]

DEFAULT_RATE: Final = 20_000
"""Default rate, in rows a second over all tasks. A Redis store in use hardly slows down at this rate."""
DEFAULT_CONCURRENCY: Final = 8
_MOST_RATE = 100_000_000

_TEXT, _BYTES, _TIME = ("string",), ("binary", "string"), ("timestamp", "timestamp_ntz")
_INTEGER = ("bigint", "int", "smallint", "tinyint")
COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "id": _TEXT,
    "due_at": _TIME,
    "payload": _BYTES,
    "to": _TEXT,
    "type": _TEXT,
    "encoding": _TEXT,
    "key": _BYTES,
    "headers": ("map<string,binary>", "map<string,string>"),
    "version": _INTEGER,
    "expires_at": _TIME,
    "late": _TEXT,
    "rule": _TEXT,
    "trace": ("map<string,string>",),
}
"""The columns that make up a message, with their types."""
NO_COLUMNS: Final[Mapping[str, str]] = {
    "spread": "a later due_at, such as timestampadd(MILLISECOND, pmod(xxhash64(id), 300000), due_at) for 5m;"
    ' or for a series, a rule such as {"cron": "0 9 * * *", "spread": "5m"}',
    "conflict": "the option conflict for all rows: insert, or newer with a column version",
}
"""Arguments of `schedule()` that no column gives, and what to use instead."""
LEFT_OUT: Final = frozenset(
    {
        "next_attempt_at",
        "state",
        "revision",
        "attempt",
        "first_error",
        "last_error",
        "given_up_at",
        "reason",
        "errors",
        "traceback",
    }
)
"""Columns of a read table that a writer ignores: they tell the past of a message, but a written message is new."""


class WriteSettings(Struct, frozen=True, kw_only=True):
    """The settings by which a frame is written; sent to executors.

    Attributes:
        store: The store as it was given: a URL, `env:NAME` or `file:PATH`.
        namespace: The namespace of the messages.
        to: The destination of rows that name no destination.
        conflict: With `insert`, every row has version 0. With `newer`, the column `version` has the versions.
        rate: Rows a second over all tasks; 0 = no limit.
        concurrency: The number of tasks that write at once; None if it was not given.
        batch_rows: Most rows of one call.
        max_payload: Most bytes of a payload.
        timezone: The time zone of `timestamp_ntz` columns.
        patience_ms: How long a call is repeated while the store does not answer.
        columns: The names of the frame's columns, in lower case.
        until_ms: The time in epoch ms after which no row is sent; None = no limit.
    """

    store: str
    namespace: str
    to: str | None
    conflict: Literal["insert", "newer"]
    rate: int
    concurrency: int | None
    batch_rows: int
    max_payload: int
    timezone: str | None
    patience_ms: int
    columns: tuple[str, ...]
    until_ms: int | None = None

    def __repr__(self) -> str:  # tracebacks that show variables must not show a password
        return f"WriteSettings({self.namespace!r})"

    @property
    def task_rate(self) -> float:
        """Rows a second of one task; 0 = no limit."""
        return self.rate / (self.concurrency or DEFAULT_CONCURRENCY)


def write_options(options: WriteOptions, *, conflict: str, max_payload: int) -> dict[str, str]:
    """Return the options of `format("aiodelay")` for a job that writes."""
    return {
        "store": options.store,
        "namespace": options.namespace,
        "conflict": conflict,
        "maxPayload": f"{max_payload}",
        "rate": f"{options.rate}",
        "timeout": options.timeout,
        **({} if options.concurrency is None else {"concurrency": f"{options.concurrency}"}),
    }


def read_settings(given: Mapping[str, str], schema: StructType, *, overwrite: bool = False) -> WriteSettings:
    """Return the settings for writing a frame, and check them without connecting to the store.

    Raises:
        TargetError: The option `to` is not a destination.
        ConfigurationError: An option or a column is missing, unknown or of a wrong type.
        UnsupportedByStoreError: The store cannot load messages in bulk.
    """
    options = Options(given)
    options.choice("table", ("messages",), "messages")
    options.text("checkpointLocation")  # for a stream, Spark itself sets this option and the next
    options.text("queryName")
    settings = WriteSettings(
        store=options.required("store", "redis://localhost or env:NAME"),
        namespace=check_namespace(options.text("namespace", "default")),
        to=options.text("to"),
        conflict=cast("Literal['insert', 'newer']", options.choice("conflict", ("insert", "newer"), "insert")),
        rate=options.integer("rate", DEFAULT_RATE, 0, _MOST_RATE),
        concurrency=options.integer("concurrency", 0, 1, 100_000) or None,
        batch_rows=options.integer("batchRows", MAX_CLAIM_MESSAGES, 1, MAX_CLAIM_MESSAGES),
        max_payload=options.integer("maxPayload", 262_144, 1, MOST_PAYLOAD),
        timezone=_timezone(options.text("timezone")),
        patience_ms=parse_duration(
            options.text("timeout", "60s") or "", field="option 'timeout'", error=ConfigurationError
        ),
        columns=tuple(name.lower() for name in schema.names),
    )
    options.finish()
    if overwrite:
        allowed = "mode('append'); to remove messages from a store, cancel them"
        raise ConfigurationError("save mode", "overwrite", allowed)
    if settings.to is not None:
        destination_of(settings.to)
    _check_columns(schema, settings)
    _check_store(store_of(settings))
    return settings


def store_of(settings: WriteSettings) -> Store:
    """Return the store to which the settings write, not connected.

    Raises:
        ConfigurationError: The URL cannot be used.
    """
    return open_store(store_url(settings.store), namespace=settings.namespace, clock=None)


@lru_cache(maxsize=1024)  # a frame has few destinations, each in many rows
def destination_of(to: str) -> tuple[str, str]:
    """Return the lane and the address of `<sink>:<address>`, or of `handler:<type>`.

    Raises:
        TargetError: The text has neither form.
    """
    sink, address = split_target(to)
    if sink != HANDLER_TARGET:
        return sink, address
    try:
        return check_type_name(address, "to"), ""
    except ConfigurationError as error:
        raise TargetError("the handler name in to=", error.value, error.allowed) from None


def _timezone(name: str | None) -> str | None:
    if name is not None:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ConfigurationError(
                "option 'timezone'", shortened(name), "a time zone such as 'Europe/Paris'"
            ) from None
    return name


def _check_columns(schema: StructType, settings: WriteSettings) -> None:
    for field in schema.fields:
        name, kind = field.name.lower(), field.dataType.simpleString().partition(" ")[0]
        if name in LEFT_OUT:
            continue
        if name in NO_COLUMNS:
            raise ConfigurationError("column", shortened(field.name), NO_COLUMNS[name])
        if name not in COLUMNS:
            raise ConfigurationError("column", shortened(field.name), ", ".join(COLUMNS))
        if kind not in COLUMNS[name]:
            raise ConfigurationError(f"column {name!r}", f"of type {kind}", " or ".join(COLUMNS[name]))
        if kind == "timestamp_ntz" and settings.timezone is None:
            allowed = "timestamp, which is an instant; or give the option 'timezone'"
            raise ConfigurationError(f"column {name!r}", "of type timestamp_ntz", allowed)
    needed = ["id", "due_at", "payload"]
    needed += ["to"] if settings.to is None else []
    needed += ["version"] if settings.conflict == "newer" else []
    for name in needed:
        if settings.columns.count(name) != 1:
            given = f"missing among {', '.join(settings.columns)}" if name not in settings.columns else "given twice"
            raise ConfigurationError(f"column {name!r}", given, _NEEDED[name])


_NEEDED = {
    "id": "a column of text, unique",
    "due_at": "a column of timestamps",
    "payload": "a column of bytes or text",
    "to": "a column such as 'redis-list:orders', or the option 'to' for all rows",
    "version": "a column of integers, which conflict=newer compares",
}


def _check_store(store: Store) -> None:
    if not isinstance(store, BulkLoad):
        raise UnsupportedByStoreError("store", store.name, "a store that takes messages in bulk: Redis or SQLite")
    if not store.traits.durable:
        raise UnsupportedByStoreError("store", store.name, "a store that other processes see: Redis or SQLite")

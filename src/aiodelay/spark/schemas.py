"""The columns of each table of the data source, as DDL of Spark. Times are instants, exact to the ms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, TypeAlias

from aiodelay.core.record_format import FIELDS, Field

__all__ = ["DEAD", "DONE", "EVENTS", "MESSAGES", "SCHEMAS", "Table", "record_columns"]

Table: TypeAlias = Literal["messages", "dead", "done", "events"]
"""The values of `option("table", …)`."""

_FIRST: Final = (
    *("to", "type", "encoding", "payload", "key", "headers", "version", "revision", "attempt", "expires_at", "late"),
    *("rule", "trace", "first_error", "last_error"),
)
"""The columns of the first version of the tables, in order. Columns of newer versions follow them."""
_OWN: Final = frozenset({"due_at"})
"""Columns of the record that each table declares itself, before its other columns."""


def record_columns(fields: Iterable[Field]) -> dict[str, str]:
    """Return the record columns of the tables `messages` and `dead`, with their types, in order."""
    declared = dict(each.spark for each in fields if each.spark is not None and not each.only_dead)
    order = [*_FIRST, *(name for name in declared if name not in _FIRST and name not in _OWN)]
    return {name: declared[name] for name in order}


_RECORD: Final = ", ".join(f"{name} {kind}" for name, kind in record_columns(FIELDS).items())

MESSAGES: Final = (
    "id STRING NOT NULL, due_at TIMESTAMP NOT NULL, next_attempt_at TIMESTAMP NOT NULL, state STRING NOT NULL, "
    f"{_RECORD}"
)
"""Messages that are pending or in flight."""

DEAD: Final = (
    "id STRING NOT NULL, due_at TIMESTAMP NOT NULL, given_up_at TIMESTAMP NOT NULL, reason STRING NOT NULL, "
    f"{_RECORD}, errors ARRAY<STRING>, traceback STRING"
)
"""Dead letters."""

DONE: Final = "id STRING NOT NULL, version BIGINT, until TIMESTAMP"
"""Ended messages that a store remembers: their version, and the time until which the store remembers it."""

EVENTS: Final = (
    "partition INT NOT NULL, number BIGINT NOT NULL, at TIMESTAMP NOT NULL, event STRING NOT NULL, id STRING NOT NULL, "
    "revision BIGINT NOT NULL, lane STRING NOT NULL, due_at TIMESTAMP NOT NULL, attempt INT NOT NULL, detail STRING"
)
"""The events of messages: the entries of a store's journal."""

SCHEMAS: Final[dict[Table, str]] = {"messages": MESSAGES, "dead": DEAD, "done": DONE, "events": EVENTS}

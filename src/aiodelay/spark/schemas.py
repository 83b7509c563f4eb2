"""The columns of each table of the data source, as Spark's DDL; times are instants with ms, rounded down by nobody."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

__all__ = ["DEAD", "DONE", "EVENTS", "MESSAGES", "SCHEMAS", "Table"]

Table: TypeAlias = Literal["messages", "dead", "done", "events"]
"""What `option("table", …)` names."""

_RECORD = (
    "to STRING, type STRING, encoding STRING, payload BINARY, key BINARY, headers MAP<STRING, BINARY>, version BIGINT, "
    "revision BIGINT, attempt INT, expires_at TIMESTAMP, late STRING, rule STRING, trace MAP<STRING, STRING>, "
    "first_error STRING, last_error STRING"
)

MESSAGES: Final = (
    "id STRING NOT NULL, due_at TIMESTAMP NOT NULL, next_attempt_at TIMESTAMP NOT NULL, state STRING NOT NULL, "
    f"{_RECORD}"
)
"""What is pending or in flight."""

DEAD: Final = (
    f"id STRING NOT NULL, due_at TIMESTAMP NOT NULL, given_up_at TIMESTAMP NOT NULL, reason STRING NOT NULL, {_RECORD}"
)
"""Dead letters."""

DONE: Final = "id STRING NOT NULL, version BIGINT, until TIMESTAMP"
"""What a store remembers of messages that have ended: their version, and until when it is kept."""

EVENTS: Final = (
    "partition INT NOT NULL, number BIGINT NOT NULL, at TIMESTAMP NOT NULL, event STRING NOT NULL, id STRING NOT NULL, "
    "revision BIGINT NOT NULL, lane STRING NOT NULL, due_at TIMESTAMP NOT NULL, attempt INT NOT NULL, detail STRING"
)
"""What became of messages: a store's journal, entry by entry."""

SCHEMAS: Final[dict[Table, str]] = {"messages": MESSAGES, "dead": DEAD, "done": DONE, "events": EVENTS}

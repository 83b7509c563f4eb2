"""The table "the same id again": what a command comes to by where a message with its id stands.

One table for people and tests: docs/guarantees.md shows it, `SameIdRules` plays it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

__all__ = ["SAME_ID_TABLE", "Cell", "SameId", "Stays"]

Stays: TypeAlias = Literal["old", "new", "moved", "nothing"]
"""What stands under the id afterwards: the message that was there, the one given, the old one at another time, none."""


class Cell(NamedTuple):
    """One cell.

    Attributes:
        answer: The outcome's `answer`, or the refusal's `reason`.
        stays: What stands under the id afterwards.
    """

    answer: str
    stays: Stays


class SameId(NamedTuple):
    """One row.

    Attributes:
        call: What is called with the id.
        pending: If a message with the id waits.
        in_flight: If one is leased.
        replacing: If one waits, and an older version is still leased: a message that it has replaced, or a retry of an
            earlier occurrence of the series that it is, or has replaced.
        done: If one has ended: settled, cancelled or dead-lettered (a dead letter stays where it is).
    """

    call: str
    pending: Cell
    in_flight: Cell
    replacing: Cell
    done: Cell


REPLACED, KEPT, OUTDATED = Cell("replaced", "new"), Cell("kept", "old"), Cell("outdated", "old")
STORED, DUPLICATE, EXISTS = Cell("stored", "new"), Cell("duplicate", "old"), Cell("exists", "old")
RESCHEDULED, FIRED = Cell("rescheduled", "moved"), Cell("fired", "moved")
NOT_FOUND = Cell("not_found", "nothing")

SAME_ID_TABLE: tuple[SameId, ...] = (
    SameId("replace", REPLACED, REPLACED, REPLACED, STORED),
    SameId("keep", KEPT, Cell("in_flight", "old"), KEPT, STORED),
    SameId("newer, higher version", REPLACED, REPLACED, REPLACED, STORED),
    SameId("newer, same version", OUTDATED, OUTDATED, OUTDATED, Cell("outdated", "nothing")),
    SameId("newer, lower version", OUTDATED, OUTDATED, OUTDATED, Cell("outdated", "nothing")),
    SameId("if_revision, the same", REPLACED, REPLACED, REPLACED, Cell("outdated", "nothing")),
    SameId("if_revision, another", OUTDATED, OUTDATED, OUTDATED, Cell("outdated", "nothing")),
    SameId("error", DUPLICATE, DUPLICATE, DUPLICATE, STORED),
    SameId("cancel", Cell("cancelled", "nothing"), Cell("in_flight", "old"), Cell("in_flight", "nothing"), NOT_FOUND),
    SameId(
        "cancel, the same",
        Cell("cancelled", "nothing"),
        Cell("in_flight", "old"),
        Cell("in_flight", "nothing"),
        NOT_FOUND,
    ),
    SameId("cancel, another", OUTDATED, OUTDATED, OUTDATED, NOT_FOUND),
    SameId(
        "reschedule", Cell("rescheduled", "moved"), Cell("too_late", "old"), Cell("rescheduled", "moved"), NOT_FOUND
    ),
    SameId("fire", Cell("fired", "moved"), Cell("in_flight", "old"), Cell("fired", "moved"), NOT_FOUND),
    SameId("redrive", EXISTS, EXISTS, EXISTS, STORED),
)
"""Rows in the order of docs/guarantees.md. `replace` in flight fences the old claim: its settlement is `superseded`."""

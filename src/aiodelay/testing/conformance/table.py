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
        done: If one has ended: settled, cancelled or dead-lettered (a dead letter stays where it is).
    """

    call: str
    pending: Cell
    in_flight: Cell
    done: Cell


SAME_ID_TABLE: tuple[SameId, ...] = (
    SameId("replace", Cell("replaced", "new"), Cell("replaced", "new"), Cell("stored", "new")),
    SameId("keep", Cell("kept", "old"), Cell("in_flight", "old"), Cell("stored", "new")),
    SameId("newer, higher version", Cell("replaced", "new"), Cell("replaced", "new"), Cell("stored", "new")),
    SameId("newer, same version", Cell("outdated", "old"), Cell("outdated", "old"), Cell("outdated", "nothing")),
    SameId("newer, lower version", Cell("outdated", "old"), Cell("outdated", "old"), Cell("outdated", "nothing")),
    SameId("error", Cell("duplicate", "old"), Cell("duplicate", "old"), Cell("stored", "new")),
    SameId("cancel", Cell("cancelled", "nothing"), Cell("in_flight", "old"), Cell("not_found", "nothing")),
    SameId("reschedule", Cell("rescheduled", "moved"), Cell("too_late", "old"), Cell("not_found", "nothing")),
    SameId("fire", Cell("fired", "moved"), Cell("in_flight", "old"), Cell("not_found", "nothing")),
    SameId("redrive", Cell("exists", "old"), Cell("exists", "old"), Cell("stored", "new")),
)
"""Rows in the order of docs/guarantees.md. `replace` in flight fences the old claim: its settlement is `superseded`."""

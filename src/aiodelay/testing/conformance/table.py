"""The table "the same id again": the outcome of each command for each state of a message with the same id.

docs/guarantees.md shows the table. `SameIdRules.test_same_id_again` tests every cell.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

__all__ = ["SAME_ID_TABLE", "Cell", "SameId", "Stays"]

Stays: TypeAlias = Literal["old", "new", "moved", "nothing"]
"""The message under the id afterwards.

- `old`: the message that was there.
- `new`: the message of the command.
- `moved`: the message that was there, with another due time.
- `nothing`: no message.
"""


class Cell(NamedTuple):
    """One cell of the table.

    Attributes:
        answer: The `answer` of the outcome, or the `reason` of the refusal.
        stays: The message under the id afterwards.
    """

    answer: str
    stays: Stays


class SameId(NamedTuple):
    """One row of the table.

    Attributes:
        call: The call that names the id.
        pending: The cell for a message that waits.
        in_flight: The cell for a message that is leased.
        replacing: The cell for a message that waits while an older version is still leased. The older version is
            one of these: a message that the waiting message has replaced; a retry of an earlier occurrence of the
            waiting series; or a retry of an occurrence of a series that the waiting message has replaced. A series
            begins no window and is of no kind that gathers items, so rows about those have no waiting series.
        done: The cell for a message that was settled, cancelled or became a dead letter. A dead letter is kept.
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
    SameId("earlier, due before", REPLACED, REPLACED, REPLACED, STORED),
    SameId("earlier, due after", KEPT, REPLACED, KEPT, STORED),
    SameId("later, due after", REPLACED, REPLACED, REPLACED, STORED),
    SameId("later, due before", KEPT, REPLACED, KEPT, STORED),
    SameId("debounce", REPLACED, REPLACED, REPLACED, STORED),
    SameId("throttle, in a window", KEPT, Cell("in_flight", "old"), KEPT, Cell("kept", "nothing")),
    SameId("throttle last, in a window", REPLACED, REPLACED, REPLACED, STORED),
    SameId("throttle, no window", REPLACED, REPLACED, REPLACED, STORED),
    SameId("throttle last, no window", REPLACED, REPLACED, REPLACED, STORED),
    SameId("append, the same kind", REPLACED, Cell("replaced", "old"), REPLACED, STORED),
    SameId("append, another kind", DUPLICATE, DUPLICATE, DUPLICATE, STORED),
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
"""The rows, in the order of docs/guarantees.md.

A `replace` of a message in flight fences the old claim: the settlement of that claim is answered `superseded`.
"""

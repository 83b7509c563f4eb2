"""The summary of a job. The commands print it as a line of JSON and derive the exit code from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, structs

__all__ = ["Summary"]


class Summary(Struct, frozen=True, kw_only=True):
    """The result of a job.

    Attributes:
        job: The name of the job; the decorator `job` sets it.
        seconds: The duration of the job; the decorator `job` sets it.
        counts: The counts of the job, by name.
        rejected: The number of rows that the job could not take.
        rows: The number of rows, messages or events that the job was given or has read.
        facts: Other results, such as files written, or the time for which a store remembers ended messages.
    """

    job: str = ""
    seconds: float = 0.0
    rows: int = 0
    rejected: int = 0
    counts: Mapping[str, int]
    facts: Mapping[str, Any] = {}

    def is_within(self, most_rejected: float) -> bool:
        """Return whether the job has rejected at most an allowed part of the rows.

        Args:
            most_rejected: The allowed part, 0 to 1; 0 allows none.
        """
        return self.rejected <= most_rejected * self.rows

    def shape(self) -> dict[str, Any]:
        """Return the summary as JSON types, flat except for `counts` and `facts`."""
        return structs.asdict(self)

"""What a job tells when it has ended: one value, one line of JSON, one exit code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, structs

__all__ = ["Summary"]


class Summary(Struct, frozen=True, kw_only=True):
    """What a job did.

    Attributes:
        job: Its name, which `job` gives.
        seconds: How long it took; likewise.
        counts: What it counted, by name.
        rejected: How many rows it could not take.
        rows: How many rows it was given.
        facts: What else whoever reads it should know: windows relied on, files written.
    """

    job: str = ""
    seconds: float = 0.0
    rows: int = 0
    rejected: int = 0
    counts: Mapping[str, int]
    facts: Mapping[str, Any] = {}

    def is_within(self, most_rejected: float) -> bool:
        """Whether no more than this part of the rows was rejected.

        Args:
            most_rejected: 0 to 1; 0 allows none.
        """
        return self.rejected <= most_rejected * self.rows

    def shape(self) -> dict[str, Any]:
        """Return it as JSON's types, flat but for `counts` and `facts`."""
        return structs.asdict(self)

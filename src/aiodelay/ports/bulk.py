"""What only Spark's jobs need of a store: loading in bulk, and reading whole tables in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from aiodelay.core.table_scan import Columns, Scan
from aiodelay.core.values import Outcome, Put

__all__ = ["BulkLoad", "Scannable"]


@runtime_checkable
class BulkLoad(Protocol):
    """A store that takes versioned messages in bulk, such as a backfill's, whose parts may be sent again much later."""

    async def bulk_load(self, puts: Sequence[Put]) -> Sequence[Outcome]:
        """Store each message unless its id has, or ended with, a version that is not older (S4, S6).

        Repeating is safe for as long as versions of what has ended are kept (24 h): what is known answers `outdated`,
        and nothing delivered or cancelled comes back. No ops are remembered for it. One outcome each, in order; as
        `apply`, it never raises for a fault of the store, and what stands behind a fault may not have been sent.

        Args:
            puts: Each with `Conflict.newer(version)` and that version in its envelope; their ops do not count.

        Raises:
            InputError: One of them is not of this form; nothing was stored.
        """
        ...


@runtime_checkable
class Scannable(Protocol):
    """A store whose tables can be read whole, in parts, by processes that do not open it; nothing is written.

    Called from any thread, and not within an event loop.
    """

    def scan_parts(self, scan: Scan) -> Sequence[object]:
        """Split what is asked for into parts of about the same size; each is a value that pickles.

        Raises:
            StoreUnavailableError: No answer, or there is no such file or topic.
            StoreMismatchError: Its data cannot be used by this version.
        """
        ...

    def scan_part(self, scan: Scan, part: Any) -> Iterator[Columns]:  # noqa: ANN401 - one of the store's own
        """Read a part, batch by batch, each of a bounded size.

        A message that stands still until all parts are read is in exactly one of them, once. One that is claimed,
        retried or put meanwhile is in one of them at most.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...

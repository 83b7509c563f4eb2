"""The abilities of a store that only Spark jobs use: bulk loading, and reading whole tables in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from aiodelay.core.table_scan import Columns, Scan
from aiodelay.core.values import Outcome, Put

__all__ = ["BulkLoad", "Scannable"]


@runtime_checkable
class BulkLoad(Protocol):
    """A store that loads versioned messages in bulk. A job such as a backfill may send a part again much later."""

    async def bulk_load(self, puts: Sequence[Put]) -> Sequence[Outcome]:
        """Store each message, unless the store knows the same or a newer version of its id (S4, S6).

        The store also knows the versions of messages that have ended within the last 24 h. So for 24 h, repeating is
        safe: a message whose version is known gets the answer `outdated`, and no delivered or cancelled message comes
        back. The store remembers no ops for this call.

        Like `apply`, this method never raises for a fault of the store. If a message meets such a fault, the messages
        after it may not have been sent.

        Args:
            puts: Puts with `Conflict.newer(version)`, and with the same version in the envelope. Ops are ignored.

        Returns:
            One outcome for each message, in order.

        Raises:
            InputError: A put is not of this form. Nothing was stored.
        """
        ...


@runtime_checkable
class Scannable(Protocol):
    """A store whose whole tables other processes can read in parts, without opening the store or writing to it.

    Call its methods from any thread, but not within an event loop.
    """

    def scan_parts(self, scan: Scan) -> Sequence[object]:
        """Split a scan into parts of about the same size. Each part is a value that can be pickled.

        Raises:
            StoreUnavailableError: The store did not answer, or its file or topic does not exist.
            StoreMismatchError: This version cannot use the store's data.
        """
        ...

    def scan_part(self, scan: Scan, part: Any) -> Iterator[Columns]:  # noqa: ANN401 - a type of the store's own
        """Read a part in batches of a bounded size.

        A message that does not change until all parts are read appears exactly once, in one part. A message that is
        claimed, retried or stored meanwhile appears in one part at most.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        ...

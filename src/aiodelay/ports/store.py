"""`Store`: what every store does, with its promises as numbered rules; `StoreTraits`: what differs between stores.

A store has two roles. Every process uses `Store.apply`; dispatching processes also open `Store.work`. The Protocols
that `Store` inherits name its parts. An ability that only some stores have is a Protocol of its own, in `optional.py`,
`endpoints.py`, `transfer.py` or `bulk.py`: `isinstance` tells whether a store has it. `StoreTraits` declares all other
differences, so that nobody finds them out by catching errors.

Rules (docs/guarantees.md holds the table with their tests): S1 never early. S2 nothing acknowledged is lost. S3 at
least once. S4 the latest version wins. S5 an acknowledged cancel is honoured. S6 nothing ended comes back. S7 one live
owner per claim. S8 bytes arrive identical. S9 order by due time, then scheduling order, where declared. B1 duplicates
bounded. L1 no stuck lease. L2 no lost wake-up. L3 fairness between lanes. L5 a poison message stops nobody else. V1 a
process claims nothing whose rules it does not know.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol, Self

from msgspec import Struct

from aiodelay.core.values import (
    LEASE_MS,
    MAX_CLAIM_MESSAGES,
    Command,
    Lane,
    Outcome,
    SourcePosition,
    Tidied,
    WorkStatus,
)

from .control import DeadLetters, Holds, PutsBack
from .feed import Feed
from .inspection import Inspectable, Instances, Recurring
from .journal import Followed, Journal

__all__ = ["Store", "StoreTraits", "Work", "missing_members"]


class StoreTraits(Struct, frozen=True, kw_only=True):
    """What differs between stores, for the code that uses them; the conformance suite has attributes of its own.

    Attributes:
        durable: What was acknowledged survives the end of the process.
        conflicts: `Conflict` modes that `apply` knows.
        cancel: `verdict`: a cancel's answer is final. `recorded`: it is carried out later.
        lookup: `anywhere`: any process may look into the store. `owner`: only the one that serves the message.
        safety_poll_ms: A message is claimable at most this much after its due time even if every wake-up is lost.
        positions: What `apply` carries out that comes with an intake's position: `all`, or only what can be `recorded`
            without a verdict (replace, keep and cancel). `none`: it takes no positions.
        changes: `apply` knows `Reschedule` and `Fire`.
        longest_lease_ms: A process that stood still for so long may begin nothing that it has claimed.
        paced_rows: Most messages of one call of a bulk load that keeps to a rate beside live work: more keep that work
            waiting, fewer cost the store more for each.
    """

    durable: bool
    conflicts: frozenset[str]
    cancel: Literal["verdict", "recorded"]
    lookup: Literal["anywhere", "owner"]
    safety_poll_ms: int
    positions: Literal["all", "recorded", "none"] = "all"
    changes: bool = True
    longest_lease_ms: int = LEASE_MS
    paced_rows: int = MAX_CLAIM_MESSAGES


class Work(Feed, Protocol):
    """A dispatching process's side of a store; what it had claimed lapses once it is gone."""

    async def tidy(self, lanes: Collection[Lane], *, limit: int) -> Tidied:
        """Do a bounded step of housekeeping over all lanes, also those that nobody serves (L1, L4).

        Returns lapsed leases to their lanes, applies `Late` policies, forgets what is past its window, notes that this
        worker serves `lanes`, and reports every lane that holds messages.

        Args:
            lanes: What this process serves.
            limit: Most messages to touch.

        Raises:
            StoreUnavailableError: No answer; the next step makes up for it.
        """
        ...

    def status(self) -> WorkStatus:
        """Say whether claims are served yet."""
        ...


class Store(Inspectable, Recurring, Instances, DeadLetters, Holds, Journal, Followed, PutsBack, Protocol):
    """Keeps messages until they are due.

    Every store has every method, the inherited ones too. A method that a store cannot serve as it was opened, such as
    `journal` without a journal, raises `UnsupportedByStoreError`.
    """

    @property
    def traits(self) -> StoreTraits:
        """What this store can and cannot do."""
        ...

    @property
    def name(self) -> str:
        """What error messages call it: its URL, masked."""
        ...

    def now_ms(self) -> int:
        """Return the store's time as far as known, epoch ms; due times are judged by it."""
        ...

    async def __aenter__(self) -> Self:
        """Connect; an error leaves nothing open.

        A scheduler that waits for its store enters it again: after an error here or in `work`, or of a sink.

        Raises:
            StoreUnavailableError: It cannot be reached; another attempt may succeed.
            StoreMismatchError: Its data cannot be used by this version.
        """
        ...

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect; idempotent."""
        ...

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        """Carry out commands in order (S2, S4, S5); each has an outcome of its own, in the same order.

        Repeating a command with its op within `RETRY_WINDOW_MS` gives its first answer and writes nothing. Never
        raises for a fault of the store: that is an outcome.

        Args:
            commands: Each with its op id.
            source: Moves an intake's position in the same step: then either all are carried out, or none, as where
                another reader has moved it (`passed`).
        """
        ...

    def work(self, worker: str, lanes: Collection[Lane]) -> AbstractAsyncContextManager[Work]:
        """Open the dispatching role.

        Args:
            worker: Names this process among its peers.
            lanes: What it serves at first; `tidy` renews that.
        """
        ...


def missing_members(store: object) -> list[str]:
    """Return the names of the members of `Store` that an object lacks, in alphabetical order.

    An object also lacks a member that is None, or that it only inherits from the Protocols: those do nothing.
    """
    return sorted(
        name
        for name, declared in _declared_members().items()
        if getattr(store, name, None) is None or getattr(type(store), name, None) is declared
    )


def _declared_members() -> dict[str, object]:
    connecting = {"__aenter__", "__aexit__"}
    return {
        name: member
        for port in Store.__mro__
        for name, member in vars(port).items()
        if name in connecting or not name.startswith("_")
    }

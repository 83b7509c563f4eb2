"""`Store`: the promises of every store, as numbered rules. `StoreTraits`: the differences between stores.

A store has two roles. Every process uses `Store.apply`; dispatching processes also open `Store.work`. The Protocols
that `Store` inherits name its parts.

An ability that only some stores have is a Protocol of its own, in `optional.py`, `endpoints.py`, `transfer.py` or
`bulk.py`. `isinstance` tells whether a store has the ability. `StoreTraits` declares all other differences, so that a
caller need not catch errors to find them.

Rules (docs/guarantees.md holds the table with their tests):

- S1 never early. S2 no acknowledged message is lost. S3 at least once. S4 the latest version wins.
- S5 an acknowledged cancel is honoured. S6 no ended message comes back. S7 one live owner per claim.
- S8 bytes arrive identical. S9 order by due time, then scheduling order, where declared.
- B1 duplicates are bounded. L1 no stuck lease. L2 no lost wake-up. L3 fairness between lanes.
- L5 a poison message stops no other message. V1 a process claims nothing under rules that it does not know.
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

from .control import DeadLetters, Pauses, PutsBack
from .feed import Feed
from .inspection import Inspectable, Instances, Recurring
from .journal import Followed, Journal

__all__ = ["Store", "StoreTraits", "Work", "missing_members"]


class StoreTraits(Struct, frozen=True, kw_only=True):
    """The differences between stores that the engine and tools read.

    Differences that matter only to the conformance suite are attributes of the suite.

    Attributes:
        durable: Whether acknowledged messages survive the end of the process.
        conflicts: The `Conflict` modes that `apply` knows.
        cancel: `verdict`: a cancel's answer is final. `recorded`: the store carries the cancel out later.
        lookup: `anywhere`: any process can inspect the store. `owner`: only the process that serves the message can.
        safety_poll_ms: The interval of the safety poll. Even if every wake-up is lost, a message can be claimed at most
            this many ms after its due time.
        positions: The commands that `apply` accepts together with an intake's position. `all`: all commands.
            `recorded`: only commands that need no verdict (replace, keep and cancel). `none`: the store takes no
            positions.
        changes: Whether `apply` knows `Reschedule` and `Fire`.
        longest_lease_ms: The longest lease. If a process was suspended for this long, it must begin no run of a message
            that it had claimed before.
        open_over_fork: Whether a forked process may open the store if it was open in this process at the fork.
        paced_rows: Most messages in one call of a bulk load that limits its rate for the sake of live work. With a
            larger value, live work waits longer. With a smaller value, each message costs the store more.
        commands_at_once: Most commands of waiting callers in one call of `apply`. A store that divides a call into
            parts can take more: a part with few commands costs more for each command.
    """

    durable: bool
    conflicts: frozenset[str]
    cancel: Literal["verdict", "recorded"]
    lookup: Literal["anywhere", "owner"]
    safety_poll_ms: int
    positions: Literal["all", "recorded", "none"] = "all"
    changes: bool = True
    longest_lease_ms: int = LEASE_MS
    open_over_fork: bool = True
    paced_rows: int = MAX_CLAIM_MESSAGES
    commands_at_once: int = MAX_CLAIM_MESSAGES


class Work(Feed, Protocol):
    """The dispatching side of a store, for one process. If the process ends, its claims lapse."""

    async def tidy(self, lanes: Collection[Lane], *, limit: int) -> Tidied:
        """Do one bounded step of housekeeping over all lanes, including lanes that no process serves (L1, L4).

        The step returns lapsed claims to their lanes, applies `Late` policies and deletes expired entries. It also
        notes that this worker serves `lanes`.

        Args:
            lanes: The lanes that this process serves.
            limit: Most messages to change.

        Returns:
            A report that names every lane that holds messages.

        Raises:
            StoreUnavailableError: The store did not answer. The next step does the work of this step too.
        """
        ...

    def status(self) -> WorkStatus:
        """Return whether claims are served yet."""
        ...


class Store(Inspectable, Recurring, Instances, DeadLetters, Pauses, Journal, Followed, PutsBack, Protocol):
    """Keeps messages until they are due.

    Every store has every method, including the inherited ones. If a store cannot serve a method as it was opened, the
    method raises `UnsupportedByStoreError`. An example is `journal` of a store without a journal.
    """

    @property
    def traits(self) -> StoreTraits:
        """The abilities and limits of this store."""
        ...

    @property
    def name(self) -> str:
        """The name of the store in error messages: its URL, masked."""
        ...

    def now_ms(self) -> int:
        """Return the store's time in epoch ms, as far as this process knows it. Due times refer to this time."""
        ...

    async def __aenter__(self) -> Self:
        """Connect. If this fails, nothing stays open.

        The store may be entered again after an error of this method, of `work`, or of a sink. A scheduler does so while
        it waits for its store.

        Raises:
            StoreUnavailableError: The store does not answer. Another attempt may succeed.
            StoreMismatchError: This version cannot use the store's data.
        """
        ...

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect. Repeated calls do nothing."""
        ...

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        """Carry out commands in order (S2, S4, S5).

        If a command is repeated with the same op within `RETRY_WINDOW_MS`, the store returns the first answer and
        writes nothing. This method never raises for a fault of the store: a fault is an outcome.

        Args:
            commands: The commands, each with an op.
            source: The position of an intake, which the store writes in the same step. With a position, the store
                carries out all commands or none. If the commands do not continue the stored position, because another
                reader has moved it or the store has lost it, it carries out none (`passed`). If it carries out none,
                each outcome is `Unknown`, or refused as `passed`, `unavailable` or `full`. A command that is refused
                for another reason counts as carried out: the position has moved. A store of several parts, such as the
                shards of a Redis namespace, does so in each part. If only some parts have carried their commands out,
                all outcomes are `Unknown`. The reader then asks for the position and reads on from there.

        Returns:
            One outcome for each command, in order.
        """
        ...

    def work(self, worker: str, lanes: Collection[Lane]) -> AbstractAsyncContextManager[Work]:
        """Return a context manager that opens the dispatching side of the store.

        Args:
            worker: The worker id of this process.
            lanes: The lanes that this process serves at first. Each `tidy` updates them.
        """
        ...


def missing_members(store: object) -> list[str]:
    """Return the names of the members of `Store` that an object lacks, in alphabetical order.

    A member that is None counts as lacking. So does a member that is only inherited from a Protocol, since it does
    nothing.
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

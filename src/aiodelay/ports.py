"""What a store and a sink must do: narrow Protocols, batches on the hot path, promises as numbered rules.

A store has two roles. Every process uses `Store.apply`; dispatching processes also open `Store.work`. Further abilities
are Protocols of their own (`Inspectable`, `Instances`, `DeadLetters`, `Holds`, `BulkLoad`): `isinstance` tells whether
a store has one. What differs between stores beyond that is declared in `StoreTraits`, not found out by catching errors.

Rules (docs/guarantees.md holds the table with their tests): S1 never early. S2 nothing acknowledged is lost. S3 at
least once. S4 the latest version wins. S5 an acknowledged cancel is honoured. S6 nothing ended comes back. S7 one live
owner per claim. S8 bytes arrive identical. S9 order by due time, then scheduling order, where declared. B1 duplicates
bounded. L1 no stuck lease. L2 no lost wake-up. L3 fairness between lanes. L5 a poison message stops nobody else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Literal, Protocol, Self, runtime_checkable

from msgspec import Struct

from .model import (
    LEASE_MS,
    MAX_CLAIM_MESSAGES,
    Blocked,
    Claimed,
    Command,
    DeadKey,
    DeadLetter,
    Delivery,
    Demand,
    Instance,
    JournalEntry,
    Lane,
    LaneCounts,
    LoadBucket,
    Outcome,
    Put,
    PutBack,
    Query,
    Reach,
    Registered,
    Renewal,
    RenewOutcome,
    SendOutcome,
    Settlement,
    SettleOutcome,
    Snapshot,
    SourcePosition,
    Stored,
    Tidied,
    Transferred,
    WorkStatus,
)
from .scanning import Columns, Scan

__all__ = [
    "Bounded",
    "BulkLoad",
    "DeadLetters",
    "Feed",
    "Followed",
    "Guarded",
    "Holds",
    "Identified",
    "Inspectable",
    "Instances",
    "Journal",
    "Lists",
    "Loads",
    "PutsBack",
    "Recurring",
    "Registry",
    "Restricted",
    "Scannable",
    "Sink",
    "Source",
    "Store",
    "StoreTraits",
    "Trail",
    "Transfer",
    "Transferring",
    "Work",
]


class StoreTraits(Struct, frozen=True):
    """What differs between stores; the conformance suite reads it.

    Attributes:
        durable: What was acknowledged survives the end of the process.
        conflicts: `Conflict` modes that `apply` knows.
        cancel: `verdict`: a cancel's answer is final. `recorded`: it is carried out later.
        lookup: `anywhere`: any process may look into the store. `owner`: only the one that serves the message.
        order_per_group: Claims of a lane leave by due time, then scheduling order (S9).
        safety_poll_ms: A message is claimable at most this much after its due time even if every wake-up is lost.
        wakes_other_processes: A put in one process ends `wait` in another before the safety poll.
        positions: What `apply` carries out that comes with an intake's position: `all`, or only what can be `recorded`
            without a verdict (replace, keep and cancel). `none`: it takes no positions.
        changes: `apply` knows `Reschedule` and `Fire`.
        counted_journal: A journal keeps as many entries as it was told, numbered one by one; otherwise as long as its
            topic keeps them, numbered upwards, those of a message in their order.
        longest_lease_ms: A process that stood still for so long may begin nothing that it has claimed.
        leases_survive: A claim outlives the process that made it, until its lease ends; otherwise it ends with it.
        paced_rows: Most messages of one call of a bulk load that keeps to a rate beside live work: more keep that work
            waiting, fewer cost the store more for each.
    """

    durable: bool
    conflicts: frozenset[str]
    cancel: Literal["verdict", "recorded"]
    lookup: Literal["anywhere", "owner"]
    order_per_group: bool
    safety_poll_ms: int
    wakes_other_processes: bool
    positions: Literal["all", "recorded", "none"] = "all"
    changes: bool = True
    longest_lease_ms: int = LEASE_MS
    leases_survive: bool = True
    counted_journal: bool = True
    paced_rows: int = MAX_CLAIM_MESSAGES


class Feed(Protocol):
    """What gives out claims and takes their settlements: a store's dispatching side, or a source.

    `claim`, `settle`, `renew` and `tidy` may be cancelled at any await: what was carried out stands, and repeating a
    claim with the same `request` gives its messages again.
    """

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        """Lease due messages, earliest due first within a lane (S1, S3, S7, S9).

        Lanes get an equal share of `MAX_CLAIM_MESSAGES` and `MAX_CLAIM_BYTES` first, then the rest of them. Messages
        that are suspected of ending processes are given out in trials: a group of them without others, half as large
        after each that ended its process (`transitions.Trials`), one group at a time. `Late` policies are applied on
        the way. Of recurring messages only the caller can work out the next time: late ones and killers
        (`transitions.is_killer`) are given out for it to settle without a run.

        Args:
            demand: Most messages and bytes wanted per lane. Lanes not named are not touched.
            request: Repeating a claim with the same request returns the same messages, as far as still leased.
            lease_ms: Milliseconds until an unsettled claim may be claimed again, with another token.

        Raises:
            StoreUnavailableError: No answer. Nothing is leased, or a repeat returns it: safe to repeat.
        """
        ...

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        """End claims, each in one step with what follows from it (S2, S6).

        Returns:
            One outcome per settlement, in order. Only a claim that is still held is written; one whose lease has ended
            is held as long as nobody else has taken the message.

        Raises:
            StoreUnavailableError: No answer; repeating is safe, and what had been settled then answers `gone`.
        """
        ...

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        """Prolong leases from one token to another (L1).

        Raises:
            StoreUnavailableError: No answer; repeating is safe.
        """
        ...

    async def wait(self, *, until_ms: int | None) -> None:
        """Return when there may be something new to claim: at `until_ms`, at a wake-up, or at the safety poll (L2).

        Signals that came since the last `clear` end the wait at once.
        """
        ...

    def wake(self) -> None:
        """End this process's current or next `wait`."""
        ...

    def clear(self) -> None:
        """Forget wake-ups so far; call it before looking, so that one in between is not lost."""
        ...


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

    def beat(self, ids: Collection[str]) -> None:
        """Tell that this process lives and holds claims on these suspects, though their leases may be over (L5).

        Called from a thread of its own, which may wait here, every third of a lease: also while a handler blocks the
        event loop. The caller ignores an exception.
        """
        ...

    def status(self) -> WorkStatus:
        """Say whether claims are served yet."""
        ...


class Store(Protocol):
    """Keeps messages until they are due."""

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


@runtime_checkable
class Inspectable(Protocol):
    """A store that can be looked into."""

    async def get(self, message_id: str) -> Snapshot | None:
        """Return the message as it stands now, None if it is not pending and not in flight."""
        ...

    async def search(self, query: Query) -> Sequence[Snapshot]:
        """List messages by (next attempt, id)."""
        ...

    async def counts(self) -> Mapping[Lane, LaneCounts]:
        """Count messages by lane and state."""
        ...

    async def load(self, *, bucket_ms: int, buckets: int) -> Sequence[LoadBucket]:
        """Count what comes due in each of the next `buckets` spans of `bucket_ms`, from now on; empty ones left out."""
        ...

    async def position(self, source: str) -> int | None:
        """Return an intake's stored position; a store may refuse from then on who has taken the source in before."""
        ...


@runtime_checkable
class Recurring(Protocol):
    """A store that finds its recurring messages by an index."""

    async def series(self, *, after: str | None = None, limit: int = 100) -> Sequence[Snapshot]:
        """List recurring messages that are pending or in flight, in an order of the store's own that does not change.

        Args:
            after: The id of the last one of the page before.
            limit: 1 to 1,000.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...


@runtime_checkable
class Instances(Protocol):
    """A store that knows which processes dispatch from it."""

    async def instances(self) -> Sequence[Instance]:
        """List those that were heard of within the last minute, by name.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...


@runtime_checkable
class DeadLetters(Protocol):
    """A store that keeps messages given up."""

    async def dead_letters(
        self,
        *,
        lane: Lane | None = None,
        message_id: str | None = None,
        after: tuple[int, str, int] | None = None,
        limit: int = 100,
    ) -> Sequence[DeadLetter]:
        """List dead letters, oldest first; those of one message are looked up, whatever else is dead.

        Args:
            lane: Only of this lane.
            message_id: Only of this message, in all its revisions.
            after: The (at_ms, id, revision) of the last one of the page before.
            limit: 1 to 1,000.
        """
        ...

    async def redrive(self, keys: Sequence[DeadKey]) -> Sequence[Outcome]:
        """Give dead letters a new life, due now: `Stored`, or `Refused` as `not_found`, `exists` or `undecodable`."""
        ...

    async def purge(self, keys: Sequence[DeadKey]) -> int:
        """Delete dead letters for good; return how many there were."""
        ...


@runtime_checkable
class Holds(Protocol):
    """A store in which delivery can be paused: what is held stays stored, can be cancelled, and is seen by all."""

    async def hold(self, lane: Lane, address: str | None = None) -> bool:
        """Pause a lane, or one address of it; return whether it was not held before."""
        ...

    async def release(self, lane: Lane, address: str | None = None) -> bool:
        """Resume; return whether it was held."""
        ...

    async def holds(self) -> Sequence[tuple[Lane, str | None]]:
        """List what is held."""
        ...


@runtime_checkable
class Journal(Protocol):
    """A store that can keep a bounded trail of outcomes, each written in the step that causes it."""

    async def journal(
        self, *, message_id: str | None = None, after: int = 0, limit: int = 100
    ) -> Sequence[JournalEntry]:
        """List entries with a number above `after`, in order; of one message if named.

        Raises:
            UnsupportedByStoreError: This store was opened without a journal.
        """
        ...


class Trail(Protocol):
    """A journal, open for reading alone, part by part: entries of a part are numbered upwards from 0 or 1."""

    async def spans(self) -> Mapping[int, range]:
        """Return by part which numbers can be read: from the oldest that is kept to before the next to be given.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...

    def entries(
        self, part: int, span: range, trimmed: Callable[[range], object]
    ) -> AsyncIterator[Sequence[JournalEntry]]:
        """Yield a part's entries with these numbers, in order, some at a time; repeating gives the same.

        Args:
            part: Which.
            span: From which number on, up to before which; not beyond what `spans` has told.
            trimmed: Is given numbers whose entries, as far as they have any, are kept no more; may raise.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...


@runtime_checkable
class Followed(Protocol):
    """A store whose journal others can follow without opening the store: nothing is written or made for it."""

    def trail(self) -> AbstractAsyncContextManager[Trail]:
        """Open the journal.

        Raises:
            UnsupportedByStoreError: The store's URL names no journal.
            StoreMismatchError: What should hold it is not there, or not ours.
            StoreUnavailableError: No answer.
        """
        ...


class Sink(Protocol):
    """Takes messages when they are due, at least once, as many as it has asked for.

    A sink's attribute `system`, if it has one, is the `messaging.system` of its deliveries' spans.
    """

    @property
    def name(self) -> str:
        """The part of `to=` before the colon."""
        ...

    @property
    def limits(self) -> Demand:
        """Most messages and bytes that may be in flight to it; the last message given may exceed the bytes."""
        ...

    def check(self, address: str) -> None:
        """Refuse an address that can never work, before anything is stored.

        Raises:
            TargetError: Says what is allowed.
        """
        ...

    async def __aenter__(self) -> Self:
        """Connect; an error leaves nothing open. After one, here or elsewhere, the sink may be entered again.

        Raises:
            SinkUnavailableError: It cannot be reached; another attempt may succeed.
        """
        ...

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect; idempotent."""
        ...

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        """Send; one outcome per delivery, in order.

        Of a batch for which it raises anything else, or answers otherwise, each message is sent again by itself; the
        one at which that happens again has failed an attempt.

        Raises:
            SinkUnavailableError: Nothing can be sent now. Costs no attempt; the messages return to the store.
        """
        ...


@runtime_checkable
class PutsBack(Protocol):
    """A store that takes messages back that had left it for a sink: a source's retries and dead letters."""

    async def put_back(self, messages: Sequence[PutBack]) -> Sequence[Stored]:
        """Store messages under the revision that they have (S1, S2, S4); one answer each, in order.

        Repeating is safe as long as they are there: an id that is pending or in flight, and a dead letter of the same
        revision, stay as they are (`kept`).

        Raises:
            StoreUnavailableError: No answer. Some may have been stored.
        """
        ...


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


@runtime_checkable
class Loads(Protocol):
    """A store that has to be read before it serves claims; that may take longer than opening `work` should."""

    def status(self) -> WorkStatus:
        """Say how far that is, also while `work` is being opened."""
        ...

    def tell_restored(self, told: Callable[[float], None] | None) -> None:
        """From now on tell of each part that begins to serve claims how many seconds that took; None: nobody."""
        ...


@runtime_checkable
class Guarded(Protocol):
    """A store into which others write without asking."""

    def guard(self, check: Callable[[str], object]) -> None:
        """Refuse what others address to where it may not go: it becomes a dead letter.

        Args:
            check: Is given `<sink>:<address>`, and raises `TargetNotAllowedError`.
        """
        ...


@runtime_checkable
class Restricted(Protocol):
    """A store whose server grants rights to each user."""

    async def missing_rights(self) -> Sequence[str]:
        """Name the rights that this process needs and lacks, each followed by its remedy.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...


@runtime_checkable
class Bounded(Protocol):
    """A store whose server takes nothing more from a certain size on."""

    async def fill(self) -> float | None:
        """Return how much of the room is used, 0 to 1 and somewhat more; None if it has no bound.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...


@runtime_checkable
class Identified(Protocol):
    """A store that notices when its data are deleted or replaced while it is open."""

    async def vanished(self) -> str:
        """Return what happened to the data that this store was opened on; "" while they are there.

        A store that finds its data gone leaves a note where others can read it: see `vanished_elsewhere`.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...

    async def vanished_elsewhere(self) -> str:
        """Return what another process has noted of its data within the last minute; "" if there is no such note.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...


@runtime_checkable
class Lists(Protocol):
    """A store on whose server lists stand that messages go to."""

    async def lengths(self, destinations: Collection[str]) -> Mapping[str, int]:
        """Return how many elements those lists hold that are named; what is no list here is left out.

        Args:
            destinations: `<sink>:<address>`.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...


@runtime_checkable
class Transfer(Protocol):
    """A store that shares a system with sinks: it moves what is due there by itself, in the step that removes it."""

    @property
    def sinks(self) -> Sequence[Sink]:
        """The sinks that it brings along."""
        ...

    @property
    def sources(self) -> Sequence[Source]:
        """The sources that it brings along."""
        ...

    def reaches(self, sink: Sink) -> Reach:
        """Say how often a message reaches a sink from here, and why."""
        ...

    def transferring(self, sink: Sink) -> AbstractContextManager[Transferring]:
        """Open the moving of one sink's messages; only for a sink that is reached exactly once."""
        ...

    async def blocked(self) -> Sequence[Blocked]:
        """List destinations that take nothing now, by lane and address.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...


@runtime_checkable
class Registry(Protocol):
    """A store that knows the consumers registered with topics and logs beside it, and how far each is behind."""

    async def registered(self, topic: str | None = None) -> Sequence[Registered]:
        """List consumers, by topic, kind and name.

        Args:
            topic: Only of this one.

        Raises:
            TargetError: No topic can have that name.
            StoreUnavailableError: No answer.
        """
        ...


class Source(Protocol):
    """Gives a sink's messages to handlers, in this process or in others, at least once."""

    @property
    def name(self) -> str:
        """The part of `source=` before the colon."""
        ...

    def check(self, address: str) -> None:
        """Refuse an address that can never work.

        Raises:
            TargetError: Says what is allowed.
        """
        ...

    async def __aenter__(self) -> Self:
        """Connect; an error leaves nothing open. After one, here or elsewhere, the source may be entered again.

        Raises:
            StoreUnavailableError, SinkUnavailableError: It cannot be reached; another attempt may succeed.
        """
        ...

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect; idempotent."""
        ...

    def feed(
        self,
        address: str,
        consumer: str,
        put_back: Callable[[Sequence[PutBack]], Awaitable[Sequence[Stored]]],
        now_ms: Callable[[], int],
    ) -> AbstractAsyncContextManager[Feed]:
        """Open the taking of messages from one address.

        A claim asks for one lane, whose handler they are for. `Done` ends a message; `Again` at a later time, and
        `Dead`, put it back into a store first; what is given back unrun returns to where it came from.

        Args:
            address: Where messages are taken from.
            consumer: Names this process among those that take from there.
            put_back: Stores retries and dead letters; repeats are safe.
            now_ms: The store's time, by which tokens tell when leases end.
        """
        ...


class Transferring(Protocol):
    """One process's moving of one sink's messages; others may move the same sink's beside it."""

    async def transfer(self, demand: Demand, settlements: Sequence[Settlement] = (), *, traces: int = 0) -> Transferred:
        """Move due messages to where they are addressed, earliest due first (S1, S3, S6, S8, S9).

        A message is at its destination and out of the store, or neither. What is addressed to a destination that is
        full, broken or held waits aside and holds up nobody (L3, L5). `Late` policies are applied on the way.

        Of a recurring message only the caller can work out the next time: one that is due is returned, and stays. Its
        occurrence ends by a settlement in a later call, whose `token` is the occurrence's due time: moved by
        `Done("delivered")`, not moved by any other. One that has ended or was changed meanwhile is not touched.

        Args:
            demand: Most messages and bytes to move. No single step of a server or cluster, script or transaction, moves
                more than `MAX_CLAIM_MESSAGES` and `MAX_CLAIM_BYTES`; a call may be one step, or several.
            settlements: How occurrences end, `Done` or `Dead`, each with `then_due_ms`.
            traces: Of how many of the messages moved, at most, to return the trace.

        Raises:
            StoreUnavailableError: No answer. It may have been carried out; a repeat moves what is left.
        """
        ...

    async def wait(self, *, until_ms: int | None) -> None:
        """Return when there may be something new to move: at `until_ms`, at a wake-up, or at the safety poll (L2)."""
        ...

    def wake(self) -> None:
        """End the current or next `wait`."""
        ...

    def clear(self) -> None:
        """Forget wake-ups so far."""
        ...

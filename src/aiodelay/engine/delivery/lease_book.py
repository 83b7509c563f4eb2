"""The lease book: it holds the claims of this process, and sends all settlements and renewals.

The book makes one call at a time, so a renewal never overlaps the settlement of the same message. If a call fails, the
book keeps the settlements or renewals of this call and sends them again. It is safe to repeat them. While the event
loop is blocked, `BlockedLoop` makes the calls, in another thread.
"""

from __future__ import annotations

import logging
from asyncio import CancelledError, sleep
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from threading import Lock
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from aiodelay.core.transitions import (
    LONGEST_TRIAL_MS,
    SUSPECT_LAPSES,
    TRIAL_MS,
    base_id,
    is_lease_too_long,
    is_suspect,
    token_counter,
    token_for,
    trial_ms,
)
from aiodelay.core.values import MAX_CLAIM_MESSAGES, MAX_LAPSES, Claim, Renewal, RenewOutcome, Settlement, SettleOutcome
from aiodelay.core.wakeup import WakeUp
from aiodelay.engine.backoff import Backoff
from aiodelay.engine.observer import Attempt, Observer
from aiodelay.errors import StoreError
from aiodelay.ports import Feed, LocalFeed, PartialAnswerError
from aiodelay.ports.clock import Clock

from .heartbeat import Heartbeat
from .snapshots import snapshot

__all__ = [
    "Held",
    "LeaseBook",
    "Outgoing",
    "Taker",
    "always",
    "current_settlement",
    "note_outcomes",
    "note_renewal",
]

log: logging.Logger = logging.getLogger("aiodelay.leases")

PART_AGAIN_MS = 500
"""The wait until a call is repeated that a part of the store has not answered. The other parts do not wait."""
GATHER_TURNS = 4
"""Most turns of the event loop for which settlements wait while more runs end in each turn."""
IDS_NAMED = 5
"""Most ids that a log line about lost leases names."""


def always() -> bool:
    """Return True: without a pulse, nobody declares this process dead."""
    return True


class Taker(Protocol):
    """The subscription to which a claim was delivered."""

    def settled(self, held: Held, outcome: SettleOutcome | None) -> None:
        """Learn that the claim has ended: another message may be requested. The book calls `on_change` after this.

        If a part of the store does not answer, the outcome is None. The book calls again when the claim has ended.
        """
        ...

    def lost(self, held: Held) -> None:
        """Learn that the lease was lost. Stop the run: the store will accept no settlement."""
        ...


class Held(Struct, eq=False):
    """A claim in this process.

    Attributes:
        claim: The claim. Each renewal replaces it.
        taker: The subscription to which the claim was delivered.
        book: The book that holds the claim.
        renew_at_ms: When the book renews the lease next.
        began_ms: The store's time at which the attempt began; 0 before. The next due time of a series follows from it.
        settlement: The settlement to send; None until the run has ended.
        outcome: The answer to the settlement; None until the store has answered.
        is_lost: Whether the lease was lost, or `forget` has dropped the claim.
        is_unwanted: Whether the message was replaced or cancelled after the claim. Then a run that has not begun must
            not begin.
        is_over: Whether the book no longer holds the claim.
        alone_until_ms: For a suspect: this process claims nothing else until this time.
        trial_ends_ms: For a suspect: the end of its trial.
        may_kill_until_ms: For a message that has lapsed before: until this time, it may still end this process. If it
            is not a suspect, this process claims no suspect until this time.
        attempt: The observer's object for the attempt; None if there is no observer.
        begins_by_s: For a message of a batch handler: it waits for others until this time of the event loop.
        is_freed: Whether the taker may have requested another message in place of this one.
        doubtful: A renewal that a part of the store has not answered. The store may have carried it out. The book
            repeats it as it was, before it settles the claim.
    """

    claim: Claim
    taker: Taker
    book: LeaseBook
    renew_at_ms: int
    began_ms: int = 0
    settlement: Settlement | None = None
    outcome: SettleOutcome | None = None
    is_lost: bool = False
    is_unwanted: bool = False
    is_over: bool = False
    alone_until_ms: int = 0
    trial_ends_ms: int = 0
    may_kill_until_ms: int = 0
    attempt: Attempt | None = None
    begins_by_s: float = 0.0
    is_freed: bool = False
    doubtful: Renewal | None = None


class Outgoing:
    """The settlements and renewals that a lease book has to send.

    Attributes:
        lock: The event loop holds it while it chooses what to send next, and while it notes an answer. The thread of
            the pulse holds it from its choice until it has noted the answer.
        unanswered: Renewals to repeat as they were: the store may have carried them out.
        ended: The claims to settle, in the order of their ends.
        most_settled: The most settlements in one call.
        is_settling: Whether the event loop has a call with settlements under way.
    """

    def __init__(self) -> None:
        self.lock: Lock = Lock()
        self.unanswered: list[tuple[Held, Renewal]] = []
        self.ended: deque[Held] = deque()
        self.most_settled: int = MAX_CLAIM_MESSAGES
        self.is_settling: bool = False

    async def gather(self) -> None:
        """Wait while more runs end in each turn of the event loop, so that one call settles all of them."""
        before = 0
        for _ in range(GATHER_TURNS):
            if not before < len(self.ended) < self.most_settled:
                return
            before = len(self.ended)
            await sleep(0)

    def batch(self) -> list[Held]:
        """Return the next claims to settle."""
        # Race: the thread of the pulse may append while this looks.
        return list(islice((held for held in snapshot(self.ended) if held.doubtful is None), self.most_settled))

    def put_off(self, held: Held) -> None:
        """Settle a claim after all others."""
        self.ended.remove(held)
        self.ended.append(held)

    def unsettled(self) -> list[Held]:
        """Return the next claims to settle whose settlements have no answer. Any thread may call this."""
        unsettled = [held for held in snapshot(self.ended) if held.outcome is None and held.doubtful is None]
        return unsettled[:MAX_CLAIM_MESSAGES]


class LeaseBook:
    """Holds claims from `add` until they are settled or lost.

    Args:
        work: The store's dispatching side, or a source's feed. It takes settlements and renewals.
        clock: Measures intervals only.
        now_ms: The store's time, in which leases end.
        lease_ms: How long a renewal lasts. A lease is renewed after a third of this time.
        on_change: Called when settlements are sent, and after a claim has ended or was renewed.
        observer: Receives the end of each claim.
        heartbeat: Reports to the store that this process lives. It starts when the book holds suspects.
        may_begin: A function that returns whether a run may begin. If not, others may have declared this process dead.
        is_of_store: Whether the claims come from a store, where a message has one live claim. A source may hold a
            message several times.
    """

    def __init__(
        self,
        work: Feed,
        clock: Clock,
        now_ms: Callable[[], int],
        lease_ms: int,
        on_change: Callable[[], None],
        *,
        observer: Observer | None = None,
        heartbeat: Heartbeat | None = None,
        may_begin: Callable[[], bool] = always,
        is_of_store: bool = False,
    ) -> None:
        self._work, self._now_ms, self._is_of_store = work, now_ms, is_of_store
        self.clock: Clock = clock
        self._lease_ms, self._on_change = lease_ms, on_change
        self._observer, self._heartbeat = observer, heartbeat
        self.may_begin: Callable[[], bool] = may_begin
        self.outgoing: Outgoing = Outgoing()
        self._held: dict[int, Held] = {}  # by id(held), ordered by the time of the next renewal
        self._least: dict[str, tuple[int, int]] = {}  # by message id: the oldest wanted revision, and when it was noted
        self._wakeup = WakeUp()
        self._asked_at_ms = clock.monotonic_ms()
        self._is_closing = False
        self._tried: dict[int, Held] = {}  # suspects whose trials are not over, by id(held)
        self._suspects: dict[int, Held] = {}  # all suspects that may still end this process, the oldest first
        self._lapsed: dict[int, Held] = {}  # messages lapsed once that may still end this process, the oldest first

    def __len__(self) -> int:
        return len(self._held)

    @property
    def is_trying(self) -> bool:
        """Whether the book holds a suspect that was claimed within the last second. If so, claim no other message."""
        now = self.clock.monotonic_ms()
        return any(held.alone_until_ms > now for held in self._tried.values())

    @property
    def max_lapses(self) -> int:
        """The most lapses that a message may have, if it is claimed beside the messages held now.

        Beside suspects, this process runs only messages that have never lapsed. If a suspect ends the process, these
        messages lapse for the first time. Only a second lapse would make them suspects.
        """
        now = self.clock.monotonic_ms()
        if _may_kill(self._suspects, now):
            return 0
        return SUSPECT_LAPSES - 1 if _may_kill(self._lapsed, now) else MAX_LAPSES

    def suspects(self) -> list[str]:
        """Return the ids of the suspects whose trials are not over. Any thread may call this."""
        return [held.claim.record.id for held in list(self._tried.values())]

    def held(self) -> list[Held]:
        """Return all claims. Any thread may call this."""
        return list(self._held.values())

    def renew_all(self) -> None:
        """Renew all leases now. The answers name the claims that others have taken from this process."""
        now = self.clock.monotonic_ms()
        for held in self._held.values():
            held.renew_at_ms = min(held.renew_at_ms, now)
        self._wakeup.set()

    def read(self, asked_at_ms: int) -> None:
        """Note when this process first sent the claim that the store has just answered."""
        self._asked_at_ms = asked_at_ms
        if self._least:  # later claims are answered with the newest versions, so older notes are not needed any more
            self._least = {each: noted for each, noted in self._least.items() if noted[1] >= asked_at_ms}

    def add(self, claims: Sequence[Claim], taker: Taker) -> list[Held]:
        """Hold claims that the store has just returned. Their leases began when this process sent the claim."""
        if self._is_of_store and (older := _claimed_again(self._held.values(), claims)):
            self._lose(older)
        renew_at = self._asked_at_ms + self._lease_ms // 3
        added = [Held(claim, taker, self, renew_at) for claim in claims]
        for held in added:
            if held.claim.record.lapses:
                self._doubt(held)
            if self._least:
                record = held.claim.record
                noted = [self._least.get(each, (0, 0)) for each in (record.id, base_id(record.id))]
                held.is_unwanted = any(record.revision < least for least, _ in noted)
        self._keep(added)
        return added

    def _doubt(self, held: Held) -> None:
        """Note a message that has lapsed: keep it apart from suspects, or begin its trial if it is a suspect."""
        now = self.clock.monotonic_ms()
        held.may_kill_until_ms = now + LONGEST_TRIAL_MS
        if not is_suspect(held.claim.record):
            self._lapsed[id(held)] = held
            return
        held.alone_until_ms, held.trial_ends_ms = now + TRIAL_MS, now + trial_ms(held.claim.record)
        held.renew_at_ms = min(held.renew_at_ms, held.alone_until_ms)
        self._tried[id(held)] = self._suspects[id(held)] = held
        if self._heartbeat is not None:
            self._heartbeat.start(self.suspects)

    def supersede(self, message_id: str, revision: int) -> None:
        """Mark the claims on older versions of a message, also those in an answer that is still on its way here.

        A retry of a series' occurrence counts as a version of the series.

        Args:
            message_id: The id of the message or series.
            revision: The oldest revision of which a run may still begin.
        """
        self._least[message_id] = revision, self.clock.monotonic_ms()
        for held in self._held.values():
            record = held.claim.record
            if record.revision < revision and message_id in (record.id, base_id(record.id)):
                held.is_unwanted = True

    def _forget_doubt(self, held: Held) -> None:
        for doubtful in (self._tried, self._suspects, self._lapsed):
            doubtful.pop(id(held), None)

    def _keep(self, together: Sequence[Held]) -> None:
        """Add claims in the order of their renewal times. All of them have the same time, except suspects."""
        last = next(reversed(self._held.values()), None)
        self._held.update((id(held), held) for held in together)
        if last is None or self._tried or (together and together[0].renew_at_ms < last.renew_at_ms):
            self._held = dict(sorted(self._held.items(), key=lambda item: item[1].renew_at_ms))
            self._wakeup.set()

    def settle(self, held: Held, settlement: Settlement) -> None:
        """End a claim. The book sends the settlement as soon as the store has answered the previous call."""
        if held.is_lost:
            self.forget(held)
            return
        if self._observer is not None:
            settlement = self._observer.settled(held, settlement)
        held.settlement = settlement
        self.outgoing.ended.append(held)
        self._wakeup.set()

    def forget(self, held: Held) -> None:
        """Stop holding a claim, and let its lease lapse. The result of its run is ignored."""
        held.is_lost = True
        if self._observer is not None:
            self._observer.left(held)
        if not held.is_over:
            self._drop(held, SettleOutcome.GONE)
            self._on_change()

    def close(self) -> None:
        """Let `run` return once every settlement has been answered."""
        self._is_closing = True
        self._wakeup.set()

    async def run(self) -> None:
        """Send settlements and renewals until closed and empty."""
        backoff, outgoing = Backoff(), self.outgoing
        while True:
            self._wakeup.clear()
            try:
                await outgoing.gather()
                async with _turn(outgoing.lock, self._wakeup):
                    due, batch = self.renewals_due(self._held.values()), outgoing.batch()
                if due:
                    await self._renew(due)
                elif batch:
                    await self._settle(batch)
                elif self._is_closing and not outgoing.ended:
                    return
                else:
                    await self._wakeup.wait(_seconds_to_renewal(self._held.values(), self.clock.monotonic_ms()))
                    continue
            except StoreError as error:
                await backoff.failed(log, "settling", error)
            except (Exception, CancelledError) as error:  # noqa: BLE001 - one bad answer must not stop settling for good
                await backoff.failed(log, "settling", error, is_bug=True)
            else:
                backoff.succeeded(log, "settling")

    async def _settle(self, batch: list[Held]) -> None:
        outgoing, unsent = self.outgoing, [held for held in batch if held.outcome is None]
        outgoing.is_settling = True
        self._on_change()  # the next claim can follow this call at once
        try:
            outcomes = await self._work.settle([current_settlement(held) for held in unsent]) if unsent else ()
            answered = list(zip(unsent, outcomes, strict=True))
        except PartialAnswerError as error:
            answered = [each for each in zip(unsent, error.outcomes, strict=True) if each[1] is not None]
        except Exception:
            outgoing.most_settled = 1  # one settlement may break the whole call: send them one by one
            if len(batch) == 1:
                outgoing.put_off(batch[0])
            raise
        finally:
            outgoing.is_settling = False
        outgoing.most_settled = min(2 * outgoing.most_settled, MAX_CLAIM_MESSAGES)
        async with _turn(outgoing.lock, self._wakeup):
            note_outcomes(answered)
            self._note_ended(batch)
        if unsent and not answered and outgoing.batch()[0] in batch:  # no part of the store that answers has any left
            await self._wakeup.wait(PART_AGAIN_MS / 1000)

    def settle_nowait(self, feed: LocalFeed) -> None:
        """Settle ended claims at once, if no call is under way and the feed need not wait. Else `run` settles them."""
        batch = self.outgoing.batch()
        if batch and not self.outgoing.is_settling and not self.outgoing.unanswered:
            outcomes = feed.settle_nowait([current_settlement(held) for held in batch])
            if outcomes is not None:
                note_outcomes(list(zip(batch, outcomes, strict=True)))
                self._note_ended(batch)

    def _note_ended(self, batch: Sequence[Held]) -> None:
        """Drop the claims of a batch that have ended. The others are sent again, after all later settlements."""
        for held in batch:
            if held.outcome is None:
                self.outgoing.put_off(held)
                held.taker.settled(held, None)
            else:
                self.outgoing.ended.remove(held)  # it is nearly always the first
                self._drop(held, held.outcome)
        self._on_change()

    def _drop(self, held: Held, outcome: SettleOutcome) -> None:
        self._held.pop(id(held), None)
        if held.may_kill_until_ms:
            self._forget_doubt(held)
        held.is_over = True
        held.taker.settled(held, outcome)

    def renewals_due(self, claims: Iterable[Held]) -> list[tuple[Held, Renewal]]:
        """Return the renewals to send now: first the renewals without an answer. The caller holds `outgoing.lock`.

        Args:
            claims: Claims in the order of their renewal times.
        """
        if self.outgoing.unanswered:
            return self.outgoing.unanswered
        now, store_now = self.clock.monotonic_ms(), self._now_ms()
        due: list[tuple[Held, Renewal]] = []
        for held in claims:
            if held.renew_at_ms > now or len(due) == MAX_CLAIM_MESSAGES:
                break
            if held.doubtful is not None:
                held.renew_at_ms = _next_renewal_ms(held, now, self._lease_ms)
                due.append((held, held.doubtful))
            elif held.settlement is None:
                ends_trial = id(held) in self._tried and held.trial_ends_ms <= now
                held.renew_at_ms = _next_renewal_ms(held, now, self._lease_ms)
                claim = held.claim
                to = token_for(store_now + self._lease_ms, token_counter(claim.token))
                due.append((held, Renewal(claim.record.id, claim.record.revision, claim.token, to, ends_trial)))
        self.outgoing.unanswered = due
        return due

    async def _renew(self, due: list[tuple[Held, Renewal]]) -> None:
        outcomes: Sequence[RenewOutcome | None]
        try:
            outcomes = await self._work.renew([renewal for _, renewal in due])
        except PartialAnswerError as error:
            outcomes = error.outcomes
        answered = list(zip(due, outcomes, strict=True))
        async with _turn(self.outgoing.lock, self._wakeup):
            if self.outgoing.unanswered is due:
                self.outgoing.unanswered = []
            doubtful = [each for each, outcome in answered if outcome is None]
            _note_doubtful(doubtful, self.clock.monotonic_ms() + PART_AGAIN_MS)
            self._keep([held for held, _ in doubtful if self._held.pop(id(held), None) is not None])
            self.renewed([(*each, outcome) for each, outcome in answered if outcome is not None])

    def renewed(self, answered: Sequence[tuple[Held, Renewal, RenewOutcome]]) -> None:
        """Note the answers to renewals. If a thread has made calls while the event loop was blocked, go on after them.

        An answer is old if the thread has renewed the claim too: then the claim has another token by now.
        """
        kept: list[Held] = []
        lost: list[Held] = []
        for held, renewal, outcome in answered:
            held.doubtful = None
            if held.is_over or id(held) not in self._held:  # it has ended while the renewal was under way
                continue
            if outcome is RenewOutcome.LOST:
                if held.claim.token == renewal.token:
                    lost.append(held)
                continue
            kept.append(self._held.pop(id(held)))
            if renewal.ends_trial:
                self._tried.pop(id(held), None)
            note_renewal(held, renewal, outcome)
            # If the store's clock had stepped back, the lease is too long: renew at once, to shorten it.
            if is_lease_too_long(held.claim.token, self._now_ms()):
                held.renew_at_ms = self.clock.monotonic_ms()
        self._keep(kept)
        if lost:
            self._lose(lost)
        self._wakeup.set()
        self._on_change()

    def _lose(self, lost: Sequence[Held]) -> None:
        ids = ", ".join(held.claim.record.id for held in lost[:IDS_NAMED])
        more = f" and {len(lost) - IDS_NAMED} more" if len(lost) > IDS_NAMED else ""
        text = "%d leases were lost before their messages were settled; these messages may be delivered again: %s%s"
        log.warning(text, len(lost), ids, more)
        for held in lost:
            held.is_lost = True
            self._held.pop(id(held), None)
            self._forget_doubt(held)
            held.taker.lost(held)


def _claimed_again(held: Iterable[Held], claims: Sequence[Claim]) -> list[Held]:
    """Return the open claims on messages that this process has now claimed again, after their leases had lapsed.

    A clock that steps forward ends a lease before its renewal. If both claims stayed open, a batch could hold both.
    """
    again = {(claim.record.id, claim.record.revision) for claim in claims if claim.record.lapses}
    if not again:
        return []
    open_claims = [each for each in held if each.settlement is None]
    return [each for each in open_claims if (each.claim.record.id, each.claim.record.revision) in again]


def _seconds_to_renewal(held: Iterable[Held], now_ms: int) -> float | None:
    """Return the seconds to the renewal of the first claim; None if there is no claim."""
    first = next(iter(held), None)
    return None if first is None else max(first.renew_at_ms - now_ms, 0) / 1000


def _next_renewal_ms(held: Held, now: int, lease_ms: int) -> int:
    """Return the time of the next renewal of a claim that is renewed at `now`.

    It is a third of a lease after `now`, the time of the request, because the answer may be late. The claim of a
    suspect has two more renewals: at `alone_until_ms`, from which on this process may claim other messages; and at
    `trial_ends_ms`, to report the end of the trial to the store.
    """
    ahead = [each for each in (held.alone_until_ms, held.trial_ends_ms) if each > now]
    return min([now + lease_ms // 3, *ahead])


def _may_kill(doubtful: dict[int, Held], now: int) -> bool:
    """Return whether any of the claims may still end this process. Forget claims that have run for a minute."""
    while doubtful:
        key, first = next(iter(doubtful.items()))
        if first.may_kill_until_ms > now:
            return True
        del doubtful[key]
    return False


def current_settlement(held: Held) -> Settlement:
    """Return the settlement, with the current token of the claim."""
    settlement = held.settlement
    assert settlement is not None
    if settlement.token != held.claim.token:
        return replace(settlement, token=held.claim.token)
    return settlement


def note_renewal(held: Held, renewal: Renewal, outcome: RenewOutcome) -> None:
    """Note the token that a renewal has given to a claim, unless a later renewal has given it another token."""
    if held.claim.token == renewal.token:
        held.claim = replace(held.claim, token=renewal.to)
    if outcome in (RenewOutcome.SUPERSEDED, RenewOutcome.CANCELLED):
        held.is_unwanted = True


def _note_doubtful(unanswered: Sequence[tuple[Held, Renewal]], again_ms: int) -> None:
    """Note that a part of the store has not answered renewals. They are repeated at `again_ms`."""
    for held, renewal in unanswered:
        held.doubtful, held.renew_at_ms = renewal, again_ms
        if held.settlement is not None:
            held.taker.settled(held, None)


def note_outcomes(answered: Sequence[tuple[Held, SettleOutcome]]) -> None:
    """Note the outcomes of settlements. If two calls have sent the same settlement, only one of them has settled."""
    for held, outcome in answered:
        if held.outcome is None or outcome is not SettleOutcome.GONE:
            held.outcome = outcome


@asynccontextmanager
async def _turn(lock: Lock, wakeup: WakeUp) -> AsyncIterator[None]:
    """Hold a lock, without blocking the event loop. A thread sets the wake-up after it has released the lock."""
    wakeup.clear()
    while not lock.acquire(blocking=False):
        await wakeup.wait()
        wakeup.clear()
    try:
        yield
    finally:
        lock.release()

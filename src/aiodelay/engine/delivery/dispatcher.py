"""The dispatch loop: clear wake-ups, claim, sleep. It never claims more messages than the subscriptions request."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from typing import Protocol

from msgspec.structs import replace

from aiodelay.core.ids import new_id
from aiodelay.core.transitions import SUSPECT_LAPSES, is_suspect
from aiodelay.core.values import MAX_LAPSES, Claim, Claimed, Demand, Lane, SettleOutcome, lanes_of
from aiodelay.engine.backoff import Backoff
from aiodelay.errors import StoreError
from aiodelay.ports import Feed, LocalFeed

from . import settling
from .claim_ahead import ClaimAhead
from .lease_book import Held, LeaseBook, Taker
from .runners import Runners
from .turns import Turns

__all__ = ["Dispatcher", "Subscriber", "Subscription"]

log: logging.Logger = logging.getLogger("aiodelay.dispatcher")

LANE_OF = attrgetter("record.envelope.lane")


class Subscriber(Protocol):
    """The part of this process that receives one lane's messages."""

    @property
    def lane(self) -> Lane:
        """The lane whose messages the subscriber receives."""
        ...

    @property
    def in_flight(self) -> int:
        """The number of messages that were delivered to the subscriber and are not settled."""
        ...

    def drain(self) -> None:
        """Request no more messages, and give back messages whose runs have not begun."""
        ...

    @property
    def runners(self) -> Runners:
        """The tasks in which the subscriber's messages run."""
        ...

    def stop(self) -> None:
        """Cancel the runs or sends under way, and give their messages back."""
        ...

    def close(self) -> None:
        """Abandon runs that did not stop. Their leases lapse."""
        ...


class Subscription(Subscriber, Taker, Protocol):
    """A subscriber with demand, as the dispatcher sees it."""

    @property
    def ahead(self) -> ClaimAhead | None:
        """The number of messages that the subscription claims ahead; None if it claims nothing ahead."""
        ...

    def demand(self) -> Demand:
        """Return the messages and bytes that the subscription requests now."""
        ...

    def deliver(self, claimed: Sequence[Held]) -> None:
        """Take claims, no more than were requested. While the subscription drains, give the claims back."""
        ...

    def give_back(self) -> None:
        """Give back messages whose runs have not begun."""
        ...

    def take_unbegun(self, book: LeaseBook) -> Sequence[Held]:
        """Take out the messages of a book whose runs have not begun, except messages that have lapsed before.

        The caller gives them back. Any thread may call this.
        """
        ...


class _NoTaker:
    """Takes suspects that arrive during another trial, and gives them back.

    If such suspects ran too and the process ended, the store could not tell which suspect had ended the process.
    """

    def settled(self, held: Held, outcome: SettleOutcome | None) -> None: ...

    def lost(self, held: Held) -> None: ...


class Dispatcher:
    """Runs one store's loop over all subscriptions of this process.

    Args:
        work: The store's dispatching side.
        book: Holds the claims. While it holds a suspect that was just claimed, the dispatcher claims nothing.
        subscriptions: The subscriptions by lane. The loop reads them before each claim, since handlers come and go.
        lease_ms: How long a claim lasts.
        may_claim: A function that returns whether messages may be claimed now. They may not be claimed while the event
            loop lags, or while a trial begins.
        max_lapses: A function that returns the most lapses of a message that may be claimed now; see
            `LeaseBook.max_lapses`.
        give_back: Gives back all messages of this process whose runs have not begun.
        turns: For each lane that gets messages from a source too: whose turn it is to claim.
    """

    def __init__(
        self,
        work: Feed,
        book: LeaseBook,
        subscriptions: Mapping[Lane, Subscription],
        lease_ms: int,
        *,
        may_claim: Callable[[], bool],
        max_lapses: Callable[[], int],
        turns: Mapping[Lane, Turns],
        give_back: Callable[[], None],
    ) -> None:
        self._work, self._book, self._subscriptions = work, book, subscriptions
        self._lease_ms, self._may_claim, self._max_lapses = lease_ms, may_claim, max_lapses
        self._turns, self._give_back = turns, give_back
        self._is_draining = self._is_claiming = self._is_waiting = self._has_tried = False
        self._idle: Collection[Lane] = ()  # lanes that had no due messages at the last claim
        self._lanes: dict[Lane, Subscription] = {}

    def drain(self) -> None:
        """Claim no more messages, and begin no run.

        If a claim is under way, `run` gives its messages back, and then returns.
        """
        self._is_draining = True
        for subscription in self._subscriptions.values():
            subscription.drain()
        self._work.wake()

    def freed(self) -> None:
        """Claim again if a lane that has room now may have due messages. `run` checks this after each claim too."""
        if self._is_waiting and self._may_have_due(self._demand()):
            self._work.wake()

    async def run(self) -> None:
        """Dispatch until drained. No error of the store ends the loop."""
        backoff = Backoff()
        while not self._is_draining:
            self._work.clear()
            try:
                await self._claim_and_sleep()
            except StoreError as error:
                await backoff.failed(log, "claiming", error)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the loop must not end, least of all silently
                await backoff.failed(log, "claiming", error, is_bug=True)
            else:
                backoff.succeeded(log, "claiming")

    async def _claim_and_sleep(self) -> None:
        self._idle = ()
        demand = self._demand()
        until_ms = None
        if demand:
            claimed = await self._claim(demand)
            had_tried = self._has_tried
            self._note_trial(demand, claimed)
            self._note_turns(demand, claimed.claims)
            self._note_scarcity(demand, claimed)
            if claimed.claims:
                self._deliver(claimed)
            elif had_tried and not self._has_tried:
                return  # no message is due except suspects: claim again, without the limit on lapses
            until_ms = self._next_claim_ms(demand, claimed)
            if claimed.claims and until_ms is not None and until_ms <= claimed.now_ms:
                return  # claim again at once, while these messages run
        if not self._is_draining:
            self._is_waiting = True
            try:
                await self._work.wait(until_ms=until_ms)
            finally:
                self._is_waiting = False

    def _next_claim_ms(self, asked: Mapping[Lane, Demand], claimed: Claimed) -> int | None:
        """Return when to claim again after a claim. Due messages count only in lanes that have room now.

        This also notes the idle lanes. A signal of the store ends the wait for them, and a run that ends does not.
        """
        wanted = self._demand()
        if _is_limited(asked):  # the claim may have left messages that have lapsed, in any lane
            has_more = bool(wanted) and (not _is_limited(wanted) or wanted.keys() - asked.keys())
            return claimed.now_ms if has_more else claimed.next_due_ms
        times = claimed.next_by_lane
        if times is None:
            times = dict.fromkeys(lanes_of(asked), claimed.next_due_ms)
        self._idle = {lane for lane, time_ms in times.items() if time_ms is None or time_ms > claimed.now_ms}
        if self._may_have_due(wanted):
            return claimed.now_ms
        return min((time_ms for lane in self._idle if (time_ms := times[lane]) is not None), default=None)

    def _may_have_due(self, demand: Mapping[Lane, Demand]) -> bool:
        return any(lane not in self._idle for lane in lanes_of(demand))

    def _demand(self) -> dict[Lane, Demand]:
        if self._book.is_trying or not self._may_claim():
            return {}
        wanted: dict[Lane, Demand] = {}
        max_lapses = min(self._max_lapses(), SUSPECT_LAPSES - 1 if self._has_tried else MAX_LAPSES)
        for subscription in self._subscriptions.values():
            demand = subscription.demand()
            if demand.messages > 0 and self._has_turn(subscription.lane):
                if max_lapses < MAX_LAPSES:
                    demand = replace(demand, max_lapses=max_lapses)
                wanted[subscription.lane] = demand
        return wanted

    def _has_turn(self, lane: Lane) -> bool:
        turns = self._turns.get(lane)
        return turns is None or turns.may_claim(self._book)

    def _note_lanes(self, demand: Mapping[Lane, Demand]) -> None:
        """Note which subscription receives the messages of each lane."""
        self._lanes = {
            each: self._subscriptions[lane] for lane, wanted in demand.items() for each in (lane, *wanted.aliases)
        }

    def _note_turns(self, demand: Mapping[Lane, Demand], claims: Sequence[Claim]) -> None:
        turns = [(lane, self._turns[lane]) for lane in demand if lane in self._turns]
        if turns:
            given = {self._lanes[lane].lane for lane in set(map(LANE_OF, claims))}
            for lane, each in turns:
                each.answered(self._book, has_given=lane in given)

    def _note_scarcity(self, demand: Mapping[Lane, Demand], claimed: Claimed) -> None:
        """If limits have let the claim bring fewer messages than requested, pause the claims ahead of these lanes."""
        if not claimed.limited or len(claimed.claims) == sum(each.messages for each in demand.values()):
            return
        given = Counter(self._lanes[LANE_OF(claim)].lane for claim in claimed.claims)
        for lane in {self._lanes[lane].lane for lane in claimed.limited}:
            ahead = self._lanes[lane].ahead
            if ahead is not None and given[lane] < demand[lane].messages:
                ahead.pause()

    def _note_trial(self, demand: Mapping[Lane, Demand], claimed: Claimed) -> None:
        """Remember whether the claim took suspects. If so, the next claim excludes them: other messages get a turn."""
        if claimed.claims and is_suspect(claimed.claims[0].record):
            self._has_tried = True
        elif all(each.max_lapses for each in demand.values()):
            self._has_tried = False

    async def _claim(self, demand: Mapping[Lane, Demand]) -> Claimed:
        """Claim messages. If the answer is lost, repeat the same request: the store returns the same messages."""
        self._note_lanes(demand)
        self._is_claiming = True
        try:
            return await self._answered(demand)
        finally:
            self._is_claiming = False

    async def _answered(self, demand: Mapping[Lane, Demand]) -> Claimed:
        request = new_id()
        asked_at_ms = self._book.clock.monotonic_ms()  # the leases may have begun with the first of several calls
        backoff = Backoff()
        while True:
            try:
                claimed = await self._work.claim(demand, request=request, lease_ms=self._lease_ms)
            except Exception as error:
                self._note_turns(demand, ())
                if self._is_draining or not isinstance(error, StoreError):
                    raise
                await backoff.failed(log, "claiming", error)
            else:
                backoff.succeeded(log, "claiming")
                self._book.read(asked_at_ms)
                return claimed

    def refill(self, feed: LocalFeed) -> None:
        """Settle ended claims and claim the next messages, both at once. A runner calls this between two runs.

        If it cannot be done at once, `run` and the lease book do it in their own tasks, and report its errors.
        """
        if self._is_claiming:
            return
        with suppress(Exception):
            self._book.settle_nowait(feed)
            demand = self._demand()
            if demand:
                self._note_lanes(demand)
                self._book.read(self._book.clock.monotonic_ms())
                claimed = feed.claim_nowait(demand, lease_ms=self._lease_ms)
                self._note_turns(demand, claimed.claims)
                if claimed.claims:
                    self._deliver(claimed)

    def _deliver(self, claimed: Claimed) -> None:
        if is_suspect(claimed.claims[0].record) and self._max_lapses() < SUSPECT_LAPSES:
            for held in self._book.add(claimed.claims, _NoTaker()):
                self._book.settle(held, settling.release(held.claim.record, held.claim.token))
            return
        if is_suspect(claimed.claims[0].record):  # no other message begins while suspects are tried alone
            self._give_back()
        for lane, claims in groupby(claimed.claims, LANE_OF):
            subscription = self._lanes[lane]
            subscription.deliver(self._book.add(list(claims), subscription))


def _is_limited(demand: Mapping[Lane, Demand]) -> bool:
    return any(each.max_lapses < MAX_LAPSES for each in demand.values())

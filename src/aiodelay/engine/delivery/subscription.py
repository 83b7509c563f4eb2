"""A handler's subscription in the dispatch loop: its demand, its runners and its time limits."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from aiodelay.core.retry import Retry
from aiodelay.core.transitions import base_id, token_deadline_ms
from aiodelay.core.values import MAX_CLAIM_MESSAGES, Again, Claim, Demand, Lane, Record, Settlement, SettleOutcome
from aiodelay.engine.observer import Observer
from aiodelay.handlers.context import RunContext
from aiodelay.handlers.middleware import Middleware, chained
from aiodelay.handlers.spec import HandlerSpec

from . import settling
from .claim_ahead import ClaimAhead
from .dead_letter_hooks import DeadLetterHooks
from .drive import rest_of
from .lease_book import Held, LeaseBook
from .run_settlements import RunSettlements
from .runners import Runners
from .runs import Run, Runs
from .threads import Threads
from .waiting_messages import WaitingMessages

__all__ = ["HandlerSubscription", "in_thread", "release"]

log: logging.Logger = logging.getLogger("aiodelay.handlers")

SLICE_S = 0.005
"""If the handlers of a runner never wait, the runner yields to the event loop after this many seconds."""
MOST_REFILLS = 32
"""A runner ends after this number of refills. Then the dispatch loops claim, so the store's messages get a turn."""


@dataclass(slots=True, kw_only=True, eq=False)
class HandlerSubscription:
    """Runs one handler's messages.

    Args:
        spec: The handler.
        runners: The tasks in which the handler's messages run.
        context: Makes the context of one attempt from its claim, its lateness in ms, and the retry policy.
        now_ms: The store's time, for due times and lateness.
        on_free: Called when demand has grown.
        middleware: Middleware around each run.
        observer: Receives the beginning of each run.
        hooks: Receive each message that is given up.
        claims_ahead: Whether messages may be claimed before there is room to run them, and before the ends of earlier
            runs are settled.

    Attributes:
        refill: Settles ended runs and delivers the next messages of a source, both without a wait; None if no source
            can. A runner calls it when no message waits.
        ahead: The number of messages to claim ahead.
    """

    spec: HandlerSpec
    runners: Runners
    context: Callable[[Claim, int, Retry], RunContext[Any]]
    now_ms: Callable[[], int]
    on_free: Callable[[], None]
    middleware: Sequence[Middleware[Any, object]] = ()
    observer: Observer | None = None
    hooks: DeadLetterHooks | None = None
    claims_ahead: bool = False
    concurrency: int = 0
    in_flight: int = 0
    is_draining: bool = False
    refill: Callable[[], None] | None = None
    _waiting: WaitingMessages = field(default_factory=WaitingMessages)
    _runner_count: int = 0
    ahead: ClaimAhead = field(init=False)
    _running: Runs = field(init=False)
    _threads: Threads = field(init=False)
    _settlements: RunSettlements = field(init=False)
    _settlements_type: ClassVar[type[RunSettlements]] = RunSettlements

    def __post_init__(self) -> None:
        self.concurrency = self.spec.concurrency
        self._running = Runs(self.spec)
        self.ahead = ClaimAhead(self._give_back, has_rate=any(limit.rate for limit in self.spec.limits.all))
        self._threads = Threads(f"aiodelay {self.lane}")
        self._settlements = self._settlements_type(self.spec, self.now_ms)

    @property
    def lane(self) -> Lane:
        """The handler's type name."""
        return self.spec.name

    def demand(self) -> Demand:
        """Return how many more messages the handler requests now."""
        if self.is_draining:
            return Demand(0, aliases=self.spec.aliases)
        most, ended = self.concurrency, 0
        if self.claims_ahead and self.concurrency > 1:
            most += self.ahead.wanted(len(self._waiting))
            ended = min(self.in_flight - len(self._waiting) - len(self._running), most, MAX_CLAIM_MESSAGES)
        return Demand(max(0, min(most - self.in_flight + ended, MAX_CLAIM_MESSAGES)), aliases=self.spec.aliases)

    def deliver(self, claimed: Sequence[Held]) -> None:
        """Take claims, no more than were requested. While the subscription drains, give the claims back."""
        self.in_flight += len(claimed)
        self._waiting.extend(claimed)
        if self.claims_ahead and self.concurrency > 1:
            self.ahead.arrived(claimed)
        else:
            self._give_back()
        self._start_runner()

    def take_directly(self, refill: Callable[[], None]) -> None:
        """Take messages from a `LocalFeed` between two runs, and claim nothing ahead: a part's messages would wait."""
        self.refill, self.claims_ahead = refill, False

    def set_concurrency(self, concurrency: int) -> None:
        """Change how many messages may run at once. Runs under way go on."""
        self.concurrency = concurrency
        self._give_back()
        self._start_runner()
        self.on_free()

    def settled(self, held: Held, outcome: SettleOutcome | None) -> None:
        """Forget a settled message, and start a waiting message."""
        self.in_flight -= not held.is_freed
        held.is_freed = True
        if self.hooks is not None:
            self.hooks.settled(held, outcome)
        if self._waiting:
            self._start_runner()

    def lost(self, held: Held) -> None:
        """Cancel the run of a message whose lease was lost. A run in a thread cannot be cancelled."""
        run = self._running.of(held)
        if run is not None and self.spec.is_coroutine:
            run.cancel()

    def drain(self) -> None:
        """Request no more messages, and give back messages whose runs have not begun."""
        self.is_draining = True
        self.ahead.stop()
        self._give_back()

    def _give_back(self, ahead: int = 0) -> bool:
        """Give back waiting messages for which there is no room. Return whether messages still wait.

        Too many messages may wait for three reasons: the demand shrank while a claim was under way, the store and a
        source both delivered the requested number, or runs last longer than when the messages were claimed ahead.

        Args:
            ahead: The number of messages that may wait without room.
        """
        room = 0 if self.is_draining else max(self._room(), 0) + ahead
        for held in self._waiting.take_last(room):
            release(held)
        return bool(self._waiting)

    def take_out(self, message_id: str) -> list[Held]:
        """Give back the claims on one message, or on a series' occurrences, whose runs have not begun. Return them."""
        found = self._waiting.take(lambda held: message_id in _ids_of(held.claim.record))
        for held in found:
            release(held)
        return found

    def give_back(self) -> None:
        """Give back messages whose runs have not begun."""
        for held in self._waiting.take_last(0):
            release(held)

    def take_unbegun(self, book: LeaseBook) -> list[Held]:
        """Take out the messages of a book whose runs have not begun, except messages that have lapsed before."""
        return self._waiting.take(lambda held: held.book is book and not held.may_kill_until_ms)

    def _room(self) -> int:
        """Return how many more runs may begin."""
        return self.concurrency - len(self._running)

    def stop(self) -> None:
        """Cancel all runs. Their messages go back to the store."""
        self.drain()
        for run in self._running:
            if not self.spec.is_coroutine and not run.cancels:
                text = "%s: the run of %s is in a thread, which cannot be stopped; the message may be delivered again"
                for held in run.messages:
                    log.warning(text, self.lane, held.claim.record.id)
            run.cancel()

    def close(self) -> None:
        """Abandon runs that did not stop, so that their leases lapse, and end the threads."""
        for run in self._running:
            text = "%s: message %s is delivered again when its lease ends: its handler did not stop in time"
            for held in run.messages:
                log.error(text, self.lane, held.claim.record.id)
                held.book.forget(held)
            run.leave()
        self._threads.close()

    # --- runners ------------------------------------------------------------------------------------------

    def _start_runner(self) -> None:
        """Start one runner if all runners wait for their handlers. A busy runner starts other runners when it waits."""
        if self._runner_count == len(self._running):
            self._start_runners(most=1)

    def _start_runners(self, most: int) -> None:
        for _ in range(min(most, len(self._waiting), self.concurrency - self._runner_count)):
            self._runner_count += 1
            self.runners.start(self._run(), f"aiodelay {self.lane}")

    async def _run(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        now_s = loop.time()
        slice_ends = now_s + SLICE_S
        refills = 0 if self.refill is None else MOST_REFILLS
        try:
            while (
                (self._waiting or ((refills := refills - 1) >= 0 and self._refilled()))
                and self._runner_count <= self.concurrency
                and not task.cancelling()
            ):
                held = self._waiting.next()
                if held is None:  # the thread of the pulse has just taken it
                    break
                if held.is_lost:
                    self.settled(held, SettleOutcome.GONE)
                    self.on_free()
                    continue
                if held.is_unwanted or not held.book.may_begin():
                    release(held)
                    continue
                try:
                    begun = self._begin(held, loop, now_s)
                    if isinstance(begun, Run):  # other runs may end beside it: the loops settle and claim for all
                        refills, settlement = 0, await self._go_on(begun, loop)
                    else:
                        settlement = begun
                except asyncio.CancelledError as error:  # the scheduler ends, or user code cancels this task
                    if self.is_draining:
                        release(held)
                    else:
                        held.book.settle(held, self._settlements.after_failure(held, error))
                    raise
                except Exception:
                    log.exception(
                        "%s: delivering message %s failed because of a bug in aiodelay", self.lane, held.claim.record.id
                    )
                    settlement = self._settlements.after_own_fault(held)
                held.book.settle(held, settlement)
                self.ahead.ended += 1
                now_s = loop.time()
                if now_s >= slice_ends:
                    await asyncio.sleep(0)
                    now_s = loop.time()
                    slice_ends = now_s + SLICE_S
        finally:
            self._runner_count -= 1
            self._start_runner()  # race: after a cancelled run, this task ends, and a message may have come meanwhile

    def _refilled(self) -> bool:
        """Return whether a source has delivered messages at once."""
        if self.refill is not None:
            self.refill()
        return bool(self._waiting)

    def _begin(self, held: Held, loop: asyncio.AbstractEventLoop, started_s: float) -> Settlement | Run:
        """Run a handler until it ends or waits for the first time. No `await` is here: most handlers end at once."""
        read = self._read(held)
        return self._start(held, *read, started_s) if isinstance(read, tuple) else read

    def _read(self, held: Held) -> Settlement | tuple[Any, RunContext[Any]]:
        """Return the event and the context of an attempt; or the settlement, if the message must not or cannot run."""
        claim, spec = held.claim, self.spec
        record, token, envelope = claim.record, claim.token, claim.record.envelope
        held.began_ms = now = self.now_ms()
        if envelope.rule is not None or token_deadline_ms(token) <= now:
            settlement = settling.without_running(record, token, now)
            if settlement is not None:
                if isinstance(settlement, Again) and settlement.error is not None:
                    log.error(
                        "%s: series %s waits for a worker that can read it: %s", self.lane, record.id, settlement.error
                    )
                return settlement
        lateness_ms = max(now - record.due_ms, 0)
        if self.observer is not None:
            self.observer.begin(held, lateness_ms)
        try:
            spec.check_type(envelope.type)
            event = spec.decode(envelope.payload, envelope.encoding)
        except Exception as error:  # noqa: BLE001 - a user's type may raise anything
            text = settling.decode_error_text(error)
            log.error("%s: message %s cannot be read: %s", self.lane, record.id, text)  # noqa: TRY400 - a traceback shows values
            return settling.dead(record, token, now, reason="undecodable", attempt=record.attempt, error=text)
        return event, self.context(claim, lateness_ms, self.spec.retry)

    def _start(self, held: Held, event: object, context: RunContext[Any], started_s: float) -> Settlement | Run:
        variables = contextvars.copy_context()
        if held.attempt is not None:
            held.attempt.enter(variables)
        if not self.spec.is_coroutine and not self.middleware:
            call = self._threads.call(variables.run, in_thread, self.spec.call, event, context, most=self.concurrency)
            return Run(held, started_s, call)
        try:
            coroutine: Coroutine[Any, Any, Any] = (
                self._through_middleware(event, context) if self.middleware else self.spec.call(event, context)
            )
            awaited = variables.run(coroutine.send, None)
        except StopIteration as end:
            return self._settlements.after_return(held, end.value)
        except Exception as error:  # noqa: BLE001 - a handler's exception is data for its retry policy
            return self._settlements.after_failure(held, error)
        return Run(held, started_s, rest_of(coroutine, variables, awaited))

    async def _through_middleware(self, event: object, context: RunContext[Any]) -> object:
        """Run a handler with its middleware around it.

        If the middleware returns None, the handler's result counts. So a middleware that forgets to return the result
        loses no `Later` and no `Reject`.
        """
        returned: object = None

        async def handle(context: RunContext[Any]) -> object:
            nonlocal returned
            if self.spec.is_coroutine:
                returned = await self.spec.call(event, context)
            else:
                run = contextvars.copy_context().run
                returned = await self._threads.call(
                    run, in_thread, self.spec.call, event, context, most=self.concurrency
                )
            return returned

        result = await chained(self.middleware, handle)(context)
        return returned if result is None else result

    async def _go_on(self, run: Run, loop: asyncio.AbstractEventLoop) -> Settlement:
        """Wait for the rest of a run. Meanwhile other messages run beside it, and the run can be cancelled."""
        held, run.task = run.held, asyncio.current_task()
        self._running.add(run, loop)
        if self._waiting:
            self._start_runners(most=len(self._waiting))
        try:
            result = await run.rest
        except asyncio.CancelledError as error:
            failure = self._running.failure_of(run, error)
            if failure is None:
                return settling.release(held.claim.record, held.claim.token)
            return self._settlements.after_failure(held, failure)
        except Exception as error:  # noqa: BLE001 - a handler's exception is data for its retry policy
            return self._settlements.after_failure(held, error)
        finally:
            self._running.remove(run)
        return self._settlements.after_return(held, result)


def release(held: Held) -> None:
    """Give a message back without a run."""
    held.book.settle(held, settling.release(held.claim.record, held.claim.token))


def _ids_of(record: Record) -> tuple[str, str]:
    """Return the ids by which commands name a message: its own, and that of the series of an occurrence."""
    return record.id, base_id(record.id)


def in_thread(call: Callable[[Any, RunContext[Any]], Any], event: object, context: RunContext[Any]) -> object:
    """Call a plain function. A future cannot hold a `StopIteration`, so raise `RuntimeError` as a coroutine does."""
    try:
        return call(event, context)
    except StopIteration as error:
        raise RuntimeError("handler raised StopIteration") from error

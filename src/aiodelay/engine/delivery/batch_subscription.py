"""A subscription in the dispatch loop for a handler of batches: it gathers messages, runs them together, and halves."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from aiodelay.core.transitions import is_suspect, token_deadline_ms
from aiodelay.core.values import MAX_CLAIM_MESSAGES, Demand
from aiodelay.errors import HandlerResultError
from aiodelay.handlers.context import RunContext
from aiodelay.handlers.spec import Batching

from . import settling
from .drive import driven
from .halving import Halving
from .lease_book import Held
from .runs import Run
from .snapshots import snapshot
from .subscription import HandlerSubscription, in_thread, release

__all__ = ["BatchSubscription"]

log: logging.Logger = logging.getLogger("aiodelay.handlers")

ALLOWED = "None, or a list with None, Later(delay) or Reject(reason) for each message, in order"

RENEWAL_CHECK_S = 0.1
"""If the lease of a part has ended, the interval of the checks whether the store has renewed it."""


class _Message(NamedTuple):
    """A message of a batch, ready to run."""

    held: Held
    event: Any
    context: RunContext[Any]


@dataclass(slots=True, kw_only=True, eq=False)
class BatchSubscription(HandlerSubscription):
    """Runs one handler's messages in batches.

    A run begins when a batch is full, or when its first message has waited for `batch_wait`. The demand counts
    messages. `concurrency` counts runs. Nothing is claimed ahead.
    """

    _begun: int = 0
    """The number of batches whose runs have begun and whose messages are not all settled."""
    _timer: asyncio.TimerHandle | None = None

    @property
    def _batching(self) -> Batching:
        assert self.spec.batch is not None
        return self.spec.batch

    def demand(self) -> Demand:
        """Return how many more messages fit into the batches that may begin now."""
        if self.is_draining:
            return Demand(0, aliases=self.spec.aliases)
        most_in_flight = self.concurrency * self._batching.size
        free = min(self._room() - len(self._waiting), most_in_flight - self.in_flight)
        return Demand(max(0, min(free, MAX_CLAIM_MESSAGES)), aliases=self.spec.aliases)

    def _room(self) -> int:
        return (self.concurrency - self._begun) * self._batching.size

    def take_directly(self, refill: Callable[[], None]) -> None:
        """Take nothing between two runs: the loop of the source delivers larger batches."""

    def deliver(self, claimed: Sequence[Held]) -> None:
        """Take claims, no more than were requested. While the subscription drains, give the claims back."""
        begins_by_s = asyncio.get_running_loop().time() + self._batching.wait_ms / 1000
        if any(held.may_kill_until_ms for held in claimed):  # if they waited, they would lapse without a run
            begins_by_s = 0.0
            for held in snapshot(self._waiting):
                held.begins_by_s = begins_by_s
        for held in claimed:
            held.begins_by_s = begins_by_s
        HandlerSubscription.deliver(self, claimed)

    def lost(self, held: Held) -> None:
        """Cancel a run if the leases of all its messages were lost. A run in a thread cannot be cancelled."""
        for run in self._running:
            messages = run.messages
            if held in messages and all(each.is_lost for each in messages) and self.spec.is_coroutine:
                run.cancel()

    def drain(self) -> None:
        """Request no more messages, and give back messages whose runs have not begun."""
        HandlerSubscription.drain(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- runners ------------------------------------------------------------------------------------------

    def _start_runner(self) -> None:
        """Start one runner if a batch is due and all runners are busy. If no batch is due, wait until one is."""
        if self._is_due():
            if self._runner_count == self._begun:
                self._start_runners(most=1)
            return
        first = self._waiting.first()
        if first is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(first.begins_by_s, self._stop_waiting)

    def _stop_waiting(self) -> None:
        self._timer = None
        self._start_runner()

    def _is_due(self) -> bool:
        """Return whether a full batch waits, or the first message has waited long enough."""
        first = self._waiting.first()
        if first is None:
            return False
        is_full = len(self._waiting) >= self._batching.size
        return is_full or asyncio.get_running_loop().time() >= first.begins_by_s

    async def _run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            while self._is_due() and self._runner_count <= self.concurrency and not task.cancelling():
                batch = self._next_batch()
                if batch:
                    await self._deliver_batch(batch)
                await asyncio.sleep(0)
        finally:
            self._runner_count -= 1
            self._start_runner()

    def _next_batch(self) -> list[Held]:
        """Take out the messages of the next batch. Suspects are never in a batch with other messages."""
        batch: list[Held] = []
        while len(batch) < self._batching.size and (held := self._waiting.next()) is not None:
            if not self._may_run(held):
                continue
            if batch and is_suspect(held.claim.record) != is_suspect(batch[0].claim.record):
                self._waiting.appendleft(held)
                break
            batch.append(held)
        return batch

    def _may_run(self, held: Held) -> bool:
        """Return whether a message may run now. If not, give it back."""
        if _is_to_go_back(held) or self._is_lease_over(held):
            release(held)
            return False
        return True

    def _is_lease_over(self, held: Held) -> bool:
        return token_deadline_ms(held.claim.token) <= self.now_ms()

    # --- runs ---------------------------------------------------------------------------------------------

    async def _deliver_batch(self, batch: Sequence[Held]) -> None:
        """Run a batch, and settle each of its messages."""
        self._begun += 1
        self._start_runner()  # another batch may be due
        try:
            messages = [message for held in batch if (message := self._readied(held)) is not None]
            if messages:
                await self._run_in_parts(messages)
        except asyncio.CancelledError as error:  # the scheduler ends, or user code cancels this task
            for held in filter(_is_open, batch):
                if self.is_draining:
                    release(held)
                else:
                    held.book.settle(held, self._settlements.after_failure(held, error))
            raise
        except Exception:
            log.exception("%s: delivering %d messages failed because of a bug in aiodelay", self.lane, len(batch))
            for held in filter(_is_open, batch):
                held.book.settle(held, self._settlements.after_own_fault(held))
        finally:
            self._begun -= 1
            self.on_free()

    def _readied(self, held: Held) -> _Message | None:
        """Return a message that is ready to run. If it must not run or cannot be read, settle it, and return None."""
        read = self._read(held)
        if isinstance(read, tuple):
            return _Message(held, *read)
        held.book.settle(held, read)
        return None

    async def _run_in_parts(self, batch: Sequence[_Message]) -> None:
        """Run a batch. If the run fails, run its halves, until the messages that fail are alone."""
        halving = Halving(batch)
        while part := halving.next():
            wanted = await self._runnable(part)
            failure = await self._run_part(wanted) if wanted else None
            if failure is None:
                halving.succeeded()
            elif self._batching.on_failure == "retry_all":
                self._fail(wanted, failure)
            elif halving.failed(wanted):
                text = "%s: a run with %d messages failed, and the halves run now: %s"
                log.warning(text, self.lane, len(wanted), settling.error_text(failure))
            elif len(wanted) == 1:
                self._fail(wanted, failure)
            else:
                await self._fail_together([*wanted, *halving.rest()], failure)

    async def _runnable(self, part: Sequence[_Message]) -> list[_Message]:
        """Return the messages of a part that may run now. Give the others back.

        If a lease has ended, wait until the store has answered the renewal: another process may have claimed the
        message. The store may be away, or the previous run has blocked the event loop. A drain ends this wait.
        """
        while not self.is_draining and any(map(self._waits_for_renewal, part)):  # noqa: ASYNC110 - rare, and a cheap check
            await asyncio.sleep(RENEWAL_CHECK_S)
        return [message for message in part if self._may_run(message.held)]

    def _waits_for_renewal(self, message: _Message) -> bool:
        return self._is_lease_over(message.held) and not _is_to_go_back(message.held)

    async def _fail_together(self, messages: Sequence[_Message], failure: BaseException) -> None:
        """Retry messages later that have failed together. Run a message alone before it becomes a dead letter."""
        for message in messages:
            if not await self._runnable([message]):
                continue
            own: BaseException | None = failure
            if self._settlements.would_give_up(message.held, failure):
                own = await self._run_part([message])
            if own is not None:
                self._fail([message], own)

    async def _run_part(self, part: Sequence[_Message]) -> BaseException | None:
        """Call the handler once. If it succeeds, settle the messages. Return its failure otherwise."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        first, *others = (message.held for message in part)
        observed = None if self.observer is None else self.observer.begin_batch([first, *others])
        variables = contextvars.copy_context()
        if observed is not None:
            observed.enter(variables)
        run = Run(first, loop.time(), self._call(part, variables), task, others=others)
        self._running.add(run, loop)
        failure: BaseException | None = None
        try:
            result = await run.rest
        except asyncio.CancelledError as error:
            failure = self._running.failure_of(run, error)
            if failure is None and self.is_draining:
                raise
            if failure is None:
                self._release(part)
        except Exception as error:  # noqa: BLE001 - a handler's exception is data for its retry policy
            failure = error
        else:
            self._settle(part, result)
        finally:
            self._running.remove(run)
            for _ in range(run.cancels):  # the next run is in this task too
                task.uncancel()
            if observed is not None:
                observed.end(failure)
        return failure

    def _call(self, part: Sequence[_Message], variables: contextvars.Context) -> Awaitable[Any]:
        """Begin to call the handler with the events of a part, with the middleware around it."""
        events = [message.event for message in part]
        context = part[0].context.of_batch([message.context for message in part])
        if self.middleware:
            return driven(self._through_middleware(events, context), variables)
        if self.spec.is_coroutine:
            return driven(self.spec.call(events, context), variables)
        call = partial(variables.run, in_thread, self.spec.call, events, context)
        return self._threads.call(call, most=self.concurrency)

    # --- the end of a run ---------------------------------------------------------------------------------

    def _settle(self, part: Sequence[_Message], result: object) -> None:
        """Settle messages by the result of the handler: None, or a list with a result for each message."""
        if isinstance(result, list) and len(result) == len(part):
            results: Sequence[object] = result
        elif result is None:
            results = [None] * len(part)
        else:
            if inspect.iscoroutine(result):
                result.close()
            count = f" of {len(result)} for {len(part)} messages" if isinstance(result, list) else ""
            self._fail(part, HandlerResultError(self.lane, f"{type(result).__name__}{count}", ALLOWED))
            return
        for (held, *_), each in zip(part, results, strict=True):
            held.book.settle(held, self._settlements.after_return(held, each))

    def _fail(self, messages: Sequence[_Message], failure: BaseException) -> None:
        for held, *_ in messages:
            held.book.settle(held, self._settlements.after_failure(held, failure))

    def _release(self, messages: Sequence[_Message]) -> None:
        for held, *_ in messages:
            release(held)


def _is_to_go_back(held: Held) -> bool:
    """Return whether a message must not run in this process, for a reason other than the end of its lease."""
    return held.is_lost or held.is_unwanted or not held.book.may_begin()


def _is_open(held: Held) -> bool:
    """Return whether the claim has not been settled."""
    return held.settlement is None and not held.is_over

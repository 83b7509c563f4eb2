"""`Observer`: the events that the engine reports. `aiodelay.telemetry` and `aiodelay.testing.history` implement it."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol

from aiodelay.core.values import Claim, DeadKey, Delivery, Lane, Outcome, Put, SendOutcome, Settlement
from aiodelay.ports import DeadLetters, Feed, Sink, Transferring, Work
from aiodelay.ports.carrier import Carrier

__all__ = ["Attempt", "BatchRun", "ObservedClaim", "Observer"]


class Attempt(Protocol):
    """One attempt at delivering a message, from `Observer.begin` or `send` until the message is settled."""

    def enter(self, variables: contextvars.Context) -> None:
        """Put the attempt's trace into the context in which a handler will run."""
        ...

    def failed(self, error: BaseException) -> None:
        """Note that the handler raised."""
        ...


class BatchRun(Protocol):
    """One run of a handler of batches, from `Observer.begin_batch` until `end`."""

    def enter(self, variables: contextvars.Context) -> None:
        """Put the run's trace into the context in which the handler will run."""
        ...

    def end(self, error: BaseException | None) -> None:
        """Note that the run has ended, and the error with which it has ended."""
        ...


class ObservedClaim(Protocol):
    """A claim of this process and its attempt. The lease book's `Held` implements it."""

    claim: Claim
    attempt: Attempt | None


class Observer(Protocol):
    """Receives the events of one opening of a scheduler. A method may wait only for the call that it wraps."""

    def commands(self, commands: Carrier) -> Carrier:
        """Wrap the commands: schedule, cancel, reschedule and fire."""
        ...

    async def redrive(self, letters: DeadLetters, keys: Sequence[DeadKey]) -> Sequence[Outcome]:
        """Schedule dead letters again, by `DeadLetters.redrive`."""
        ...

    async def purge(self, letters: DeadLetters, keys: Sequence[DeadKey]) -> int:
        """Delete dead letters, by `DeadLetters.purge`."""
        ...

    def work(self, opening: AbstractAsyncContextManager[Work]) -> AbstractAsyncContextManager[Work]:
        """Wrap a store's dispatching side."""
        ...

    def feed(self, opening: AbstractAsyncContextManager[Feed], lane: Lane) -> AbstractAsyncContextManager[Feed]:
        """Wrap a source's feed."""
        ...

    def transfer(self, moves: Transferring, lane: Lane) -> Transferring:
        """Wrap a store's transfer into one sink."""
        ...

    def apart(self, *, silent: bool = False) -> AbstractContextManager[None]:
        """Leave the caller's trace during a block. If `silent`, client instrumentation makes no spans in the block."""
        ...

    def begin(self, held: ObservedClaim, lateness_ms: int) -> None:
        """Note that a handler's run begins, and set `held.attempt`."""
        ...

    def begin_batch(self, held: Sequence[ObservedClaim]) -> BatchRun:
        """Note that a run of a handler of batches begins. The attempt of each message has begun before."""
        ...

    async def send(
        self, sink: Sink, held: Sequence[ObservedClaim], deliveries: Sequence[Delivery]
    ) -> Sequence[SendOutcome]:
        """Send a batch to a sink, and set the `attempt` of each claim."""
        ...

    def taken_in(self, topic: str, partition: int, puts: Sequence[Put]) -> AbstractContextManager[Sequence[Put]]:
        """Wrap the storing of requests from an intake's partition. The block receives the puts to store."""
        ...

    def settled(self, held: ObservedClaim, settlement: Settlement) -> Settlement:
        """Note how a claim ends. Return the settlement to send, with the trace headers that the message keeps."""
        ...

    def left(self, held: ObservedClaim) -> None:
        """Note that a claim was abandoned: its lease will lapse."""
        ...

    def watch(self, loads: Callable[[], Iterable[tuple[Lane, int, int]]]) -> None:
        """Receive a function that returns in-flight messages and demand by lane. Any thread may call it from now on."""
        ...

    def forget(self) -> None:
        """Note that the opening is over."""
        ...

"""Whom the runtime tells what it does, where somebody is to be told: `aiodelay.telemetry` implements it."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol

from aiodelay.core.values import Claim, Delivery, Lane, Put, SendOutcome, Settlement
from aiodelay.ports import Feed, Sink, Transferring, Work

__all__ = ["Attempt", "ObservedClaim", "Observer"]


class Attempt(Protocol):
    """One attempt at delivering a message, from `Observer.begin` or `send` until it is settled."""

    def enter(self, variables: contextvars.Context) -> None:
        """Prepare the context in which a handler runs."""
        ...

    def failed(self, error: BaseException) -> None:
        """The handler raised."""
        ...


class ObservedClaim(Protocol):
    """A claim of this process and its attempt: `Held` of the lease book."""

    claim: Claim
    attempt: Attempt | None


class Observer(Protocol):
    """Is told what one opening of a scheduler does. Nothing here may wait, save for what it hands on."""

    def work(self, opening: AbstractAsyncContextManager[Work]) -> AbstractAsyncContextManager[Work]:
        """Stand around a store's dispatching side."""
        ...

    def feed(self, opening: AbstractAsyncContextManager[Feed], lane: Lane) -> AbstractAsyncContextManager[Feed]:
        """Stand around a source's feed."""
        ...

    def transfer(self, moves: Transferring, lane: Lane) -> Transferring:
        """Stand around a store's moving of one sink's messages."""
        ...

    def apart(self, *, silent: bool = False) -> AbstractContextManager[None]:
        """Leave what surrounds the caller, for what goes on after it; `silent`: also unseen by others."""
        ...

    def begin(self, held: ObservedClaim, lateness_ms: int) -> None:
        """A handler's run begins: set `held.attempt`."""
        ...

    async def send(
        self, sink: Sink, held: Sequence[ObservedClaim], deliveries: Sequence[Delivery]
    ) -> Sequence[SendOutcome]:
        """Have a sink send a batch; set the `attempt` of each."""
        ...

    def taken_in(self, topic: str, partition: int, puts: Sequence[Put]) -> AbstractContextManager[Sequence[Put]]:
        """Stand around the storing of requests that were taken from a partition; what is to be stored is given."""
        ...

    def settled(self, held: ObservedClaim, settlement: Settlement) -> Settlement:
        """It is decided how a claim ends; return what is to be settled, with what is to be kept of the attempt."""
        ...

    def left(self, held: ObservedClaim) -> None:
        """A claim is left to its lease."""
        ...

    def watch(self, loads: Callable[[], Iterable[tuple[Lane, int, int]]]) -> None:
        """From now on it may be asked what is in flight and requested, by lane, from any thread."""
        ...

    def forget(self) -> None:
        """The opening is over."""
        ...

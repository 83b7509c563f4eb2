"""`Openable`, the base class of `Scheduler` with the store, the sinks and the state of the current opening."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from msgspec import structs

from aiodelay.core.values import Lane, Promise, Reach, WorkStatus
from aiodelay.core.wakeup import WakeUp
from aiodelay.errors import ClosedError, UnknownSinkError, shortened
from aiodelay.ports import Loads, Sink, Store, Transfer

from .lifecycle import Running

__all__ = ["Openable"]


class Openable:
    """The store and sinks of `Scheduler`, its current opening, and the methods that show their state.

    `Scheduler` inherits these methods. It sets the opening when it opens and closes.

    Args:
        store: The scheduler's store.
        sinks: The sinks by name, including the sinks of the store.
    """

    def __init__(self, store: Store, sinks: Mapping[str, Sink]) -> None:
        self._store, self._sinks = store, sinks
        self._running: Running | None = None
        self._opening: Running | None = None
        self._was_closed = False

    @property
    def store(self) -> Store:
        """The store, whether the scheduler is open or not.

        Use it for operations that the scheduler does not offer, such as `scheduler.store.now_ms()`. The scheduler opens
        and closes its store. While the store is closed, an operation that needs its connection raises `ClosedError`.
        """
        return self._store

    @property
    def sinks(self) -> Mapping[str, Sink]:
        """The sinks by name, including the sinks of the store, whether the scheduler is open or not."""
        return self._sinks

    def sink(self, name: str) -> Sink:
        """Return the sink with this name.

        Args:
            name: The part of `to=` before the colon.

        Raises:
            UnknownSinkError: The scheduler has no sink of that name.
        """
        if name not in self._sinks:
            known = ", ".join(sorted(self._sinks)) or "none (the scheduler has no sink)"
            raise UnknownSinkError("sink", shortened(name), known)
        return self._sinks[name]

    def opened_store(self) -> Store:
        """Return the store of an open scheduler.

        Raises:
            ClosedError: The scheduler is not open.
            WrongLoopError: The scheduler was opened on another event loop, or in another process.
        """
        self._ready()
        return self._store

    async def run_until_idle(self) -> None:
        """Return when the served lanes hold only recurring messages, and no message is in flight.

        This method is for scripts and examples. It waits for due times however far ahead they are. If a wait is longer
        than `drain`, the method logs one warning. While the store does not answer, the method asks the store again.

        Raises:
            ClosedError: The scheduler is being closed.
            StoreDamagedError: Another program has overwritten the store's data.
        """
        await self._ready().wait_until_idle()

    def reaches(self, sink: str) -> Reach:
        """Return how often a message may reach a sink from this scheduler's store, and why.

        Args:
            sink: The name of the sink, or a destination as in `to=`, which is `<sink>:<address>`. If the answer for a
                name is `BY_ADDRESS`, ask for the destination.

        Raises:
            UnknownSinkError: This scheduler has no sink of that name.
            TargetError: The sink does not take messages for this address.
        """
        name, _, address = sink.partition(":")
        found = self.sink(name)
        if address:
            found.check(address)
        if isinstance(self._store, Transfer):
            return self._store.reaches(found, address) if address else self._store.reaches(found)
        reason = f"{self._store.name} and {name} share no server or cluster: messages are claimed, sent and settled"
        return Reach(Promise.AT_LEAST_ONCE, reason)

    def status(self) -> WorkStatus:
        """Return whether messages are dispatched yet, and, while a Kafka store opens, how much the store has read."""
        if self._running is not None:
            return self._running.status()
        if self._opening is None:
            return WorkStatus("ended", why="not open")
        found = self._store.status() if isinstance(self._store, Loads) else WorkStatus("loading")
        if found.phase == "ended":
            return found
        # A store that counts partitions has answered, so the reason of an earlier failed attempt no longer holds.
        why = found.why or ("" if found.of else self._opening.patience.reason)
        return structs.replace(found, phase="loading", why=why)

    def demand(self) -> Mapping[Lane, int]:
        """Return how many more messages each handler and sink requests now; empty while the scheduler is closed."""
        subscriptions = {} if self._running is None else self._running.subscriptions.by_lane
        return {lane: each.demand().messages for lane, each in subscriptions.items()}

    @property
    def in_flight(self) -> int:
        """The number of messages that this process has delivered and not settled yet; 0 while closed."""
        return 0 if self._running is None else self._running.subscriptions.in_flight

    def served(self) -> Sequence[Lane]:
        """Return the lanes that this process serves now, former names included; none while closed or closing."""
        if self._running is None or self._running.is_closing:
            return ()
        return self._running.subscriptions.lanes()

    @contextmanager
    def watch(self) -> Iterator[WakeUp]:
        """Yield a wake-up that is set whenever this process has settled a message or can take another message."""
        with nullcontext(WakeUp()) if self._running is None else self._running.subscriptions.watch() as changed:
            yield changed

    @property
    def overdue_age_ms(self) -> int:
        """The age in ms of the oldest overdue message over all lanes, checked every 10 s; 0 = no message is overdue."""
        return 0 if self._running is None else self._running.overdue_age_ms

    def _ready(self) -> Running:
        if self._running is None:
            raise ClosedError("scheduler", "closed" if self._was_closed else "not open yet")
        self._running.check_usable()
        return self._running

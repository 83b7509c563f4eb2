"""The subscriptions of one opening of a scheduler: handlers, publications, sinks and transfers.

`lifecycle` begins and ends them. The dispatch loop reads them, and `Scheduler` adds and removes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, TypeVar
from uuid import uuid4

from aiodelay.core.retry import Retry
from aiodelay.core.values import Claim, Lane, Promise
from aiodelay.core.wakeup import WakeUp
from aiodelay.errors import ClosedError
from aiodelay.handlers.context import RunContext
from aiodelay.handlers.received import HeldMessage
from aiodelay.handlers.spec import HandlerSpec
from aiodelay.ports import Sink, Source, Store, Transfer, reactive

from .delivery.batch_subscription import BatchSubscription
from .delivery.dead_letter_hooks import DeadLetterHooks
from .delivery.dispatcher import Subscriber, Subscription
from .delivery.publication import Publication
from .delivery.runners import Runners
from .delivery.sink_subscription import SinkSubscription
from .delivery.subscription import HandlerSubscription
from .delivery.transfer import TransferSubscription
from .loops import Loops, RuntimeOptions

__all__ = ["Subscriptions", "moves_into", "sends_to"]

R = TypeVar("R", bound=HeldMessage[Any, Any])

CANCELLATIONS = 4
"""The number of times that closing cancels a run that does not end. All of them happen within `CANCEL_S`."""
CANCEL_S = 10.0
"""Longest wait for cancelled runs to end."""
CLOSE_S = 5.0
"""Longest wait, in all, for the last claims, settlements and commands, and then for connections to close."""


class Subscriptions:
    """The lanes that one opening of a scheduler serves, and the lanes that it stops serving.

    Args:
        store: The scheduler's store.
        sources: The scheduler's sources, by name.
        options: The scheduler's options.
        context: Makes a handler's context.
        worker: The worker id of this opening.
        tasks: Owns the tasks of this opening.
        stack: Closes the transfers that `add_sink` opens.
    """

    def __init__(
        self,
        store: Store,
        sources: dict[str, Source],
        options: RuntimeOptions,
        context: Callable[[Claim, int, Retry], RunContext[Any]],
        *,
        worker: str,
        tasks: asyncio.TaskGroup,
        stack: AsyncExitStack,
    ) -> None:
        self._store, self._sources, self._options, self._context = store, sources, options, context
        self._worker, self._tasks, self._stack = worker, tasks, stack
        self._loop = asyncio.get_running_loop()
        self.by_lane: dict[Lane, Subscription] = {}
        self._transfers: list[TransferSubscription] = []
        self._leaving: list[Subscriber] = []
        self._watchers: set[WakeUp] = set()
        self._loops: Loops | None = None
        self._hooks: DeadLetterHooks | None = None

    def begin(self, loops: Loops, hooks: DeadLetterHooks | None) -> None:
        """Accept handlers and sinks from now on: the loops have started."""
        self._loops, self._hooks = loops, hooks

    # --- add and change -----------------------------------------------------------------------------------

    def add_handler(self, spec: HandlerSpec) -> None:
        """Start serving a handler from the store, and from its source if it has one."""
        if self._loops is None:
            return
        kind = HandlerSubscription if spec.batch is None else BatchSubscription
        subscription = kind(
            spec=spec,
            runners=Runners(self._tasks),
            context=self._context,
            now_ms=self._store.now_ms,
            on_free=self._loops.freed,
            middleware=self._options.middleware,
            observer=self._options.observer,
            hooks=self._hooks,
            claims_ahead=self._options.claims_ahead and spec.batch is None,
        )
        self._serve(subscription)

    def publish(
        self,
        spec: HandlerSpec,
        subscriber: reactive.Subscriber[R],
        received: Callable[[Any, Any, Callable[[], bool]], R],
        on_over: Callable[[], None],
    ) -> None:
        """Start giving a lane's messages to a subscriber: from the store, and from its source if it has one.

        Args:
            spec: The lane, its retry policy and its source. The engine never calls the spec's handler.
            subscriber: Gets the messages.
            received: Makes the subscriber's message from the event, its context, and a function that says whether the
                message is outdated.
            on_over: The engine calls it once, when the subscription is over.
        """
        assert self._loops is not None
        loops = self._loops
        publication = Publication(
            spec=spec,
            runners=Runners(self._tasks),
            context=self._context,
            now_ms=self._store.now_ms,
            on_free=loops.freed,
            observer=self._options.observer,
            hooks=self._hooks,
            subscriber=subscriber,
            received=received,
            failure=lambda: None if loops.settles else ClosedError("scheduler", "ended by a failure"),
            on_over=on_over,
            leave=self._leave,
        )
        self._serve(publication)
        publication.subscribe()

    def _serve(self, subscription: HandlerSubscription) -> None:
        assert self._loops is not None
        self.by_lane[subscription.lane] = subscription
        name, address = subscription.spec.source or ("", "")
        if name in self._sources:
            consumer = f"{self._worker}-{uuid4().hex[:8]}"
            feed = self._sources[name].feed(address, consumer, self._store.put_back, self._store.now_ms)
            with self._options.apart():
                self._loops.add_source(subscription, feed)
        self._loops.resumed()

    def add_sink(self, sink: Sink) -> None:
        """Start serving a sink: by transfer if the store can move messages into the sink, else by sending.

        If the store can move the messages for some addresses only, do both. The transfer begins first, so that no claim
        takes a message that the transfer moves.
        """
        if self._loops is None:
            return
        store = self._store
        if isinstance(store, Transfer) and moves_into(store, sink):
            moves = self._stack.enter_context(store.transferring(sink))
            if self._options.observer is not None:
                moves = self._options.observer.transfer(moves, sink.name)
            transfer = TransferSubscription(
                sink=sink,
                moves=moves,
                runners=Runners(self._tasks),
                now_ms=store.now_ms,
                on_change=self.changed,
                on_refused=self._send_instead,
            )
            self._transfers.append(transfer)
            with self._options.apart():
                transfer.start()
        if sends_to(store, sink):
            self.by_lane[sink.name] = SinkSubscription(
                sink=sink,
                retry=self._options.retry,
                runners=Runners(self._tasks),
                now_ms=store.now_ms,
                on_free=self._loops.freed,
                observer=self._options.observer,
                hooks=self._hooks,
            )
            self._loops.resumed()

    async def _send_instead(self, transfer: TransferSubscription) -> None:
        """Claim and send the messages of a sink, because the store no longer transfers them."""
        await self._stack.enter_async_context(transfer.sink)
        if not transfer.is_draining:
            self._transfers.remove(transfer)
            self.add_sink(transfer.sink)

    def set_concurrency(self, lane: Lane, concurrency: int) -> None:
        """Change a handler's concurrency."""
        subscription = self.by_lane.get(lane)
        if isinstance(subscription, HandlerSubscription):
            subscription.set_concurrency(concurrency)

    @asynccontextmanager
    async def taken_out(self, message_id: str) -> AsyncIterator[None]:
        """Give back claims on a message, if its runs have not begun, and make no claim inside the block.

        So a command inside the block finds the message pending, unless another process claims it first. After the
        block, the watchers are woken: the command may have ended the last message.
        """
        handlers = [each for each in self.by_lane.values() if isinstance(each, HandlerSubscription)]
        found = [held for each in handlers for held in each.take_out(message_id)]
        if not found or self._loops is None:
            yield
        else:
            with self._loops.no_claims(), self.watch() as changed:
                by_s = self._loop.time() + self._options.store_timeout_ms / 1000
                while not all(held.is_over for held in found) and (left_s := by_s - self._loop.time()) > 0:
                    changed.clear()
                    await changed.wait(left_s)
                yield
        self.changed()

    # --- remove and end -----------------------------------------------------------------------------------

    async def remove(self, lane: Lane) -> None:
        """Stop serving a lane. Return when its messages in flight have settled, or were stopped or abandoned."""
        subscription = self.by_lane.pop(lane, None)
        if subscription is not None:
            self._leaving.append(subscription)
            await self._finish_leaving(subscription)

    def _leave(self, subscription: Subscription) -> None:
        """Begin to stop serving a lane, as `remove` does, and return at once."""
        if self._loops is not None and self._loops.settles:
            del self.by_lane[subscription.lane]
            self._leaving.append(subscription)
            self._tasks.create_task(self._finish_leaving(subscription), name=f"aiodelay leave {subscription.lane}")

    async def _finish_leaving(self, subscription: Subscription) -> None:
        assert self._loops is not None
        drained_by_s = self.drained_by_s()
        await self._loops.drain_source(subscription, drained_by_s)
        await self._end([subscription], drained_by_s)
        settled_by_s = self._loop.time() + CLOSE_S
        await self._settled_by([subscription], settled_by_s)
        await self._loops.end_source(subscription, settled_by_s)
        self._leaving.remove(subscription)

    def drained_by_s(self) -> float:
        """Return the end of a drain that begins now, in the time of the event loop."""
        return self._loop.time() + self._options.drain_ms / 1000

    async def end(self, drained_by_s: float) -> None:
        """Drain all subscriptions. After `drained_by_s`, cancel the running handlers, and abandon handlers that go on.

        Args:
            drained_by_s: The end of the drain, in the time of the event loop.
        """
        await self._end(self._all(), drained_by_s)

    async def _end(self, subscriptions: Sequence[Subscriber], drained_by_s: float) -> None:
        for subscription in subscriptions:
            subscription.drain()
        if not await self._settled_by(subscriptions, drained_by_s):
            await self._stop(subscriptions)
        for subscription in subscriptions:
            subscription.close()

    async def _stop(self, subscriptions: Sequence[Subscriber]) -> None:
        """Cancel runs several times: code that ignores one cancellation may obey the next."""
        for _ in range(CANCELLATIONS):
            for subscription in subscriptions:
                subscription.stop()
            tasks = [task for subscription in subscriptions for task in subscription.runners.tasks]
            if not tasks or not (await asyncio.wait(tasks, timeout=CANCEL_S / CANCELLATIONS))[1]:
                return

    def stop(self) -> None:
        """Cancel all runs once, and do not wait for them."""
        for subscription in self._all():
            subscription.stop()

    async def settled_by(self, by_s: float) -> bool:
        """Wait until no message is in flight. Return False if the time limit comes first, or if the loops have failed.

        Args:
            by_s: The time limit, in the time of the event loop.
        """
        return await self._settled_by(self._all(), by_s)

    async def _settled_by(self, subscriptions: Sequence[Subscriber], by_s: float) -> bool:
        with self.watch() as changed:
            while any(subscription.in_flight for subscription in subscriptions):
                changed.clear()
                left = by_s - self._loop.time()
                if left <= 0 or self._loops is None or not self._loops.settles:
                    return False
                await changed.wait(left)
        return True

    # --- inspect ------------------------------------------------------------------------------------------

    def lanes(self) -> list[Lane]:
        """Return the lanes served now, former names included."""
        claimed = [
            lane
            for subscription in self.by_lane.values()
            for lane in (subscription.lane, *subscription.demand().aliases)
        ]
        return claimed + [transfer.lane for transfer in self._transfers if transfer.lane not in self.by_lane]

    def load(self) -> list[tuple[Lane, int, int]]:
        """Return each lane with its messages in flight and its demand. Any thread may call this."""
        return [(each.lane, each.in_flight, each.demand().messages) for each in list(self.by_lane.values())]

    @property
    def in_flight(self) -> int:
        """The number of messages that are delivered and not settled, and of dead letters that wait for a hook."""
        untold = 0 if self._hooks is None else self._hooks.waiting
        return sum(subscription.in_flight for subscription in self._all()) + untold

    def _all(self) -> list[Subscriber]:
        """Return the served subscriptions, and the leaving subscriptions that may still have messages in flight."""
        return [*self.by_lane.values(), *self._transfers, *self._leaving]

    @contextmanager
    def watch(self) -> Iterator[WakeUp]:
        """Yield a wake-up that is set whenever a message was settled or demand may have grown."""
        watcher = WakeUp()
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    def changed(self) -> None:
        """Wake the watchers: a message was settled, or demand may have grown."""
        for watcher in self._watchers:
            watcher.set()


def moves_into(store: Store, sink: Sink) -> bool:
    """Return whether a store transfers messages into a sink, at least for some addresses."""
    return isinstance(store, Transfer) and store.reaches(sink).promise is not Promise.AT_LEAST_ONCE


def sends_to(store: Store, sink: Sink) -> bool:
    """Return whether a worker claims messages and sends them to a sink, at least for some addresses."""
    return not isinstance(store, Transfer) or store.reaches(sink).promise is not Promise.EXACTLY_ONCE

"""`FollowingWork` and `FollowingTransfer`: claims and transfers that follow a move to another number of shards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack
from typing import Self, TypeVar

from aiodelay.backends.redis.records.shards import MOVED
from aiodelay.backends.redis.store.waiting import Waiter
from aiodelay.core.backoff import pause_s
from aiodelay.core.values import (
    Claimed,
    Demand,
    Lane,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    Tidied,
    Transferred,
    WorkStatus,
)
from aiodelay.errors import StoreUnavailableError
from aiodelay.ports import Transferring, Work

from .following import Follower, Generation
from .following_pulse import FollowingPulse

__all__ = ["FollowingTransfer", "FollowingWork"]

log: logging.Logger = logging.getLogger("aiodelay.redis")

R = TypeVar("R")


class FollowingWork:
    """Implements the Protocol `Work` over the work of the present layout.

    Args:
        follower: The shards.
        pulse: The worker's sign of life.
        opened: Registers the worker in the shards of the present layout. Its argument is the wait of the worker's loop.

    Attributes:
        pulse: The worker's sign of life.
        is_ready: Done when the worker is registered for the first time. It has the error if this failed.
    """

    def __init__(
        self,
        follower: Follower,
        pulse: FollowingPulse,
        opened: Callable[[Waiter], AbstractAsyncContextManager[Work]],
    ) -> None:
        self._follower, self._opened = follower, opened
        self.pulse: FollowingPulse = pulse
        self._waiter = Waiter()
        self._present: tuple[Generation, Work] | None = None
        self._changed = asyncio.Event()
        self.is_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Be registered in the shards of the present layout, until the task is cancelled."""
        failures = 0
        while True:
            generation = self._follower.present
            try:
                async with generation, self._opened(self._waiter) as work:
                    failures = 0
                    self._took(generation, work)
                    await generation.over.wait()
            except Exception as error:  # noqa: BLE001 - the worker must not stay unregistered
                if not self.is_ready.done():
                    self.is_ready.set_exception(error)
                    return
                log.warning("registering a worker in other shards failed: %s; trying again", error)
                failures += 1
                await asyncio.sleep(pause_s(failures))

    def _took(self, generation: Generation, work: Work) -> None:
        self._present = generation, work
        self._changed.set()
        self._changed = asyncio.Event()
        self._waiter.wake()
        if not self.is_ready.done():
            self.is_ready.set_result(None)

    async def _follow(self, call: Callable[[Work], Awaitable[R]]) -> R:
        async def called(generation: Generation) -> R:
            return await call(await self._work_in(generation))

        return await self._follower.follow(called)

    async def _work_in(self, generation: Generation) -> Work:
        """Return the work in a generation. Wait until the worker is registered there."""
        try:
            async with asyncio.timeout(self._follower.wait_s):
                while self._present is None or self._present[0] is not generation:
                    await self._changed.wait()
        except TimeoutError:
            first = generation.shards[0]
            raise StoreUnavailableError(first.name, "the worker is not registered in the new shards yet") from None
        return self._present[1]

    @property
    def _work(self) -> Work:
        assert self._present is not None
        return self._present[1]

    # --- calls --------------------------------------------------------------------------------------------

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        """Lease due messages for this worker."""
        return await self._follow(lambda work: work.claim(demand, request=request, lease_ms=lease_ms))

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        """End claims. Return one outcome for each settlement, in order."""
        return await self._follow(lambda work: work.settle(settlements))

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        """Renew leases. Return one outcome for each renewal, in order."""
        return await self._follow(lambda work: work.renew(renewals))

    async def tidy(self, lanes: Collection[Lane], *, limit: int) -> Tidied:
        """Do one bounded step of housekeeping."""
        return await self._follow(lambda work: work.tidy(lanes, limit=limit))

    def beat(self, ids: Collection[str]) -> None:
        """Record that this process is alive and holds these suspects. The caller is a thread without an event loop."""
        self._work.beat(ids)

    async def wait(self, *, until_ms: int | None) -> None:
        """Wait until there may be a message to claim, but at most until `until_ms`. A new layout ends the wait."""
        await self._follow(lambda work: work.wait(until_ms=until_ms))

    def wake(self) -> None:
        """End the current `wait` of this worker, or its next `wait`."""
        self._waiter.wake()

    def clear(self) -> None:
        """Forget all earlier wake-ups of this worker."""
        self._waiter.clear()

    def status(self) -> WorkStatus:
        """Return whether claims are served: not while messages are moved to another number of shards."""
        assert self._present is not None
        generation, work = self._present
        if generation.is_stale:
            return WorkStatus("loading", why=f"the namespace {MOVED}; if it was stopped, run it again")
        return work.status()


class FollowingTransfer:
    """Implements the Protocol `Transferring` over the transfer of the present layout.

    Args:
        follower: The shards.
        opened: Registers the transfer in the shards of the present layout. It raises UnsupportedByStoreError if these
            shards do not transfer messages into the sink.
    """

    def __init__(self, follower: Follower, opened: Callable[[], AbstractContextManager[Transferring]]) -> None:
        self._follower, self._opened = follower, opened
        self._stack = ExitStack()
        self._generation: Generation | None = None
        self._transfer: Transferring | None = None

    def __enter__(self) -> Self:
        self._enter(self._follower.present)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _enter(self, generation: Generation) -> Transferring:
        """Return the transfer in the present layout."""
        if self._transfer is None or self._generation is not generation:
            self._stack.close()
            self._generation, self._transfer = generation, self._stack.enter_context(self._opened())
            generation.when_over(self._transfer.wake)
        return self._transfer

    async def transfer(self, demand: Demand, settlements: Sequence[Settlement] = (), *, traces: int = 0) -> Transferred:
        """Move due messages."""

        async def called(generation: Generation) -> Transferred:
            return await self._enter(generation).transfer(demand, settlements, traces=traces)

        return await self._follower.follow(called)

    async def wait(self, *, until_ms: int | None) -> None:
        """Return when there may be messages to move. A new layout ends the wait."""
        assert self._generation is not None
        assert self._transfer is not None
        async with self._generation:
            if not self._generation.over.is_set():
                await self._transfer.wait(until_ms=until_ms)

    def wake(self) -> None:
        """End the current or next `wait`."""
        assert self._transfer is not None
        self._transfer.wake()

    def clear(self) -> None:
        """Forget earlier wake-ups."""
        assert self._transfer is not None
        self._transfer.clear()

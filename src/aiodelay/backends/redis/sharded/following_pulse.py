"""`FollowingPulse`: the pulse of one worker, which follows a move to another number of shards.

The thread of the pulse finds out the new layout by itself, because a handler may block the event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from msgspec import Struct
from msgspec.structs import replace

from aiodelay.backends.redis.records.shards import ShardLayout
from aiodelay.backends.redis.store.pulse import RedisPulse
from aiodelay.core.values import Renewal, RenewOutcome, Settlement, SettleOutcome
from aiodelay.ports.pulse import Step

from .pulse import ShardedPulse

__all__ = ["FollowingPulse"]


class _Pulses(Struct, frozen=True, eq=False):
    """The pulses of one layout: the pulse of each shard, and the pulse of all of them."""

    layout: ShardLayout
    shards: Sequence[RedisPulse]
    whole: RedisPulse | ShardedPulse


class FollowingPulse:
    """Implements the Protocol `Pulse` over the pulses of the present layout.

    A move ends all incarnations. So after it, nobody declares a process dead because of its former incarnation, and the
    process records its claims under the new one.

    Args:
        made: Makes a pulse for each shard of a layout.
        layout: The layout of the namespace.
    """

    def __init__(self, made: Callable[[ShardLayout], Sequence[RedisPulse]], layout: ShardLayout) -> None:
        self._made, self._lock, self._woken = made, threading.Lock(), threading.Event()
        self._present = self._new(layout)
        self._next: _Pulses | None = None

    def _new(self, layout: ShardLayout) -> _Pulses:
        shards = self._made(layout)
        whole = shards[0] if len(shards) == 1 else ShardedPulse(shards)
        for each in shards:
            each.woken = self._woken
        return _Pulses(layout, shards, whole)

    def shards_of(self, layout: ShardLayout) -> Sequence[RedisPulse]:
        """Return the pulse of each shard of a layout. The next step goes on with them. Any thread may call this."""
        with self._lock:
            for known in (self._next, self._present):
                if known is not None and known.layout == layout:
                    return known.shards
            self._next = self._new(layout)
            self._woken.set()
            return self._next.shards

    @property
    def is_calling(self) -> bool:
        """Whether a claim or renewal is on its way that names a present incarnation."""
        with self._lock:  # Race: the thread may go on with the next layout between the two reads.
            known = [self._present, *([] if self._next is None else [self._next])]
        return any(each.whole.is_calling for each in known)

    def may_begin(self) -> bool:
        """Return whether a run may begin now: nobody can have declared this process dead."""
        return self._present.whole.may_begin()

    def step(self, tokens: Collection[int]) -> Step:
        """Take a step under the present layout. If the first shard has refused it, the next step follows the move."""
        self._go_on()
        present = self._present
        step = present.whole.step(tokens)
        found = present.shards[0].found_layout
        if found is None or found.is_moving:
            return step
        self.shards_of(found)
        return replace(step, wait_ms=0)

    def _go_on(self) -> None:
        """Take the pulses of the next layout. A process that others may have declared dead stays refused."""
        with self._lock:
            if self._next is None:
                return
            former, self._present, self._next = self._present, self._next, None
            is_refused = not former.whole.may_begin()
            for each in self._present.shards:
                each.follow(is_refused=is_refused)
        former.whole.leave()

    def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        """Renew leases while the event loop is blocked. Return one outcome for each renewal, in order."""
        return self._present.whole.renew(renewals)

    def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        """End claims while the event loop is blocked. Return one outcome for each settlement, in order."""
        return self._present.whole.settle(settlements)

    def wait(self, ms: int) -> None:
        """Wait for the next step, at most `ms`. A claim in any shard, or a new layout, ends a long wait."""
        self._woken.wait(ms / 1000)
        self._woken.clear()

    def wake(self) -> None:
        """End the current or the next `wait`."""
        self._woken.set()

    def restart(self) -> None:
        """Take a new incarnation in each shard that has refused the present one."""
        with self._lock:
            for each in self._present.shards:
                if each.is_refused:
                    each.restart()

    def leave(self) -> None:
        """Delete the numbers, and close the connections."""
        self._present.whole.leave()

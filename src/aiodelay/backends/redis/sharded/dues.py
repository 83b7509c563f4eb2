"""`ShardDues`: when each shard next has something to do for one loop, as far as this process knows."""

from __future__ import annotations

import math
from collections.abc import Collection

from aiodelay.backends.redis.store.waiting import Waiter
from aiodelay.core.values import Lane

__all__ = ["ShardDues", "ShardWaiter"]

AT_ONCE = -math.inf
"""The due time of a shard that this process knows nothing about."""


class ShardDues:
    """The next due time of each shard. A loop visits only the shards in which something may be due.

    Race: a message may be written to a shard while a claim of this shard is on its way. So the object keeps the due
    times that it hears of apart from the due times in answers, and `asked` forgets only earlier ones.

    Args:
        shards: The number of shards.
        poll_ms: The longest time between two visits of a shard. After it, a lost wake-up does no harm (L2).
    """

    def __init__(self, shards: int, poll_ms: int) -> None:
        self._poll_ms = poll_ms
        self._answered = [AT_ONCE] * shards
        self._heard = [math.inf] * shards
        self._lanes: list[frozenset[Lane]] = [frozenset()] * shards
        self._visited_ms = [0] * shards

    def comes_due(self, shard: int, due_ms: float = AT_ONCE) -> None:
        """Note that a shard may have something to do at `due_ms`; by default, at once."""
        self._heard[shard] = min(self._heard[shard], due_ms)

    def asked(self, shard: int, lanes: Collection[Lane], now_ms: int) -> None:
        """Note that a call to a shard is about to be sent.

        Args:
            shard: The number of the shard.
            lanes: The lanes of the call. The answer says nothing about other lanes.
            now_ms: The shard's time.
        """
        self._heard[shard] = math.inf
        self._answered[shard] = AT_ONCE  # If the call fails, its outcome is unknown.
        self._lanes[shard] = frozenset(lanes)
        self._visited_ms[shard] = now_ms

    def answered(self, shard: int, next_ms: int | None) -> None:
        """Note the next due time in a shard's answer; None if its lanes are empty."""
        self._answered[shard] = math.inf if next_ms is None else next_ms

    def failed(self, shard: int, again_ms: int) -> None:
        """Note that a shard did not answer, and when to ask it again."""
        self._answered[shard] = again_ms

    def looked(self, shard: int, now_ms: int) -> None:
        """Note that a shard is unchanged since its last answer."""
        self._visited_ms[shard] = now_ms

    def is_due(self, shard: int, lanes: Collection[Lane], now_ms: int) -> bool:
        """Return whether a shard may have something to do in these lanes, now or on the way of a call to it."""
        return (
            self._next(shard) <= now_ms + 1
            or not self._lanes[shard].issuperset(lanes)
            or not 0 <= now_ms - self._visited_ms[shard] < self._poll_ms  # below 0: the clock has stepped back
        )

    def next_ms(self) -> int | None:
        """Return the earliest due time of all shards, 0 for one that is due at once; None if there is none."""
        earliest = min(map(self._next, range(len(self._answered))))
        return None if earliest == math.inf else int(max(earliest, 0))

    def _next(self, shard: int) -> float:
        return min(self._answered[shard], self._heard[shard])


class ShardWaiter(Waiter):
    """A part of the wait of a loop over all shards: it notes which shard the loop hears of.

    Args:
        whole: The wait of the loop.
        dues: The due times of all shards.
        shard: The number of the shard.
    """

    def __init__(self, whole: Waiter, dues: ShardDues, shard: int) -> None:
        super().__init__()
        self._whole, self._dues, self._shard = whole, dues, shard

    def comes_due(self, due_ms: int) -> None:
        """Tell the loop of a message that is due at `due_ms`."""
        self._dues.comes_due(self._shard, due_ms)
        self._whole.comes_due(due_ms)

    def wake(self) -> None:
        """End the current or the next wait of the loop, and let it visit this shard."""
        self._dues.comes_due(self._shard)
        self._whole.wake()

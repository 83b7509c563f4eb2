"""`ShardDues`: when each shard next has something to do for one loop, as far as this process knows."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from msgspec import Struct

from aiodelay.backends.redis.store.waiting import Waiter
from aiodelay.core.values import MAX_LAPSES, Lane

__all__ = ["ShardDues", "ShardWaiter"]

AT_ONCE = -math.inf
"""The due time of a shard that this process knows nothing about."""


class _Answer(Struct):
    """What the last answer of a shard said about a lane.

    Attributes:
        next_ms: The time at which there may be something to do.
        max_lapses: The most lapses of the messages of which this is true.
        asked_ms: The shard's time when it was asked.
        has_more: Whether the shard had more due messages than it was asked for.
    """

    next_ms: float
    max_lapses: int
    asked_ms: int
    has_more: bool = False


class ShardDues:
    """The next due times of each shard. A loop asks a shard for a lane only if something may be due there.

    Race: a message may be written to a shard while a call to it is on its way. So the object keeps the due times that
    it hears of apart from the due times in answers, and `asked` forgets only earlier ones.

    Args:
        shards: The number of shards.
        poll_ms: The longest time between two questions about a lane. After it, a lost wake-up does no harm (L2).
        ahead_ms: Returns how far the clock of a shard's server is ahead of the clock of the first shard's server.
    """

    def __init__(self, shards: int, poll_ms: int, ahead_ms: Callable[[int], int]) -> None:
        self._poll_ms = poll_ms
        self.ahead_ms: Callable[[int], int] = ahead_ms
        self._answers: list[dict[Lane, _Answer]] = [{} for _ in range(shards)]
        self._heard = [math.inf] * shards

    def comes_due(self, shard: int, due_ms: float = AT_ONCE) -> None:
        """Note that a shard may have something to do at `due_ms`; by default, at once."""
        self._heard[shard] = min(self._heard[shard], due_ms)

    def asked(self, shard: int, lanes: Collection[Lane], now_ms: int, *, max_lapses: int = MAX_LAPSES) -> None:
        """Note that a call to a shard is about to be sent. If it is not answered, nothing is known about its lanes.

        Args:
            shard: The number of the shard.
            lanes: The lanes of the call.
            now_ms: The shard's time.
            max_lapses: The most lapses of the messages of the call.
        """
        heard_ms, self._heard[shard] = self._heard[shard], math.inf
        for answer in self._answers[shard].values():
            answer.next_ms = min(answer.next_ms, heard_ms)
        for lane in lanes:
            self._answers[shard][lane] = _Answer(AT_ONCE, max_lapses, now_ms)

    def answered(self, shard: int, next_due: Mapping[Lane, int | None]) -> None:
        """Note the next due times of lanes in a shard's answer; None if a lane is empty."""
        for lane, next_ms in next_due.items():
            answer = self._answers[shard][lane]
            answer.next_ms = math.inf if next_ms is None else next_ms
            answer.has_more = answer.next_ms <= answer.asked_ms

    def looked(self, shard: int, now_ms: int) -> None:
        """Note that a shard is unchanged since its last answers."""
        for answer in self._answers[shard].values():
            answer.asked_ms = now_ms

    def is_due(self, shard: int, lane: Lane, now_ms: int, *, max_lapses: int = MAX_LAPSES) -> bool:
        """Return whether a shard may have something to do in a lane, now or on the way of a call to it."""
        answer = self._answers[shard].get(lane)
        return (
            answer is None
            or min(answer.next_ms, self._heard[shard]) <= now_ms + 1
            or answer.max_lapses < max_lapses
            or not 0 <= now_ms - answer.asked_ms < self._poll_ms  # below 0: the clock has stepped back
        )

    def has_more(self, shard: int, lane: Lane) -> bool:
        """Return whether a shard had more due messages in a lane than it was last asked for."""
        answer = self._answers[shard].get(lane)
        return answer is not None and answer.has_more

    def next_ms(self, lanes: Collection[Lane], now_ms: int) -> int | None:
        """Return the earliest due time of lanes in all shards, by the clock of the first shard.

        It is `now_ms` if unknown, and None without messages.
        """
        earliest = math.inf
        for shard, (answers, heard_ms) in enumerate(zip(self._answers, self._heard, strict=True)):
            known = [answers[lane].next_ms if lane in answers else AT_ONCE for lane in lanes]
            earliest = min(earliest, min([heard_ms, *known]) - self.ahead_ms(shard))
        if earliest == math.inf or not lanes:
            return None
        return now_ms if earliest == AT_ONCE else int(earliest)


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
        self._whole.comes_due(due_ms - self._dues.ahead_ms(self._shard))

    def wake(self) -> None:
        """End the current or the next wait of the loop, and let it visit this shard."""
        self._dues.comes_due(self._shard)
        self._whole.wake()

"""`ShardedTransfer`: the transfer into one sink, out of all shards of a namespace."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from aiodelay.backends.redis.records.shards import shard_of
from aiodelay.backends.redis.store.store import RedisStore
from aiodelay.backends.redis.store.waiting import Waiter
from aiodelay.core.values import Demand, Settlement, Transferred
from aiodelay.errors import StoreError
from aiodelay.ports import Transferring

from .calls import outcomes_of
from .dues import ShardDues

__all__ = ["ShardedTransfer"]

AGAIN_MS = 500
"""How long a transfer leaves a shard alone that did not answer."""


class ShardedTransfer:
    """Implements the Protocol `Transferring` over the transfers of all shards. Each move is atomic within its shard.

    Args:
        shards: The stores of all shards, in order.
        transfers: The transfer of each shard into the sink.
        lane: The name of the sink, which is the lane of its messages.
        waiter: The wait of the loop that transfers.
        dues: When each shard next has something to move. The waiters of the shards write into it too.
    """

    def __init__(
        self,
        shards: Sequence[RedisStore],
        transfers: Sequence[Transferring],
        lane: str,
        waiter: Waiter,
        dues: ShardDues,
    ) -> None:
        self._shards, self._transfers, self._waiter, self._dues = shards, transfers, waiter, dues
        self._lanes = (lane,)
        self._turn = 0

    async def transfer(self, demand: Demand, settlements: Sequence[Settlement] = (), *, traces: int = 0) -> Transferred:
        """Move due messages out of the shards that have some, at the same time. The demand is divided between them.

        If a shard does not answer, the others go on. The call fails if no shard that it asked has answered.
        """
        self._turn += 1
        parts = self._parts(demand, settlements)
        for shard in parts:
            self._dues.asked(shard, self._lanes, self._shards[shard].now_ms())
        most_traces = -(-traces // len(parts)) if parts else 0
        calls = [self._transfers[shard].transfer(part, own, traces=most_traces) for shard, (part, own) in parts.items()]
        answers: list[Transferred] = []
        errors: list[StoreError] = []
        for shard, found in zip(parts, await outcomes_of(calls), strict=True):
            if isinstance(found, Transferred):
                answers.append(found)
                self._dues.answered(shard, dict.fromkeys(self._lanes, found.next_due_ms))
            elif isinstance(found, StoreError):
                errors.append(found)
                again_ms = self._shards[shard].now_ms() + AGAIN_MS
                self._dues.answered(shard, dict.fromkeys(self._lanes, again_ms))
            else:
                raise found
        if errors and (not answers or settlements):  # The caller repeats the settlements: repeating them is safe.
            raise errors[0]
        now_ms = self._shards[0].now_ms()
        return Transferred(
            sum(each.moved for each in answers),
            [record for each in answers for record in each.series],
            {address: why for each in answers for address, why in each.changed.items()},
            now_ms,
            self._dues.next_ms(self._lanes, now_ms),
            [trace for each in answers for trace in each.traces][:traces],
        )

    def _parts(
        self, demand: Demand, settlements: Sequence[Settlement]
    ) -> Mapping[int, tuple[Demand, Sequence[Settlement]]]:
        """Return the part of the demand, and the settlements, of each shard that is due or has settlements."""
        own: dict[int, list[Settlement]] = {}
        for each in settlements:
            own.setdefault(shard_of(each.id, len(self._shards)), []).append(each)
        due = [
            shard for shard, each in enumerate(self._shards) if self._dues.is_due(shard, self._lanes[0], each.now_ms())
        ]
        due = [shard for shard in due if shard >= self._turn % len(self._shards)] + [
            shard for shard in due if shard < self._turn % len(self._shards)
        ]
        due = due[: max(demand.messages, 1)]
        parts: dict[int, tuple[Demand, Sequence[Settlement]]] = {
            shard: (replace(demand, messages=0), settled) for shard, settled in own.items()
        }
        for i, shard in enumerate(due):
            messages = demand.messages // len(due) + (i < demand.messages % len(due))
            part = replace(demand, messages=messages, max_bytes=max(demand.max_bytes // len(due), 1))
            parts[shard] = (part, own.get(shard, ()))
        return parts

    async def wait(self, *, until_ms: int | None) -> None:
        """Return when there may be messages to move: at `until_ms`, at a wake-up, or at the safety poll."""
        poll_s = self._shards[0].traits.safety_poll_ms / 1000 * random.uniform(0.97, 1)
        until_s = poll_s if until_ms is None else self._shards[0].seconds_until_asking(until_ms)
        if not await self._waiter.wait(min(poll_s, until_s), until_ms) and until_s >= poll_s:
            for shard in range(len(self._shards)):
                self._dues.comes_due(shard)

    def wake(self) -> None:
        """End the current or next `wait`."""
        self._waiter.wake()

    def clear(self) -> None:
        """Forget earlier wake-ups."""
        self._waiter.clear()

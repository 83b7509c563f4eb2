"""`ShardedPulse`: the pulse of one worker in all shards. Each shard has an incarnation of the process of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aiodelay.backends.redis.records.shards import shard_of
from aiodelay.backends.redis.store.pulse import RedisPulse
from aiodelay.core.values import Renewal, RenewOutcome, Settlement, SettleOutcome
from aiodelay.ports.pulse import Step

__all__ = ["ShardedPulse"]

T = TypeVar("T", Renewal, Settlement)
R = TypeVar("R")


class ShardedPulse:
    """The pulses of all shards under one layout. `FollowingPulse` completes it to the Protocol `Pulse`.

    A shard that does not answer holds up a step for about a second. So the shards take their steps at the same time: a
    shard that answers does not declare the process dead meanwhile.

    Args:
        pulses: The pulses of the shards, in order.
    """

    def __init__(self, pulses: Sequence[RedisPulse]) -> None:
        self._pulses = pulses
        self._threads: ThreadPoolExecutor | None = None

    @property
    def is_calling(self) -> bool:
        """Whether a claim or renewal is on its way that names a present incarnation."""
        return any(each.is_calling for each in self._pulses)

    def may_begin(self) -> bool:
        """Return whether a run may begin now: in no shard can this process have been declared dead."""
        return all(each.may_begin() for each in self._pulses)

    def step(self, tokens: Collection[int]) -> Step:
        """Take a step in all shards."""
        steps = self._of_all(lambda shard: self._pulses[shard].step(tokens))
        return Step(
            min(each.wait_ms for each in steps),
            any(each.is_refused for each in steps),
            any(each.has_resumed for each in steps),
        )

    def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        """Renew leases while the event loop is blocked. Return one outcome for each renewal, in order."""
        return self._by_shard(renewals, lambda shard, part: self._pulses[shard].renew(part))

    def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        """End claims while the event loop is blocked. Return one outcome for each settlement, in order."""
        return self._by_shard(settlements, lambda shard, part: self._pulses[shard].settle(part))

    def leave(self) -> None:
        """Delete the numbers, and close the connections."""
        self._of_all(lambda shard: self._pulses[shard].leave())
        if self._threads is not None:
            self._threads.shutdown()

    def _of_all(self, call: Callable[[int], R]) -> list[R]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(self._pulses), thread_name_prefix="aiodelay pulse of a shard")
        return list(self._threads.map(call, range(len(self._pulses))))

    def _by_shard(self, items: Sequence[T], call: Callable[[int, Sequence[T]], Sequence[R]]) -> list[R]:
        places: dict[int, list[int]] = {}
        for i, item in enumerate(items):
            places.setdefault(shard_of(item.id, len(self._pulses)), []).append(i)
        parts = [[items[i] for i in places.get(shard, ())] for shard in range(len(self._pulses))]
        found = self._of_all(lambda shard: call(shard, parts[shard]) if parts[shard] else ())
        results = {i: each for shard, at in places.items() for i, each in zip(at, found[shard], strict=True)}
        return [results[i] for i in range(len(items))]

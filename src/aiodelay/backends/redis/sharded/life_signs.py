"""`LifeSigns`: spares the claims of a namespace that was moved, because its processes could not renew them meanwhile.

Each process opens the new shards a little after the move. Until then, it must look alive, and its leases must not end.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.records.keys import Keys
from aiodelay.backends.redis.store.workers import live_workers

from .move_client import MoveClient, pairs_of

__all__ = ["SPARED_MS", "LifeSigns"]

SPARED_MS = 30_000
"""For this time after a move, leases do not end that had not ended when the move began.

If a former move spared leases then, these had not ended."""


class LifeSigns:
    """The signs of life of the processes of a namespace, while no script runs.

    Args:
        client: Reads and writes the keys.
        began_ms: The time at which the move began, in epoch ms: the smallest time of the servers of all shards.
        spared_ms: The time at which a lease must not have ended, so that it is spared, in epoch ms.
    """

    def __init__(self, client: MoveClient, began_ms: int, spared_ms: int) -> None:
        self._client, self._began_ms, self._spared_ms = client, began_ms, spared_ms

    async def renew(self, later: Sequence[Keys]) -> list[str]:
        """Let all processes that were alive when the move began look alive now. A repetition is safe.

        Args:
            later: The shards after the move. All workers are registered in the first one.

        Returns:
            The value of the field `spared` of each shard, by the clock of the shard's server.
        """
        found = live_workers(await self._client.read("HGETALL", later[0].key("workers")), self._began_ms)
        spared: list[str] = []
        for keys in later:
            now_ms = await self._client.now_ms(keys)
            workers: list[Arg] = []
            for worker in found:
                workers += [worker.name, msgspec.msgpack.encode([now_ms, *(worker.lanes or ())])]
            if workers:
                await self._client.write("HSET", keys.key("workers"), *workers)
            await self._renew_trials(keys, now_ms)
            spared.append(f"{self._spared_ms} {now_ms + SPARED_MS}")
        return spared

    async def _renew_trials(self, keys: Keys, now_ms: int) -> None:
        """Let the suspects in trials look as if their processes had just recorded that they hold them."""
        for suspect, trial in pairs_of(await self._client.read("HGETALL", keys.key("trials"))):
            kind, lease_ms, _, worker = trial.split(b" ", 3)
            renewed = b" ".join((kind, lease_ms, b"%d" % now_ms, worker))
            await self._client.write("HSET", keys.key("trials"), suspect, renewed)

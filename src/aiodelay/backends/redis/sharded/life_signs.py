"""`LifeSigns`: spares the claims of a namespace that was moved, because its processes could not renew them meanwhile.

Each process opens the new shards a little after the move. Until then, it must look alive, and its leases must not end.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.records.keys import Keys
from aiodelay.backends.redis.store.workers import live_workers

__all__ = ["SPARED_MS", "LifeSigns"]

SPARED_MS = 30_000
"""For this time after a move, leases do not end that had not ended when the move began."""


class LifeSigns:
    """The signs of life of the processes of a namespace, while no script runs.

    Args:
        client: The client of the server.
        began_ms: The time of the server at which the move began, in epoch ms.
        now_ms: The time of the server now, in epoch ms.
    """

    def __init__(self, client: Client, began_ms: int, now_ms: int) -> None:
        self._client, self._began_ms, self._now_ms = client, began_ms, now_ms

    async def renew(self, first: Keys, later: Sequence[Keys]) -> str:
        """Let all processes that were alive when the move began look alive now. A repetition is safe.

        Args:
            first: The first shard. All workers are registered there.
            later: The shards after the move.

        Returns:
            The value of the field `spared` for each shard.
        """
        workers: list[Arg] = []
        for worker in live_workers(await self._client.command("HGETALL", first.key("workers")), self._began_ms):
            workers += [worker.name, msgspec.msgpack.encode([self._now_ms, *(worker.lanes or ())])]
        for keys in later:
            if workers:
                await self._client.command("HSET", keys.key("workers"), *workers)
            await self._renew_trials(keys)
        return f"{self._began_ms} {self._now_ms + SPARED_MS}"

    async def _renew_trials(self, keys: Keys) -> None:
        """Let the suspects in trials look as if their processes had just recorded that they hold them."""
        trials = await self._client.command("HGETALL", keys.key("trials"))
        for suspect, trial in zip(trials[::2], trials[1::2], strict=True):
            kind, lease_ms, _, worker = trial.split(b" ", 3)
            renewed = b" ".join((kind, lease_ms, b"%d" % self._now_ms, worker))
            await self._client.command("HSET", keys.key("trials"), suspect, renewed)

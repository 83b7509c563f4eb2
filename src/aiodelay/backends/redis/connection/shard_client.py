"""`ShardClient`: the client of one shard on a cluster. While the shard's node is away, it fails at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from .client import Client
from .faults import Fault
from .scripts import packed

__all__ = ["ShardClient"]

log: logging.Logger = logging.getLogger("aiodelay.redis")

PATIENCE_S = 0.5
"""The longest wait of a call until a node serves the shard."""
PROBE_S = 0.25
"""The wait between two attempts to reach the node of a shard that is away."""


class ShardClient(Client):
    """A client with a circuit breaker: many calls concern several shards, and must not wait long for one of them.

    If a call fails because its connection does, or because no node has served the shard for `PATIENCE_S`, the shard is
    *away*. From then on, calls fail at once, and only `watch` tries to reach the shard: at once, and again and again.
    Without a running `watch`, this client does the same as any client of a cluster.
    """

    _lost: asyncio.Event | None = None
    _away: Fault | None = None

    @property
    def is_away(self) -> bool:
        """Whether calls to the shard fail at once."""
        return self._away is not None

    async def watch(self) -> None:
        """Try to reach the shard again whenever it is away, until cancelled."""
        self._lost = asyncio.Event()
        self._patience_s = min(PATIENCE_S, self._timeout_s)
        asked = packed(["EXISTS", *self._fixed[1:]])  # refused as a script is, while the slot moves key by key
        while True:
            await self._lost.wait()
            try:
                self._away = await self._probed(asked)
            except Exception:
                log.exception("an attempt to reach a shard failed unexpectedly; the next attempt follows")
            if self._away is None:
                self._lost.clear()
            else:
                await asyncio.sleep(PROBE_S)

    async def _probed(self, asked: bytes) -> Fault | None:
        """Return why no node answers a command on the keys of the shard; None if a node answers."""
        try:
            (reply,) = await super()._exchange([asked], self._home, durable=False)
        except Fault as fault:
            return fault
        return reply if isinstance(reply, Fault) else None

    async def _exchange(self, commands: Sequence[bytes], slot: int, *, durable: bool) -> list[Any]:
        if slot != self._home:  # a list
            return await super()._exchange(commands, slot, durable=durable)
        if self._away is not None:
            raise Fault("unavailable", self._away.reason, is_connection=True)
        try:
            replies = await super()._exchange(commands, slot, durable=durable)
        except Fault as fault:
            if fault.is_connection:
                self._lose(fault)
            raise
        if all(isinstance(each, Fault) and each.is_moving for each in replies):
            self._lose(replies[0])
        return replies

    def _lose(self, fault: Fault) -> None:
        if self._lost is not None:
            self._away = fault
            self._lost.set()

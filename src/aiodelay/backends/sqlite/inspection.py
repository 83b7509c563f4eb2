"""`Inspection`: the read methods of the SQLite store. Each call reads one snapshot of the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiodelay.core.values import DeadLetter, Instance, Lane, LaneCounts, LoadBucket, Query, Snapshot

from .handle import Handle
from .reading import Reader

__all__ = ["Inspection"]


class Inspection:
    """Implements `Inspectable`, `Recurring` and `Instances`, and the read methods of `DeadLetters` and `Pauses`.

    Args:
        handle: The file of the store.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    async def get(self, message_id: str) -> Snapshot | None:
        now = self._handle.clock.now_ms()
        return await self._handle.read(lambda reader: reader.get(message_id, now))

    async def search(self, query: Query) -> Sequence[Snapshot]:
        now = self._handle.clock.now_ms()
        return await self._handle.read(lambda reader: reader.search(query, now))

    async def series(self, *, after: str | None = None, limit: int = 100) -> Sequence[Snapshot]:
        now = self._handle.clock.now_ms()
        return await self._handle.read(lambda reader: reader.series(after, limit, now))

    async def counts(self) -> Mapping[Lane, LaneCounts]:
        now = self._handle.clock.now_ms()
        return await self._handle.read(lambda reader: reader.counts(now))

    async def instances(self) -> Sequence[Instance]:
        now = self._handle.clock.now_ms()
        return await self._handle.read(lambda reader: reader.instances(now))

    async def load(self, *, bucket_ms: int, buckets: int) -> Sequence[LoadBucket]:
        now = self._handle.clock.now_ms()
        return await self._handle.read(lambda reader: reader.load(bucket_ms, buckets, now))

    async def position(self, source: str) -> int | None:
        return await self._handle.read(lambda reader: reader.position(source))

    async def paused(self) -> Sequence[tuple[Lane, str | None]]:
        return await self._handle.read(Reader.paused)

    async def dead_letters(
        self,
        *,
        lane: Lane | None = None,
        message_id: str | None = None,
        after: tuple[int, str, int] | None = None,
        limit: int = 100,
    ) -> Sequence[DeadLetter]:
        return await self._handle.read(lambda reader: reader.dead_letters(lane, message_id, after, limit))

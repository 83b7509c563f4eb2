"""`ShardedJournalReader`: reads the journals of all shards. Each shard is a part of the journal."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from msgspec.structs import replace

from aiodelay.backends.redis.connection.options import Options
from aiodelay.backends.redis.store.journal_reader import PART, RedisJournalReader, open_journal
from aiodelay.core.values import FIRST_ENTRY, JournalEntry

from .calls import all_of
from .opening import found_layout

__all__ = ["ShardedJournalReader", "after_of", "numbered", "open_journals"]


def numbered(entry: JournalEntry, shard: int, shards: int) -> JournalEntry:
    """Return an entry of a shard with its number in the journal of all shards."""
    return replace(entry, number=(entry.number - 1) * shards + shard + 1)


def after_of(after: int, shard: int, shards: int) -> int:
    """Return the number in a shard's journal after which the entries come that follow `after` in the whole journal."""
    return max((after - shard - 1) // shards + 1, 0)


class ShardedJournalReader:
    """Implements the Protocol `JournalReader`. Part k of the journal is the journal of shard k."""

    def __init__(self, readers: Sequence[RedisJournalReader]) -> None:
        self._readers = readers

    async def spans(self) -> Mapping[int, range]:
        """Return the range of entry numbers that each shard still keeps."""
        found = await all_of([each.spans() for each in self._readers])
        return {shard: spans[PART] for shard, spans in enumerate(found)}

    async def entries(
        self, part: int, span: range, trimmed: Callable[[range], object]
    ) -> AsyncIterator[Sequence[JournalEntry]]:
        """Yield the entries of a shard's span in order, in batches.

        A move to fewer shards deletes the journals of the shards that end: then all entries of the span are missing.
        """
        if part >= len(self._readers):
            if missing := range(max(span.start, FIRST_ENTRY), span.stop):
                trimmed(missing)
            return
        async for found in self._readers[part].entries(PART, span, trimmed):
            yield found


@asynccontextmanager
async def open_journals(options: Options, namespace: str) -> AsyncGenerator[ShardedJournalReader]:
    """Open a reader of the journals of all shards."""
    layout = await found_layout(options, namespace)
    async with AsyncExitStack() as stack:
        readers = [
            await stack.enter_async_context(open_journal(options, layout.keys(namespace, shard)))
            for shard in range(layout.shards)
        ]
        yield ShardedJournalReader(readers)

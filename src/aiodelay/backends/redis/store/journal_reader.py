"""`RedisJournalReader`: reads the journal from any entry on. The store need not be open."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.faults import Fault
from aiodelay.backends.redis.connection.options import Options
from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.records.keys import Keys
from aiodelay.backends.redis.records.reading import journal_entry, lanes_in
from aiodelay.core.values import FIRST_ENTRY, JournalEntry
from aiodelay.errors import StoreUnavailableError

__all__ = ["RedisJournalReader", "open_journal"]

PART = 0
AT_ONCE = 2_000


class RedisJournalReader:
    """Implements the Protocol `JournalReader` for a Redis store. The journal has one part.

    The entries have consecutive numbers. If a number is missing, the server has trimmed the entry.

    Args:
        client: The client of the server.
        keys: The keys of the namespace.
        name: The name of the store in error messages.
    """

    def __init__(self, client: Client, keys: Keys, name: str) -> None:
        self._client, self._keys, self._name = client, keys, name

    async def spans(self) -> Mapping[int, range]:
        """Return the range of entry numbers that the server still keeps. The map has one part, `PART`."""
        oldest = await self._command("XRANGE", self._keys.key("journal"), "-", "+", "COUNT", 1)
        end = int(await self._command("HGET", self._keys.key("meta"), "journal") or 0) + 1
        return {PART: range(_number(oldest[0]) if oldest else end, end)}

    async def entries(
        self, part: int, span: range, trimmed: Callable[[range], object]
    ) -> AsyncIterator[Sequence[JournalEntry]]:
        """Yield the entries of a span in order, in batches. Report the numbers of missing entries to `trimmed`."""
        del part
        following = max(span.start, FIRST_ENTRY)
        journal, last = self._keys.key("journal"), f"{span.stop - 1}-0"
        while following < span.stop:
            found = await self._command("XRANGE", journal, f"{following}-0", last, "COUNT", AT_ONCE)
            if not found:
                trimmed(range(following, span.stop))
                return
            lanes = lanes_in(await self._command("HGETALL", self._keys.key("lanes")))
            first = _number(found[0])
            if first > following:
                trimmed(range(following, first))
            yield [journal_entry(_number(each), _fields(each), lanes) for each in found]
            following = _number(found[-1]) + 1

    async def _command(self, *arguments: Arg) -> Any:  # noqa: ANN401 - what the command returns
        try:
            return await self._client.command(*arguments)
        except Fault as fault:
            raise StoreUnavailableError(self._name, fault.reason) from fault


@asynccontextmanager
async def open_journal(options: Options, keys: Keys) -> AsyncGenerator[RedisJournalReader]:
    """Open a reader of the journal. The reader connects to the server at its first read."""
    client = Client(options, keys)
    try:
        yield RedisJournalReader(client, keys, options.name)
    finally:
        await client.aclose()


def _number(entry: Sequence[Any]) -> int:
    number: bytes = entry[0]
    return int(number.partition(b"-")[0])


def _fields(entry: Sequence[Any]) -> Mapping[bytes, bytes]:
    flat: Sequence[bytes] = entry[1]
    return dict(zip(flat[::2], flat[1::2], strict=True))

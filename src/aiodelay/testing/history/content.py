"""`content_of`: what a store holds in the end, as the last event of a history."""

from __future__ import annotations

from aiodelay.core.values import Query
from aiodelay.ports import Store

from .events import Final, PendingNote

__all__ = ["content_of"]

PAGE = 1_000


async def content_of(store: Store) -> Final:
    """Return the messages and dead letters of a store that nobody changes any more.

    Args:
        store: An open store, such as `scheduler.store`.

    Raises:
        UnsupportedByStoreError: This process cannot inspect the store.
        StoreUnavailableError: The store did not answer.
    """
    pending: list[PendingNote] = []
    dead: list[tuple[str, int, str]] = []
    after: tuple[int, str] | None = None
    while page := await store.search(Query(after=after, limit=PAGE)):
        for each in page:
            record = each.record
            pending.append(PendingNote(record.id, record.revision, str(each.state), each.next_attempt_ms))
        after = (page[-1].next_attempt_ms, page[-1].record.id)
    last: tuple[int, str, int] | None = None
    while letters := await store.dead_letters(after=last, limit=PAGE):
        dead += [(each.record.id, each.record.revision, each.reason) for each in letters]
        last = (letters[-1].at_ms, letters[-1].record.id, letters[-1].record.revision)
    return Final(now_ms=store.now_ms(), pending=pending, dead=dead)

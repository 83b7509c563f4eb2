"""Deletes ended messages and old answers, when the store no longer has to remember them.

Each transaction that adds such rows also deletes some old rows. So the number of old rows stays limited.
"""

from __future__ import annotations

from aiodelay.core.values import RETRY_WINDOW_MS

from .rows import object_text
from .tables import Tables

__all__ = ["PURGED_PER_ENDED", "purge_answers", "purge_ended"]

PURGED_PER_ENDED = 4
"""The number of old rows that a transaction checks for each row that it adds.

This number is above 1, so old rows never pile up.
"""
FAR_MS = 86_400_000


def purge_ended(tables: Tables, limit: int) -> None:
    """Check up to `limit` ended messages. Delete a message if its time `until_ms` has passed or is too far ahead.

    The function checks the messages in the order of their numbers, and continues where the last call stopped. If a
    message must stay, the function also checks the messages after it, because they may have ended earlier.
    """
    now, sweep = tables.now, tables.sweep
    if now < sweep.rest_until_ms <= now + RETRY_WINDOW_MS:
        return
    if not sweep.number:
        sweep.first_ms = now + RETRY_WINDOW_MS
    query = "SELECT n, until_ms FROM ended WHERE ns = ? AND n > ? ORDER BY n LIMIT ?"
    rows = tables.execute(query, (tables.ns, sweep.number, limit)).fetchall()
    far = now + FAR_MS  # No row gets a later time. If one has it, the clock has stepped back by a day or more.
    over = [n for n, until_ms in rows if until_ms <= now or until_ms > far]
    sweep.first_ms = min([sweep.first_ms, *(until_ms for _, until_ms in rows if until_ms > now)])
    is_last = len(rows) < limit
    sweep.number = 0 if is_last else rows[-1][0]
    sweep.rest_until_ms = sweep.first_ms if is_last else 0
    if over:
        numbers = object_text(over)
        tables.execute("DELETE FROM messages WHERE n IN (SELECT value FROM json_each(?))", (numbers,))
        query = "DELETE FROM ended WHERE ns = ? AND n IN (SELECT value FROM json_each(?))"
        tables.execute(query, (tables.ns, numbers))


def purge_answers(tables: Tables, limit: int) -> None:
    """Check the `limit` oldest answers of all namespaces.

    Delete an answer if its time `until_ms` has passed or is too far ahead.
    """
    query = (
        "DELETE FROM ops WHERE n IN (SELECT n FROM ops ORDER BY n LIMIT :limit)"
        " AND (until_ms <= :now OR until_ms > :far)"
    )
    tables.execute(query, {"limit": limit, "now": tables.now, "far": tables.now + FAR_MS})

"""Ending messages in the store of a cold tier, by version, for the jobs `cold put` and `cold cancel`.

If the store has a message, this module cancels it. If a promotion has read a version but not written it yet, this
module *bars* the version: the store then refuses the version when the promotion writes it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
from msgspec import structs
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it

from aiodelay.core.durations import MAX_HORIZON_MS
from aiodelay.core.transitions import NO_OP
from aiodelay.core.values import At, Cancel, Conflict, Envelope, Outcome, Put, Refused, Stored
from aiodelay.errors import StoreUnavailableError
from aiodelay.ports import BulkLoad, Store

from .loading import Patience, opened
from .pacing import Pacer
from .write_settings import WriteSettings, store_of
from .writing import cores_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["BARRIER", "Ending", "end_frame", "end_in"]

BARRIER: Final = "aiodelay-cold-ended"
"""Event type of the placeholder that `end_in` stores and at once cancels, so that the store refuses a promotion."""

_OUTCOMES: Final = "outcome STRING, n BIGINT"
_AT_ONCE: Final = 500
_SLACK_MS: Final = 86_400_000


class Ending(NamedTuple):
    """A message to end.

    Attributes:
        id: The id of the message.
        most_version: The highest version to end; None = any version.
        barred_version: A version to bar, because a promotion may have read it and not written it yet; None = bar no
            version.
    """

    id: str
    most_version: int | None
    barred_version: int | None


def end_frame(rows: DataFrame, settings: WriteSettings) -> Mapping[str, int]:
    """End messages in a store. A repeated call changes nothing more.

    Args:
        rows: Columns `id`, `most_version` and `barred_version`, as in `Ending`; other columns are ignored.
        settings: The store, and the rate over all tasks.

    Returns:
        The number of messages by outcome:

        - `cancelled`: this call has cancelled the message;
        - `barred`: the message was not in the store yet, and the store now refuses its promotion;
        - `in_flight`: the message is being delivered;
        - `ended`: the message had ended, or the store never had it;
        - `newer`: the store has a newer version, which stays.

    Raises:
        PythonException: The store does not answer; `clear_error` returns the cause.
    """
    settings = structs.replace(settings, concurrency=settings.concurrency or cores_of(rows.sparkSession))
    found = rows.select(*Ending._fields).repartition(settings.concurrency or 1)
    outcomes = found.mapInArrow(_Ender(settings), _OUTCOMES).groupBy("outcome").agg(F.sum("n").alias("n"))
    return {row["outcome"]: row["n"] for row in outcomes.collect()}


@dataclass(frozen=True)
class _Ender:
    """The task that executors run: it ends the messages of a partition and yields the number of each outcome."""

    settings: WriteSettings

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counts = asyncio.run(self._run(batches))
        names, numbers = pa.array(counts.keys(), pa.string()), pa.array(counts.values(), pa.int64())
        yield pa.RecordBatch.from_arrays([names, numbers], names=["outcome", "n"])

    async def _run(self, batches: Iterator[pa.RecordBatch]) -> Counter[str]:
        counts: Counter[str] = Counter()
        pacer = Pacer(self.settings.task_rate)
        async with opened(partial(store_of, self.settings), self.settings.patience_ms) as store:
            for batch in batches:
                rows = [Ending(**row) for row in batch.to_pylist()]
                for at in range(0, len(rows), _AT_ONCE):
                    part = rows[at : at + _AT_ONCE]
                    await pacer.take(len(part))
                    counts.update(await self._end(store, part))
        return counts

    async def _end(self, store: Store, endings: Sequence[Ending]) -> list[str]:
        patience = Patience(self.settings.patience_ms)
        while True:
            try:
                return await end_in(store, endings)
            except StoreUnavailableError as error:
                await patience.pause(error)


async def end_in(store: Store, endings: Sequence[Ending]) -> list[str]:
    """End messages, each id once, and return their outcomes in order.

    If a promotion may be about to write a version, this function first stores a placeholder with that version and a due
    time far ahead. Then it cancels the placeholder like any message. So the store remembers the version as ended, and
    refuses the promotion's write. A newer version stays, even if it is stored at the same moment.

    Raises:
        StoreUnavailableError: The store did not answer. A repeated call is safe.
    """
    barred = await _barred(
        store, [(each.id, each.barred_version) for each in endings if each.barred_version is not None]
    )
    cancels, words = await _cancels(store, endings)
    changed: set[str] = set()
    for cancel, outcome in zip(cancels, await store.apply(cancels), strict=True):
        if isinstance(outcome, Refused) and outcome.reason == "outdated":
            changed.add(cancel.id)
        else:
            word = _word(store, cancel.id, outcome)
            words[cancel.id] = "barred" if word == "cancelled" and cancel.id in barred else word
    if changed:
        again = [each for each in endings if each.id in changed]
        words |= zip((each.id for each in again), await end_in(store, again), strict=True)
    return [words[each.id] for each in endings]


async def _barred(store: Store, versions: Sequence[tuple[str, int]]) -> set[str]:
    """Store placeholders for barred versions. Return the ids for which the store had no message."""
    assert isinstance(store, BulkLoad)
    due = At(store.now_ms() + MAX_HORIZON_MS - _SLACK_MS)
    puts = [
        Put(NO_OP, Envelope(message_id, BARRIER, version=version), due, Conflict.newer(version))
        for message_id, version in versions
    ]
    stored = set()
    for put, outcome in zip(puts, await store.bulk_load(puts), strict=True):
        if isinstance(outcome, Stored):
            stored |= {put.id} if outcome.answer == "stored" else set()
        elif not isinstance(outcome, Refused) or outcome.reason != "outdated":
            raise StoreUnavailableError(store.name, outcome.detail, put.id)
    return stored


async def _cancels(store: Store, endings: Sequence[Ending]) -> tuple[list[Cancel], dict[str, str]]:
    """Return the cancels to send, and the outcomes of messages that need no cancel.

    If an ending has `most_version`, this function reads the revision of the message and names it in the cancel. So a
    later revision stays.
    """
    cancels = [Cancel(NO_OP, each.id) for each in endings if each.most_version is None]
    words: dict[str, str] = {}
    bounded = [(each.id, each.most_version) for each in endings if each.most_version is not None]
    stands = await asyncio.gather(*(store.get(message_id) for message_id, _ in bounded))
    for (message_id, most), found in zip(bounded, stands, strict=True):
        if found is None:
            words[message_id] = "ended"
        elif (found.record.envelope.version or 0) > most:
            words[message_id] = "newer"
        else:
            cancels.append(Cancel(NO_OP, message_id, (found.record.revision, found.record.due_ms)))
    return cancels, words


def _word(store: Store, message_id: str, outcome: Outcome) -> str:
    if isinstance(outcome, Stored):
        return outcome.answer
    if isinstance(outcome, Refused) and outcome.reason == "not_found":
        return "ended"
    raise StoreUnavailableError(store.name, outcome.detail, message_id)

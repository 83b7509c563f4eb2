"""The task of a repair. For each difference, the task compares truth and store again before it changes the store.

The *truth* is a frame with the messages that should be pending. A *difference* is an id for which truth and store
differ.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, structs

from aiodelay.core.transitions import NO_OP
from aiodelay.core.values import (
    At,
    Cancel,
    Command,
    Conflict,
    Late,
    Outcome,
    Put,
    Record,
    Refused,
    Reschedule,
    Snapshot,
    Stored,
)
from aiodelay.errors import InputError, StoreUnavailableError, shortened
from aiodelay.ports import BulkLoad, Store

from .composing import puts_of
from .write_settings import WriteSettings, store_of

__all__ = ["FOUND", "OUTCOMES", "Found", "Repairer", "Skipped", "repair_of"]

Skipped: TypeAlias = Literal["present", "ended", "changed", "withdrawn", "wanted", "ahead", "soon", "same"]
OUTCOMES: Final = "kind STRING, outcome STRING, n BIGINT"

FOUND: Final = ("kind", "have_revision", "have_due_ms", "rows_of_id")
"""The columns of a difference, except `id`. In the rows of a task, the columns of the truth follow, with `id`."""

_AT_ONCE = 100
_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {"to": ("lane", "address")}
"""The fields of an envelope by column, for columns whose fields have other names."""


class Found(Struct, frozen=True):
    """A difference that a reconcile found. Revision and due time are the store's values at that time."""

    id: str
    kind: str
    revision: int | None
    due_ms: int | None


def repair_of(
    found: Found,
    stands: Snapshot | None,
    want: Put | None,
    *,
    given: Sequence[str],
    is_versioned: bool,
    horizon_ms: int,
) -> Command | Skipped:
    """Return the command that repairs a difference, or the reason why it is skipped.

    Args:
        found: The difference that the reconcile found.
        stands: The message in the store now; None if there is none.
        want: The message that the truth has now; None if it has none.
        given: The columns of the truth that replace fields of the stored message. Its other fields stay.
        is_versioned: True if the truth has versions.
        horizon_ms: A message is not changed if its due time, in the store or in the truth, is this time (epoch ms) or
            earlier.
    """
    if found.kind == "missing":
        return _missing(stands, want)
    if stands is None:
        return "ended"
    if found.kind == "orphan":
        return _orphan(found, stands.record, want, horizon_ms)
    if want is None:
        return "withdrawn"
    return _drift(found, stands.record, want, given, is_versioned=is_versioned, horizon_ms=horizon_ms)


def _missing(stands: Snapshot | None, want: Put | None) -> Put | Skipped:
    if stands is not None:
        return "present"
    return "withdrawn" if want is None else want


def _orphan(found: Found, record: Record, want: Put | None, horizon_ms: int) -> Cancel | Skipped:
    if want is not None:
        return "wanted"
    if not _is_as_found(found, record):
        return "changed"
    return "soon" if record.due_ms <= horizon_ms else Cancel(NO_OP, found.id)


def _drift(
    found: Found, record: Record, want: Put, given: Sequence[str], *, is_versioned: bool, horizon_ms: int
) -> Command | Skipped:
    assert isinstance(want.due, At)
    envelope, version = record.envelope, record.envelope.version
    fields = [field for column in given for field in _FIELDS.get(column, (column,))]
    mended = structs.replace(envelope, **{field: getattr(want.envelope, field) for field in fields})
    if mended == envelope and record.due_ms == want.due.ms:
        return "same"
    if not _is_as_found(found, record) or envelope.rule is not None:
        return "changed"
    wanted = want.envelope.version if is_versioned else None
    if wanted is not None and version is not None and version > wanted:
        return "ahead"
    if min(record.due_ms, want.due.ms) <= horizon_ms:
        return "soon"
    if mended == envelope and (wanted is None or wanted == version):
        return Reschedule(NO_OP, found.id, want.due)
    higher = max(wanted or 0, 0 if version is None else version + 1)
    late = Late(record.late, max(record.expires_ms - record.due_ms, 0)) if record.late else Late.deliver()
    return Put(NO_OP, structs.replace(mended, version=higher), want.due, Conflict.newer(higher), late)


def _is_as_found(found: Found, record: Record) -> bool:
    return (record.revision, record.due_ms) == (found.revision, found.due_ms)


@dataclass(frozen=True)
class Repairer:
    """The function that executors run on a partition of differences.

    Attributes:
        settings: The store, and how rows of the truth become messages.
        given: The columns of the truth that replace fields of a stored message. Its other fields stay.
        horizon_ms: A message is not changed if its due time, in the store or in the truth, is this time (epoch ms) or
            earlier.
    """

    settings: WriteSettings
    given: tuple[str, ...]
    horizon_ms: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Repair the differences of a partition. Its columns are `FOUND`, then the columns of the settings.

        Yields:
            The number of differences by kind and outcome (`OUTCOMES`).

        Raises:
            InputError: The truth has an id twice, or one of its rows cannot be a message.
            StoreUnavailableError: The store does not answer. A repeated call is safe.
        """
        counts = asyncio.run(self._run(batches))
        rows = [(kind, outcome, n) for (kind, outcome), n in counts.items()]
        columns = zip(*rows, strict=True) if rows else ((), (), ())
        types = (pa.string(), pa.string(), pa.int64())
        arrays = [pa.array(column, type_) for column, type_ in zip(columns, types, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, names=["kind", "outcome", "n"])

    async def _run(self, batches: Iterator[pa.RecordBatch]) -> Counter[tuple[str, str]]:
        counts: Counter[tuple[str, str]] = Counter()
        async with store_of(self.settings) as store:
            for batch in batches:
                for at in range(0, batch.num_rows, _AT_ONCE):
                    counts.update(await self._mend(store, batch.slice(at, _AT_ONCE)))
        return counts

    async def _mend(self, store: Store, batch: pa.RecordBatch) -> list[tuple[str, str]]:
        """Read some messages, decide, and write immediately, so that few messages change in between."""
        found, wants = self._read(batch, store.now_ms())
        stands = await asyncio.gather(*(store.get(each.id) for each in found))
        decided = [
            repair_of(
                each,
                now,
                wants.get(each.id),
                given=self.given,
                is_versioned=self.settings.conflict == "newer",
                horizon_ms=self.horizon_ms,
            )
            for each, now in zip(found, stands, strict=True)
        ]
        commands = {each.id: each for each in decided if not isinstance(each, str)}
        answers = await _carried_out(store, list(commands.values()))
        for each in found:
            if each.kind == "drift" and answers.get(each.id) == "stored":
                # Race: the message ended between read and write, and the put brought it back. End it before it is due.
                await _carried_out(store, [Cancel(NO_OP, each.id)])
                answers[each.id] = "ended"
        return [
            (each.kind, what if isinstance(what, str) else answers[each.id])
            for each, what in zip(found, decided, strict=True)
        ]

    def _read(self, batch: pa.RecordBatch, now_ms: int) -> tuple[list[Found], Mapping[str, Put]]:
        columns = {name: batch.column(name).to_pylist() for name in (*FOUND, "id")}
        for message_id, rows in zip(columns["id"], columns["rows_of_id"], strict=True):
            if rows > 1:
                raise InputError("id of truth", f"{shortened(message_id)} in {rows} rows", "one row for each id")
        rows = zip(columns["id"], columns["kind"], columns["have_revision"], columns["have_due_ms"], strict=True)
        truth = batch.filter(pc.greater(batch.column("rows_of_id"), 0)).select(list(self.settings.columns))
        return [Found(*row) for row in rows], {put.id: put for put in puts_of(truth, self.settings, now_ms)}


async def _carried_out(store: Store, commands: Sequence[Command]) -> dict[str, str]:
    """Carry out commands and return their outcomes by id.

    Raises:
        StoreUnavailableError: Some commands may not have been carried out.
    """
    assert isinstance(store, BulkLoad)
    puts = [each for each in commands if isinstance(each, Put)]
    others = [each for each in commands if not isinstance(each, Put)]
    outcomes = [*await store.bulk_load(puts), *await store.apply(others)]
    return {each.id: _word(store, each, outcome) for each, outcome in zip([*puts, *others], outcomes, strict=True)}


def _word(store: Store, command: Command, outcome: Outcome) -> str:
    if isinstance(outcome, Stored):
        return outcome.answer
    if isinstance(outcome, Refused) and outcome.reason in ("outdated", "not_found"):
        return "ended"
    if isinstance(outcome, Refused) and outcome.reason == "too_late":
        return "soon"
    detail = outcome.detail if not isinstance(outcome, Refused) else outcome.detail or outcome.reason
    raise StoreUnavailableError(store.name, detail, command.id)

"""The tasks of a migration: `Copier` writes copies, `Taker` removes originals, `Withdrawer` cancels copies.

A migration copies messages from its *first* store to its *second* store. A copy has a *mark* in its trace context: the
store from which it came, and the revision and the due time of the original. By this mark a task recognises the copy of
exactly this version. Copies of other migrations and copies of earlier versions have another mark. Messages of
applications have no mark.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Literal, NamedTuple, TypeAlias

import pyarrow as pa
from msgspec import structs

from aiodelay.backends.registry import open_store
from aiodelay.core.ids import new_op
from aiodelay.core.table_scan import Scan
from aiodelay.core.values import MAX_CLAIM_MESSAGES, Cancel, Command, Conflict, Outcome, Put, Refused, Stored, Unknown
from aiodelay.errors import InputError, StoreUnavailableError, UnsupportedByStoreError
from aiodelay.ports import Scannable, Store
from aiodelay.scheduler import MOST_PAYLOAD

from .composing import parts_of, puts_of
from .loading import Patience, opened, unanswered
from .options import store_url
from .pacing import Pacer, rows_at_once
from .write_settings import WriteSettings

__all__ = ["COPIED", "MOVED", "OUTCOMES", "TAKEN_BACK", "WHAT", "Copier", "Place", "Taken", "Taker", "Withdrawer"]

log: logging.Logger = logging.getLogger("aiodelay.spark")

Taken: TypeAlias = Literal["removed", "gone", "changed", "left"]
"""The outcome of a removal.

`removed`: the message was removed. `gone`: the store does not have the message. `changed`: the message was replaced or
rescheduled since it was copied. `left`: the message stays because it is due too soon.
"""

MOVED: Final = "aiodelay-moved"
"""The key of the mark in the trace context of a copy. Its value: `<origin>/<revision>/<due ms>` of the original."""
WHAT: Final = ("id", "revision", "due_ms")
"""The columns that identify a message and the version that was copied."""
COPIED: Final = "copied BIGINT, present BIGINT, late BIGINT, refused BIGINT"
OUTCOMES: Final = "id STRING, revision BIGINT, due_ms BIGINT, outcome STRING"
TAKEN_BACK: Final = "taken_back BIGINT"

_ASKED_AT_ONCE = 5_000
_LOOKS = 10


class Place(NamedTuple):
    """A store and a namespace of a migration. `url` may be `env:NAME` or `file:PATH`; each process then looks it up."""

    url: str
    namespace: str

    def store(self) -> Store:
        """Return the store, not connected.

        Raises:
            ConfigurationError: The URL cannot be used.
        """
        return open_store(store_url(self.url), namespace=self.namespace, clock=None)

    def scannable(self) -> Scannable:
        """Return the store for reading whole tables.

        Raises:
            UnsupportedByStoreError: The store cannot be read in parts, or is not durable.
        """
        store = self.store()
        if not isinstance(store, Scannable) or not store.traits.durable:
            raise UnsupportedByStoreError("store of a migration", store.name, "redis:, sqlite: or kafka:")
        return store

    @property
    def origin(self) -> str:
        """A short hash of this store and namespace. The marks of copies from this store begin with the hash."""
        return blake2b(f"{self.store().name} {self.namespace}".encode(), digest_size=6).hexdigest()

    def __repr__(self) -> str:  # tracebacks that show variables must not show a password
        return f"Place({self.namespace!r})"


class _Named(NamedTuple):
    id: str
    revision: int
    due_ms: int

    @property
    def only(self) -> tuple[int, int]:
        return self.revision, self.due_ms

    def mark(self, origin: str) -> str:
        return f"{origin}/{self.revision}/{self.due_ms}"


class _Row(NamedTuple):
    put: Put
    named: _Named
    version: int | None


def _named(batch: pa.RecordBatch) -> list[_Named]:
    return [_Named(*row) for row in zip(*(batch.column(name).to_pylist() for name in WHAT), strict=True)]


@dataclass(frozen=True)
class Copier:
    """Writes copies into the second store. If that store already has an id, its message stays as it is.

    Attributes:
        to: The second store.
        origin: The hash of the first store, `Place.origin`.
        columns: The columns of the rows: the columns of the table `messages`, and `due_ms`.
        number: The number of the pass, from 1. If a task repeats within a pass, the store recognises its commands.
        margin_ms: Messages that are due within this time are not copied.
        task_rate: Rows a second of one task; 0 = no limit.
        patience_ms: How long a call is repeated while the store does not answer.
    """

    to: Place
    origin: str
    columns: tuple[str, ...]
    number: int
    margin_ms: int
    task_rate: float
    patience_ms: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the rows; yield the numbers of copied, present, late and refused rows (`COPIED`)."""
        yield asyncio.run(self._run(batches))

    async def _run(self, batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch:
        counts = {"copied": 0, "present": 0, "late": 0, "refused": 0}
        pacer = Pacer(self.task_rate)
        async with opened(self.to.store, self.patience_ms) as store:
            conflict = Conflict.error() if "error" in store.traits.conflicts else Conflict.keep()
            for batch in batches:
                for part in parts_of(batch, rows_at_once(self.task_rate, MAX_CLAIM_MESSAGES, store.traits)):
                    await pacer.take(part.num_rows)
                    accepted = self._accepted(part, store.now_ms())
                    puts = self._puts(accepted, store.now_ms(), conflict)
                    outcomes = await _carried_out(store, puts, self.patience_ms)
                    copied = sum(isinstance(each, Stored) for each in outcomes)
                    counts["copied"] += copied
                    counts["present"] += len(puts) - copied
                    counts["late"] += len(accepted) - len(puts)
                    counts["refused"] += part.num_rows - len(accepted)
        return pa.RecordBatch.from_pydict({name: [n] for name, n in counts.items()})

    def _accepted(self, part: pa.RecordBatch, now_ms: int) -> list[_Row]:
        """Return a put for each row that `schedule()` would accept. The other messages stay in the first store."""
        try:
            puts = puts_of(part, self._settings(), now_ms)
        except InputError as error:
            if part.num_rows == 1:
                log.warning("a message is not moved: %s", error)
                return []
            rows = (part.slice(number, 1) for number in range(part.num_rows))
            return [found for row in rows for found in self._accepted(row, now_ms)]
        return list(map(_Row, puts, _named(part), part.column("version").to_pylist()))

    def _puts(self, rows: Sequence[_Row], now_ms: int, conflict: Conflict) -> list[Put]:
        return [self._put(*row, conflict) for row in rows if row.named.due_ms - self.margin_ms > now_ms]

    def _put(self, put: Put, named: _Named, version: int | None, conflict: Conflict) -> Put:
        mark = named.mark(self.origin)
        envelope = structs.replace(put.envelope, version=version, trace={**put.envelope.trace, MOVED: mark})
        op = blake2b(f"{self.number}/{mark}/{named.id}".encode(), digest_size=8).digest()
        return structs.replace(put, op=op, envelope=envelope, conflict=conflict)

    def _settings(self) -> WriteSettings:
        return WriteSettings(
            store=self.to.url,
            namespace=self.to.namespace,
            to=None,
            conflict="insert",
            rate=0,
            concurrency=None,
            batch_rows=MAX_CLAIM_MESSAGES,
            max_payload=MOST_PAYLOAD,
            timezone=None,
            patience_ms=self.patience_ms,
            columns=self.columns,
        )


@dataclass(frozen=True)
class Taker:
    """Removes messages from the first store, each only if it still has the copied revision and due time.

    Attributes:
        place: The first store.
        margin_ms: Messages that are due within this time stay.
        task_rate: Rows a second of one task; 0 = no limit.
        patience_ms: How long a call is repeated while the store does not answer.
    """

    place: Place
    margin_ms: int
    task_rate: float
    patience_ms: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Remove the messages that the rows name (`WHAT`); yield them with their outcomes (`OUTCOMES`)."""
        for batch in batches:
            yield asyncio.run(self._run(_named(batch)))

    async def _run(self, rows: Sequence[_Named]) -> pa.RecordBatch:
        outcomes: list[Taken] = []
        pacer = Pacer(self.task_rate)
        async with opened(self.place.store, self.patience_ms) as store:
            is_asked = store.traits.cancel == "recorded"
            most = _ASKED_AT_ONCE if is_asked else rows_at_once(self.task_rate, MAX_CLAIM_MESSAGES, store.traits)
            for at in range(0, len(rows), most):
                part = rows[at : at + most]
                await pacer.take(len(part))
                outcomes += await self._take(store, part)
        columns = [*zip(*rows, strict=True), outcomes]
        types = (pa.string(), pa.int64(), pa.int64(), pa.string())
        arrays = [pa.array(column, type_) for column, type_ in zip(columns, types, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, names=[*WHAT, "outcome"])

    async def _take(self, store: Store, rows: Sequence[_Named]) -> list[Taken]:
        now_ms = store.now_ms()
        cancels = {
            number: Cancel(new_op(), each.id, each.only)
            for number, each in enumerate(rows)
            if each.due_ms - self.margin_ms > now_ms
        }
        answers = await _carried_out(store, list(cancels.values()), self.patience_ms)
        words = {number: _word(answer) for number, answer in zip(cancels, answers, strict=True)}
        return [words.get(number, "left") for number in range(len(rows))]


@dataclass(frozen=True)
class Withdrawer:
    """Cancels copies in the second store. A message there without the mark of a copy stays.

    Attributes:
        place: The second store.
        origin: The hash of the first store, `Place.origin`.
        patience_ms: How long a call is repeated while the store does not answer.
    """

    place: Place
    origin: str
    patience_ms: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Cancel the second store's copies of the messages in the rows. Yield the number of cancelled copies.

        The rows have the columns `WHAT`, and the yielded rows the column `TAKEN_BACK`.
        """
        for batch in batches:
            taken = self._withdraw({each.id: each for each in _named(batch)})
            yield pa.RecordBatch.from_pydict({"taken_back": [taken]})

    def _withdraw(self, rows: Mapping[str, _Named]) -> int:
        """Find and cancel copies until none is left: on Kafka, an owner may still be writing a requested copy."""
        taken = set[str]()
        for _ in range(_LOOKS):
            found = self._copies(rows)
            if not found:
                return len(taken)
            asyncio.run(self._cancel(found))
            taken |= {each.id for each in found}
        raise StoreUnavailableError(self.place.store().name, f"{len(found)} copies were cancelled, but are still there")

    def _copies(self, rows: Mapping[str, _Named]) -> list[_Named]:
        """Return the copies in the second store, with the revision and the due time that they have there."""
        store = self.place.scannable()
        scan = Scan(table="messages", columns=(*WHAT, "trace"), ids=tuple(rows))
        return [
            _Named(message_id, revision, due_ms)
            for part in store.scan_parts(scan)
            for columns in store.scan_part(scan, part)
            for message_id, revision, due_ms, trace in zip(*(columns[name] for name in scan.columns), strict=True)
            if trace.get(MOVED) == rows[message_id].mark(self.origin)
        ]

    async def _cancel(self, copies: Sequence[_Named]) -> None:
        async with opened(self.place.store, self.patience_ms) as store:
            for at in range(0, len(copies), MAX_CLAIM_MESSAGES):
                cancels = [Cancel(new_op(), each.id, each.only) for each in copies[at : at + MAX_CLAIM_MESSAGES]]
                await _carried_out(store, cancels, self.patience_ms)


async def _carried_out(store: Store, commands: Sequence[Command], patience_ms: int) -> list[Outcome]:
    """Carry out commands and return their outcomes. Repeat unanswered commands, with the same ops.

    Raises:
        StoreUnavailableError: The store did not answer for `patience_ms`. Some commands may have been carried out.
        StoreFullError: The store was full for `patience_ms`.
    """
    patience = Patience(patience_ms)
    found: dict[int, Outcome] = {}
    left = list(range(len(commands)))
    while left:
        outcomes = await store.apply([commands[number] for number in left])
        found |= dict(zip(left, outcomes, strict=True))
        left = [number for number in left if _is_unanswered(found[number])]
        if left:
            why = found[left[0]]
            assert isinstance(why, Refused | Unknown)
            await patience.pause(unanswered(store, why, f"{len(left)} messages wait"))
    return [found[number] for number in range(len(commands))]


def _is_unanswered(outcome: Outcome) -> bool:
    return isinstance(outcome, Unknown) or (isinstance(outcome, Refused) and outcome.reason in ("unavailable", "full"))


def _word(answer: Outcome) -> Taken:
    if isinstance(answer, Stored):
        return "removed"
    return "gone" if isinstance(answer, Refused) and answer.reason == "not_found" else "changed"

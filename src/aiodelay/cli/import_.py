"""`aiodelay import`: stores messages from a file of `aiodelay export`, or from another system, in any store."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar, get_args

import msgspec
from anyio import to_thread
from cyclopts import App, Parameter

from aiodelay import ConfigurationError, InputError, Scheduler
from aiodelay.core.appending import with_appended
from aiodelay.core.durations import to_epoch_ms
from aiodelay.core.values import DeadReason, PutBack, SourcePosition
from aiodelay.errors import cut, kind_of, shortened
from aiodelay.importers.put_all import Imported
from aiodelay.operations.json_shapes import read_record, read_time

from .errors import FAILED, CommandError
from .export import END, FORMAT
from .output import print_json, print_refused_line
from .place import Place

__all__ = ["import_"]

import_: App = App(name="import", help="Store messages from a file of `aiodelay export`, or from another system.")

BATCH = 500
T = TypeVar("T")


@import_.default
async def from_file(
    file: Path | None = None,
    /,
    *,
    again: Annotated[bool, Parameter(negative="")] = False,
    place: Place = Place(),
) -> int:
    """Store the messages of a file that `aiodelay export` wrote.

    Messages keep their revision, due time, attempts and errors, so consumers see the same delivery id. If the store has
    a message under the same id, that message stays unchanged. The store remembers how much of a file was imported.
    The next import of the file goes on from there, so messages that have ended since do not come back.

    Args:
        file: The file to read. Default: stdin.
        again: Read the file from the beginning. Messages that have ended since the first import come back.
    """
    with _opened(file) as lines:
        async with place.opened(may_create=True) as scheduler:
            reading = _Import(scheduler, json=place.json)
            await reading.run(lines, again=again)
    return reading.report()


@import_.command
async def etf1(url: str, /, *, place: Place = Place()) -> int:
    """Store the pending schedules of a topic of etf1/kafka-message-scheduler, for the sink `kafka`.

    Stop the schedulers of the topic first. The import only reads the topic, and may be repeated: it stores no message
    again that is pending, or that has ended within 24 h. aiodelay can also use the topic itself as its store: see
    docs/migration.md.

    Args:
        url: The URL of the topic: kafka://host:9092/schedules.
    """
    from aiodelay.importers.etf1 import import_etf1  # noqa: PLC0415 - files need no Kafka client

    async with place.opened(may_create=True) as scheduler:
        return _report(await import_etf1(url, scheduler.store), place)


@import_.command
async def fred84(url: str, /, *, prefix: str = "de_", place: Place = Place()) -> int:
    """Store the events that fred84/delayedQueue keeps in Redis, each for the handler of its type.

    Stop the dispatchers of delayedQueue first. The import removes nothing from the data of delayedQueue, and may be
    repeated: it stores no message again that is pending, or that has ended within 24 h.

    Args:
        url: The URL of the Redis server of delayedQueue.
        prefix: The dataSetPrefix of delayedQueue.
    """
    from aiodelay.importers.fred84 import import_fred84  # noqa: PLC0415 - files need no Redis client

    async with place.opened(may_create=True) as scheduler:
        return _report(await import_fred84(url, scheduler.store, prefix=prefix), place)


@import_.command
async def article_box(
    url: str,
    /,
    *,
    allow: Annotated[list[str], Parameter(negative="")],
    key: str = "blackbox-delay-key",
    unit: Literal["s", "ms"] = "s",
    place: Place = Place(),
) -> int:
    """Move the waiting messages of the article's delay box (docs/delay-box.md) into a store, for the sink `kafka`.

    Stop the box first. The import removes a message from Redis after it has stored the message, and may be repeated.

    Args:
        url: The URL of the Redis server of the box.
        allow: A topic to which messages may go. May be repeated.
        key: The key of the box's sorted set.
        unit: The unit of the scores in the sorted set: seconds or milliseconds.
    """
    from aiodelay.importers.black_box import take_over_black_box  # noqa: PLC0415 - files need no Redis client

    async with place.opened(may_create=True) as scheduler:
        return _report(await take_over_black_box(url, scheduler.store, allow=allow, key=key, unit=unit), place)


def _report(imported: Imported, place: Place) -> int:
    """Print the counts of an import; return the exit code. Skipped messages are a failure: users must check them."""
    if place.json:
        print_json(msgspec.structs.asdict(imported))
    else:
        print(f"{imported.stored} stored, {imported.known} known, {len(imported.skipped)} skipped")
        for name, why in imported.skipped.items():
            print(f"{cut(name)}: {cut(why, 300)}", file=sys.stderr)
    return FAILED if imported.skipped else 0


@contextmanager
def _opened(file: Path | None) -> Iterator[BinaryIO]:
    if file is None:
        yield sys.stdin.buffer
        return
    try:
        opened = file.open("rb")
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}") from None
    with opened:
        yield opened


class _Import:
    """Reads one file into a store in batches. The store records the position after each batch."""

    def __init__(self, scheduler: Scheduler, *, json: bool) -> None:
        self._store, self._json = scheduler.store, json
        self._counts = dict.fromkeys(("stored", "known", "skipped", "refused"), 0)
        self._is_whole = self._is_cut = False

    async def run(self, lines: Iterable[bytes], *, again: bool) -> None:
        """Read the file to its end.

        Raises:
            InputError: `aiodelay export` has not written this file.
            StoreUnavailableError: The store does not answer. A repeated import goes on at the recorded position.
        """
        numbered = enumerate(lines, 1)
        _, first = await _next_of(numbered) or (1, b"")
        source = _source_of(first)
        keeps_position = self._store.traits.positions != "none" and not again
        position = await self._store.position(source) if keeps_position else None
        batches = _batches(numbered)
        while (batch := await _next_of(batches)) is not None:
            fresh = [each for each in batch if each[0] > (position or 0)]
            self._skip(batch[: len(batch) - len(fresh)])
            await self._store_lines(fresh)
            if fresh and keeps_position:
                end = fresh[-1][0] - self._is_cut
                await self._move(SourcePosition(source, position or 0, end, is_stored=position is not None))
                position = end

    def _skip(self, lines: Sequence[tuple[int, bytes]]) -> None:
        is_end = bool(lines) and lines[-1][1].startswith(END)
        self._is_whole = self._is_whole or is_end
        self._counts["skipped"] += len(lines) - is_end

    async def _move(self, position: SourcePosition) -> None:
        await self._store.apply([], source=position)
        if await self._store.position(position.source) != position.position:
            raise CommandError("another import of this file runs at the same time; run only one")

    async def _store_lines(self, lines: Sequence[tuple[int, bytes]]) -> None:
        messages: list[PutBack] = []
        for number, text in lines:
            try:
                found = _read(text)
                if isinstance(found, PutBack):
                    messages.append(found)
                elif isinstance(found, tuple):
                    self._note(is_new=await self._store.pause(*found))
                else:
                    self._is_whole = True
            except (InputError, ConfigurationError) as error:
                self._is_cut = not text.endswith(b"\n")  # the next import reads the whole line
                self._counts["refused"] += 1
                print_refused_line(number, error, json=self._json)
        for answer in await self._store.put_back(messages) if messages else ():
            self._note(is_new=answer.answer == "stored")

    def _note(self, *, is_new: bool) -> None:
        self._counts["stored" if is_new else "known"] += 1

    def report(self) -> int:
        """Print the counts of the import; return the exit code."""
        if self._json:
            print_json(self._counts | {"is_whole": self._is_whole})
        else:
            print(", ".join(f"{n} {word}" for word, n in self._counts.items()))
        if not self._is_whole:
            print("the file has no end line: the export that wrote it was interrupted", file=sys.stderr)
        return FAILED if self._counts["refused"] or not self._is_whole else 0


async def _next_of(items: Iterator[T]) -> T | None:
    """Return the next item, or None at the end. It waits in a thread, so Ctrl-C ends the wait for a slow writer."""
    return await to_thread.run_sync(next, items, None, abandon_on_cancel=True)


def _source_of(text: bytes) -> str:
    """Return the source name under which a store records the position in a file."""
    given = _fields(text)
    if given.get("kind") != "export":
        kind = shortened(given.get("kind"))
        raise InputError("kind in line 1", kind, "'export', as in the first line of a file from `aiodelay export`")
    if not isinstance(given.get("export"), str):
        raise InputError("export in line 1", kind_of(given.get("export")), "a text")
    if given.get("format") != FORMAT:
        raise InputError("format", shortened(given.get("format")), f"{FORMAT}")
    return f"import:{cut(given['export'])}"


def _batches(lines: Iterator[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    while batch := list(islice(lines, BATCH)):
        yield [each for each in batch if each[1].strip()]


def _fields(text: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise InputError("line", "not a JSON object", "a line that `aiodelay export` wrote") from None


def _read(text: bytes) -> PutBack | tuple[str, str | None] | None:
    """Return the content of a line: a message, the lane and address of a pause, or None for the end line.

    Raises:
        InputError: The line cannot be read.
    """
    given = _fields(text)
    match given.get("kind"):
        case "end":
            return None
        case "hold":
            lane, address = given.get("lane"), given.get("address")
            if not isinstance(lane, str) or not isinstance(address, str | None):
                raise InputError(
                    "lane, address", shortened((lane, address)), "text for lane, and text or null for address"
                )
            return lane, address
        case "message":
            next_attempt = read_time(given.get("next_attempt"), "next_attempt")
            record = with_appended(read_record(given), 0)
            due_ms = record.due_ms if next_attempt is None else to_epoch_ms(next_attempt, field="next_attempt")
            return PutBack(record, max(due_ms, record.due_ms))
        case "dead_letter":
            if given.get("reason") not in get_args(DeadReason):
                raise InputError("reason", shortened(given.get("reason")), ", ".join(get_args(DeadReason)))
            record = read_record(given)
            return PutBack(record, record.due_ms, given["reason"])
    raise InputError("kind", shortened(given.get("kind")), "'hold', 'message', 'dead_letter' or 'end'")

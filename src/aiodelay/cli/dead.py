"""`aiodelay dead`: lists, shows, redrives and purges dead letters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from cyclopts import App, Parameter
from cyclopts.validators import Number

from aiodelay import DeadLetter, Scheduler
from aiodelay.core.durations import to_epoch_ms
from aiodelay.core.validation import to_of
from aiodelay.core.values import DeadReason, Stored
from aiodelay.errors import cut
from aiodelay.operations.json_shapes import dead_letter_shape, read_time
from aiodelay.operations.queries import NO_CLASS, error_class

from .errors import FAILED, NOT_FOUND, NOT_UNDERSTOOD, TOO_LATE, CommandError
from .output import confirm, moment, print_json, print_table
from .place import Place

__all__ = ["dead"]

dead: App = App(name="dead", help="List, show, redrive or purge dead letters.")

BATCH = 500
T = TypeVar("T")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class Which:
    """A filter of dead letters.

    Attributes:
        of: Only this event type or sink.
        reason: Only letters given up for this reason.
        before: Only letters given up before this time: 2026-12-01T09:00:00Z.
        error: Only letters whose last error has this class, such as KeyError; none = errors that name no class.
    """

    of: str | None = None
    reason: DeadReason | None = None
    before: str | None = None
    error: str | None = None

    async def letters(self, scheduler: Scheduler, message_id: str | None = None) -> AsyncIterator[DeadLetter]:
        """Yield the dead letters that match, oldest first. If an id is given, yield only letters of this message."""
        before = read_time(self.before, "before")
        before_ms = None if before is None else to_epoch_ms(before, field="before")
        async for letter in scheduler.dead_letters(self.of, message_id=message_id):
            if before_ms is not None and letter.at_ms >= before_ms:
                return
            error = error_class(letter.record.last_error) or NO_CLASS
            if self.reason in (None, letter.reason) and self.error in (None, error):
                yield letter


@dead.command(name="list")
async def list_(
    *,
    which: Which = Which(),
    limit: Annotated[int, Parameter(validator=Number(gte=1, lte=1_000_000))] = 100,
    place: Place = Place(),
) -> None:
    """List dead letters, oldest first.

    Args:
        limit: The most letters to list.
    """
    found: list[DeadLetter] = []
    async with place.opened() as scheduler:
        async for letter in which.letters(scheduler):
            found.append(letter)
            if len(found) == limit:
                break
    if place.json:
        print_json(*map(dead_letter_shape, found))
    else:
        print_table(("given up", "reason", "to", "id", "attempt", "last error"), map(_row, found))


@dead.command
async def show(id_: str, /, *, place: Place = Place()) -> None:
    """Show the dead letters of a message: the reason, the errors, and the traceback of the last attempt.

    Args:
        id_: The id of the message; or ID~DUE for an occurrence of a series, as `list` shows it.
    """
    async with place.opened() as scheduler:
        letters = [letter async for letter in scheduler.dead_letters(message_id=id_)]
    if not letters:
        raise CommandError(f"no such dead letter: {cut(id_)}", exit_code=NOT_FOUND)
    if place.json:
        print_json(*map(dead_letter_shape, letters))
    else:
        for letter in letters:
            _print_letter(letter)


@dead.command
async def redrive(
    *ids: str,
    which: Which = Which(),
    all_: Annotated[bool, Parameter(name="--all", negative="")] = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="")] = False,
    place: Place = Place(),
) -> int:
    """Schedule dead letters again: due now, with attempts from 1 and a new delivery id.

    A letter stays a dead letter if a pending message has its id, or if its record cannot be read.

    Args:
        ids: The ids of messages. Without ids, the options choose the letters.
        all_: Choose every dead letter.
        yes: Do not ask for confirmation.
    """
    _check_chosen(ids, which, all_=all_)
    async with place.opened() as scheduler:
        letters = await _chosen(scheduler, ids, which)
        await confirm(f"redrive {len(letters)} dead letters", yes=yes)
        outcomes = [outcome for some in await _in_batches(letters, scheduler.redrive) for outcome in some]
    answers = ["redriven" if isinstance(each, Stored) else getattr(each, "reason", "unknown") for each in outcomes]
    details = ["" if isinstance(each, Stored) or not each.detail else f": {each.detail}" for each in outcomes]
    redriven = answers.count("redriven")
    if place.json:
        print_json(*({"id": each.record.id, "outcome": answer} for each, answer in zip(letters, answers, strict=True)))
    else:
        print(f"{redriven} redriven, {len(letters) - redriven} not")
        for letter, answer, detail in zip(letters, answers, details, strict=True):
            if answer != "redriven":
                print(f"{cut(letter.record.id)}: {answer.replace('_', ' ')}{cut(detail, 300)}")
    return 0 if redriven == len(letters) else TOO_LATE if "exists" in answers else FAILED


@dead.command
async def purge(
    *ids: str,
    which: Which = Which(),
    all_: Annotated[bool, Parameter(name="--all", negative="")] = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="")] = False,
    place: Place = Place(),
) -> int:
    """Delete dead letters for good.

    Args:
        ids: The ids of messages. Without ids, the options choose the letters.
        all_: Choose every dead letter.
        yes: Do not ask for confirmation.
    """
    _check_chosen(ids, which, all_=all_)
    async with place.opened() as scheduler:
        letters = await _chosen(scheduler, ids, which)
        await confirm(f"delete {len(letters)} dead letters for good", yes=yes)
        purged = sum(await _in_batches(letters, scheduler.purge))
    if place.json:
        print_json({"purged": purged})
    else:
        print(f"{purged} deleted")
    return 0


def _check_chosen(ids: Sequence[str], which: Which, *, all_: bool) -> None:
    if not ids and which == Which() and not all_:
        text = "no dead letters are chosen; give ids, or --of, --reason, --before, --error, or --all"
        raise CommandError(text, exit_code=NOT_UNDERSTOOD)


async def _chosen(scheduler: Scheduler, ids: Sequence[str], which: Which) -> list[DeadLetter]:
    wanted = dict.fromkeys(ids) or [None]
    letters = [letter for each in wanted async for letter in which.letters(scheduler, each)]
    missing = set(ids) - {letter.record.id for letter in letters}
    if missing:
        raise CommandError(f"no such dead letter: {', '.join(map(cut, sorted(missing)))}", exit_code=NOT_FOUND)
    return letters


async def _in_batches(letters: Sequence[DeadLetter], change: Callable[..., Awaitable[T]]) -> list[T]:
    return [await change(*letters[start : start + BATCH]) for start in range(0, len(letters), BATCH)]


def _print_letter(letter: DeadLetter) -> None:
    record = letter.record
    reason = letter.reason.replace("_", " ")
    print(f"{cut(record.id)} to {cut(to_of(record.envelope))}, due {moment(record.due_ms)}")
    print(f"given up {moment(letter.at_ms)} after {record.attempt} attempts: {reason}")
    first = record.first_error
    if first is not None and first not in letter.errors:
        print(f"  first error: {cut(first, 1_000)}")
    for error in letter.errors:
        print(f"  error: {cut(error, 1_000)}")
    for line in (letter.traceback or "").splitlines():
        print(f"  {cut(line, 1_000)}")


def _row(letter: DeadLetter) -> tuple[object, ...]:
    record = letter.record
    to = to_of(record.envelope)
    return moment(letter.at_ms), letter.reason, to, record.id, record.attempt, record.last_error or ""

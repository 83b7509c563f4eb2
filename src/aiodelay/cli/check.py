"""`aiodelay check`: checks a store and its server, and prints a remedy for each problem."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

from aiodelay import AiodelayError, ConfigurationError, Scheduler, StoreTooNewError, UnsupportedByStoreError
from aiodelay.backends.remedies import MEND
from aiodelay.core import features
from aiodelay.core.durations import format_duration
from aiodelay.core.values import Lane, LaneCounts
from aiodelay.errors import cut, masked_url
from aiodelay.operations.queries import oldest_overdue_ms
from aiodelay.ports import Bounded, Identified, Restricted, Store, Upgradable

from .errors import FAILED, UNAVAILABLE, exit_code_of
from .output import print_json
from .place import Place
from .run import find_scheduler

__all__ = ["check"]

Level: TypeAlias = Literal["ok", "note", "warning", "problem"]

EXAMINED = 1_000
LATE_MS = 60_000
NEARLY_FULL = 0.8
MOST_TEXT = 2_000


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        level: `ok`, `note`, `warning` or `problem`.
        about: The store, the lane, the destination or the sink that was checked.
        text: The result in words.
        mend: The remedy: a command, or a change to make; empty if nothing is wrong. Its key in JSON output is
            `mend` too.
    """

    level: Level
    about: str
    text: str
    mend: str = ""


async def check(url: str | None = None, /, *, app: str | None = None, place: Place = Place()) -> int:
    """Check a store and its server, and print a remedy for each problem.

    The exit code is 1 if there is a problem, and 5 if the store does not answer. With warnings alone it is 0.

    Args:
        url: The URL of the store. Default: --store, or the store of --app.
        app: A scheduler, as MODULE:OBJECT. The check then also finds pending messages that the code of this scheduler
            cannot read, and tells for each sink of the scheduler whether a message arrives exactly once, or at least
            once.
    """
    program = None if app is None else find_scheduler(app)
    if url is not None:
        place = replace(place, store=url)
    if program is None or place.store:
        store: str | Store = place.url
        name = masked_url(place.url)
    else:
        store, name = program.store, program.store.name
        place = replace(place, namespace=program.namespace)
    findings, code = [], 0
    with _logged() as logged:
        try:
            async with place.opened(store=store) as scheduler:
                missing = await _missing_rights(scheduler)
                findings += missing or [Finding("ok", name, "it answers, and messages can be stored there")]
                if not missing:
                    async for finding in _inspected(scheduler, program):  # one by one: an error must not hide the first
                        findings.append(finding)
        except AiodelayError as error:
            findings.append(_of_error(name, error))
            code = exit_code_of(error)
    findings[1:1] = [_of_record(name, each) for each in logged]
    _print(findings, place)
    if any(each.level == "problem" for each in findings):
        return UNAVAILABLE if code == UNAVAILABLE else FAILED
    return 0


def _of_error(name: str, error: AiodelayError) -> Finding:
    if isinstance(error, StoreTooNewError):
        return Finding("problem", error.setting, f"it {error.value}", error.allowed)
    if isinstance(error, ConfigurationError):
        return Finding("problem", error.setting, f"it is {error.value}", error.allowed)
    return _of_text("problem", name, str(error), "check that the server runs, and that the URL is right")


def _of_record(name: str, record: logging.LogRecord) -> Finding:
    level: Level = "problem" if record.levelno >= logging.ERROR else "warning"
    return _of_text(level, name, record.getMessage().removeprefix(f"{name}: ").replace(f" of {name}: ", ": ", 1))


def _of_text(level: Level, name: str, text: str, otherwise: str = "") -> Finding:
    """Split a text into a finding and its remedy.

    Args:
        level: The level of the finding.
        name: The name of the store.
        text: The finding. It may end with a remedy.
        otherwise: The remedy to use if the text has none.
    """
    text, _, mend = text.partition(MEND)
    return Finding(level, name, text.rstrip(" ."), mend or otherwise)


@contextmanager
def _logged() -> Iterator[list[logging.LogRecord]]:
    """Collect the warnings and errors that the store logs during the check."""
    records: list[logging.LogRecord] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, collect = logging.getLogger("aiodelay"), Collect(logging.WARNING)
    logger.addHandler(collect)
    before, logger.propagate = logger.propagate, False
    try:
        yield records
    finally:
        logger.removeHandler(collect)
        logger.propagate = before


def _print(findings: list[Finding], place: Place) -> None:
    if place.json:
        print_json(*(each._asdict() for each in findings))
        return
    for each in findings:
        print(f"{each.level:<8} {cut(each.about, 200)}: {cut(each.text, MOST_TEXT)}")
        if each.mend:
            print(f"{'':<8} remedy: {cut(each.mend, MOST_TEXT)}")


# --- the content of the store -----------------------------------------------------------------------------


async def _missing_rights(scheduler: Scheduler) -> list[Finding]:
    store = scheduler.opened_store()
    rights = await store.missing_rights() if isinstance(store, Restricted) else ()
    return [_of_text("problem", store.name, each) for each in rights]


async def _inspected(scheduler: Scheduler, program: Scheduler | None) -> AsyncIterator[Finding]:
    store = scheduler.store
    if not store.traits.durable:
        text = "its messages are lost when the process ends"
        yield Finding("warning", store.name, text, "use a durable store, such as sqlite:")
    if isinstance(store, Identified) and (gone := await store.vanished() or await store.vanished_elsewhere()):
        yield Finding("problem", store.name, gone, "restore a backup, then restart every process of this store")
    if isinstance(store, Bounded) and (fill := await store.fill()) is not None:
        level: Level = "ok" if fill < NEARLY_FULL else "warning"
        yield Finding(
            level, store.name, f"{fill:.0%} of its memory is used", "" if level == "ok" else "raise maxmemory"
        )
    try:
        counts = await scheduler.counts()
    except UnsupportedByStoreError as error:
        mend = "stop the service and give --own; or use the page or the API of the service"
        yield Finding("note", store.name, f"pending messages cannot be inspected: {error.value}", mend)
        return
    async for finding in _of_features(store):
        yield finding
    async for finding in _of_pending(scheduler, counts, program):
        yield finding
    for each in await scheduler.blocked():
        to = f"{each.lane}:{each.address}"
        yield Finding("warning", to, f"it takes nothing: {each.reason}; {each.messages} messages wait", f"repair {to}")
    for held in await scheduler.paused():
        yield Finding("note", held, "it is paused", f"aiodelay resume {held}")
    try:
        await scheduler.journal(limit=1)
    except UnsupportedByStoreError as error:
        text = "the store keeps no journal, so `aiodelay why` cannot explain messages that have ended"
        yield Finding("note", store.name, text, error.allowed)
    known = scheduler if program is None else program
    for sink in sorted(known.sinks):
        reach = known.reaches(sink)
        yield Finding("ok", f"sink {sink}", f"{reach.promise.value}: {reach.reason}")


async def _of_features(store: Store) -> AsyncIterator[Finding]:
    """Compare the features in use with the features that this version knows."""
    if not isinstance(store, Upgradable):
        return
    recorded = await store.features()
    try:
        features.check_known(store.name, recorded)
    except StoreTooNewError as error:
        yield _of_error(store.name, error)
    if off := sorted(features.KNOWN - features.ON_DEMAND - recorded.keys()):
        mend = "aiodelay upgrade, once all processes run this version"
        yield Finding("note", store.name, f"features that are not switched on: {', '.join(off)}", mend)


async def _of_pending(
    scheduler: Scheduler, counts: Mapping[Lane, LaneCounts], program: Scheduler | None
) -> AsyncIterator[Finding]:
    readers = {} if program is None else program.decoders()
    for lane, each in sorted(counts.items()):
        pending = each.scheduled + each.overdue + each.in_flight + each.held
        text = f"{pending} pending, {each.overdue} of them overdue"
        if program is not None and lane not in readers and lane not in program.sinks and pending:
            yield Finding(
                "problem", lane, f"{text}; this code has neither a handler nor a sink of that name", _alias(lane)
            )
        elif each.read_by_nobody and pending:
            mend = f"start a process with a handler or sink {lane}"
            yield Finding("warning", lane, f"{text}; no live instance serves it", mend)
        elif pending:
            yield Finding("ok", lane, text)
        if lane in readers:
            async for finding in _unreadable(scheduler, lane, readers[lane]):
                yield finding
        if each.dead:
            yield Finding("note", lane, f"{each.dead} dead letters", f"aiodelay dead list --of {lane}")
    since_ms = await oldest_overdue_ms(scheduler, counts)
    age_ms = 0 if since_ms is None else scheduler.store.now_ms() - since_ms
    if age_ms > LATE_MS:
        text = f"the oldest message has been overdue for {format_duration(age_ms // 1000 * 1000)}"
        yield Finding("warning", "lateness", text, "aiodelay list --state overdue; aiodelay why ID")


def _alias(lane: Lane) -> str:
    return f'add a handler for it; or, if its class was renamed, add @event(..., aliases=("{lane}",)) to the new class'


async def _unreadable(
    scheduler: Scheduler, lane: Lane, decode: Callable[[bytes, str], object]
) -> AsyncIterator[Finding]:
    """Yield a problem if the handler of a lane cannot decode some of the lane's next messages."""
    examined, failed = 0, dict[str, str]()
    async for snapshot in scheduler.pending(lane, limit=EXAMINED):
        examined += 1
        envelope = snapshot.record.envelope
        try:
            decode(envelope.payload, envelope.encoding)
        except Exception as error:  # noqa: BLE001 - a codec may raise any error; its text may hold payload
            failed[envelope.id] = type(error).__name__
    if failed:
        first, why = next(iter(failed.items()))
        text = f"this code cannot read {len(failed)} of the next {examined} messages, such as {cut(first)} ({why})"
        mend = "change the event's type so that it accepts the stored payloads; `aiodelay get ID` shows a payload"
        yield Finding("problem", lane, text, mend)

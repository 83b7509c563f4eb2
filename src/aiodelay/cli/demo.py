"""`aiodelay demo`: schedules messages of a small shop in a real store, and prints a line for each event."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import anyio
from cyclopts import Parameter, validators

from aiodelay import Scheduler, UnsupportedByStoreError, __version__
from aiodelay.backends.registry import open_store
from aiodelay.errors import masked_url
from aiodelay.ports import Store

from .errors import NOT_UNDERSTOOD, CommandError
from .page import beside, listening_for_page
from .report import Report
from .screen import Screen
from .signals import stop_signals
from .traffic import ChargeCard, LogSink, SendReceipt, Traffic

__all__ = ["demo"]

NAMESPACE = "aiodelay-demo"
JOURNAL = 10_000
"""The number of entries of the demo's journal. The page reads lateness and the events of messages from the journal."""
SUMMARY_EVERY_S, STATUS_EVERY_S = 5.0, 1.0


def demo(
    *,
    seconds: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None,
    store: str | None = None,
    keep: Annotated[Path | None, Parameter(validator=validators.Path(dir_okay=False))] = None,
    page: bool = True,
) -> None:
    """Show messages being scheduled, delivered, retried, cancelled, replaced and given up, in a real store.

    A page on this machine also shows the messages that are coming, late or given up. The first line has its address. If
    there is a terminal and a display, a browser opens.

    The demo ends with Ctrl-C, with SIGTERM or after --seconds. Its exit code is always 0, and its last line is a
    summary. All numbers are measured: lateness is the start of a message's first attempt minus its due time.

    Args:
        seconds: Stop after this number of seconds. Without this option, the demo runs until Ctrl-C.
        store: The URL of the store, such as redis://localhost or sqlite:///delay.db. The word redis starts a server for
            the demo. Without this option, the store is a SQLite file that is deleted at the end.
        keep: Keep the SQLite file under this name. The next demo with the same file resumes the pending messages.
        page: Serve the page. --no-page turns it off.
    """
    if store is not None and keep is not None:
        raise CommandError(
            "--store and --keep both say where messages are kept; give only one of them", exit_code=NOT_UNDERSTOOD
        )
    with _place(store, keep) as place:
        opened = open_store(place.url, namespace=NAMESPACE, clock=None)
        asyncio.run(_demo(opened, place, seconds, page=page))


@dataclass(frozen=True, slots=True)
class Place:
    """The store of the demo.

    Attributes:
        url: The URL of the store.
        name: The name that the first line shows.
        kept: The name that the last lines show if messages remain; None if the store is deleted at the end.
    """

    url: str
    name: str
    kept: str | None


@contextmanager
def _place(store: str | None, keep: Path | None) -> Iterator[Place]:
    if store == "redis":
        from aiodelay.testing.servers import redis_servers, serving  # noqa: PLC0415 - only `--store redis` needs it

        found = redis_servers()[0]
        with serving(found) as url:
            yield Place(f"{url}?journal={JOURNAL}", str(found), str(found) if found.url else None)
    elif store is not None:
        shown = masked_url(store)
        yield Place(store, shown, f"{shown}, namespace {NAMESPACE}")
    elif keep is not None:
        yield Place(_sqlite_url(keep), f"sqlite, {keep}", str(keep))
    else:
        with tempfile.TemporaryDirectory(prefix="aiodelay-demo-") as folder:
            yield Place(_sqlite_url(Path(folder, "demo.db")), "sqlite, a temporary file", None)


def _sqlite_url(path: Path) -> str:
    return f"sqlite:///{quote(str(path.absolute()))}?journal={JOURNAL}"


async def _demo(store: Store, place: Place, seconds: float | None, *, page: bool) -> None:
    with stop_signals() as stop, listening_for_page(is_wanted=page) as (listener, at):
        screen = Screen(sys.stdout, stop.set, os.environ)
        ends = "Ctrl-C to stop" if seconds is None else f"stops after {seconds:g} s, or with Ctrl-C"
        screen.line(" │ ".join(filter(None, (f"aiodelay {__version__}", f"store {place.name}", at, ends))))
        _log_to(screen)
        waiting = await _pending(store)
        if waiting:
            screen.line(f"resuming {waiting} pending messages")
        report = Report(screen, datetime.now(UTC))
        scheduler = Scheduler(store, sinks=[LogSink(report)], drain="2s")
        traffic = Traffic(scheduler, report)
        async with scheduler, beside(scheduler, listener), anyio.create_task_group() as tasks:
            tasks.start_soon(traffic.run)
            tasks.start_soon(_summarize, scheduler, report, screen)
            with anyio.move_on_after(seconds):
                await stop.wait()
            tasks.cancel_scope.cancel()
        screen.end_status()
        left = await _pending(store)
        if place.kept is not None and store.traits.durable and left:
            screen.line(f"{left} pending messages remain in {place.kept}; the same command resumes them")
        screen.line(report.tally.summary(left))


async def _summarize(scheduler: Scheduler, report: Report, screen: Screen) -> None:
    while True:
        await asyncio.sleep(STATUS_EVERY_S if screen.is_terminal else SUMMARY_EVERY_S)
        screen.status(report.tally.summary(await _count(scheduler)))


async def _pending(store: Store) -> int | None:
    """Return the number of pending messages, read without dispatching."""
    async with Scheduler(store, dispatch=False) as scheduler:
        return await _count(scheduler)


async def _count(scheduler: Scheduler) -> int | None:
    """Return the number of pending messages; None if the store cannot count them."""
    try:
        lanes = (await scheduler.counts()).values()
    except UnsupportedByStoreError:
        return None
    return sum(lane.scheduled + lane.overdue + lane.in_flight + lane.held for lane in lanes)


FAILING = ((ChargeCard.__name__,), (SendReceipt.__name__,))
"""The first arguments of the log records of handlers that fail on purpose."""


class _LogLines(logging.Handler):
    """Writes warnings as lines, except warnings of handlers that fail on purpose. The report shows those attempts."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(logging.WARNING)
        self._screen = screen
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args if isinstance(record.args, tuple) else ()
        return not (record.name == "aiodelay.handlers" and args[:1] in FAILING and "aiodelay itself" not in record.msg)

    def emit(self, record: logging.LogRecord) -> None:
        self._screen.line(self.format(record))


def _log_to(screen: Screen) -> None:
    logging.getLogger().addHandler(_LogLines(screen))

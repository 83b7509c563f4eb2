"""`SqliteStage`: several processes share a SQLite file."""

from __future__ import annotations

import asyncio
import random
import resource
import sqlite3
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import ClassVar

from aiodelay import Scheduler
from aiodelay.testing import history as h
from tests.faults.scene import Scene
from tests.support.producing import Producer
from tests.support.server_clock import FileClock

from .checked import CLOCK_STEPPED, CheckedStage
from .schedule import Fault, Kind
from .stage import CLIENTS, PROCESS_KINDS, SERVICES, Acts

__all__ = ["SqliteStage"]

ROOM_BYTES = 400_000
"""The room that a full disk leaves: the processes write their histories to the same disk."""
FAR_MESSAGES, FAR_BYTES, FAR_MS = 400, 20_000, 3_600_000
"""Messages that are due after the end. They make the store's file larger than the histories.

A full disk is a limit on the size of each file (RLIMIT_FSIZE), and must spare the histories.
"""
LOCK_S = 2.0


class SqliteStage(CheckedStage):
    name = "sqlite"
    kinds: ClassVar[tuple[Kind, ...]] = (
        *PROCESS_KINDS,
        CLOCK_STEPPED,
        Kind("disk full", "file", lasts_s=(1.0, 4.0)),
        Kind("file locked", "file", lasts_s=(0.2, 6.0)),
    )
    targets: ClassVar = {"service": SERVICES, "client": CLIENTS, "clock": 1, "file": 1}

    def open(self, stack: ExitStack) -> None:
        self.scene = Scene(self.crew, self.folder)
        self.clock = FileClock(self.folder / "offset")
        self.clock_of_stores = f"{self.folder / 'offset'}"
        asyncio.run(self._fill())

    async def _fill(self) -> None:
        history = h.History(self.history_of("filler"), "filler")
        payloads = {f"far-{number}": random.randbytes(FAR_BYTES) for number in range(FAR_MESSAGES)}
        async with Scheduler(self.scene.url, dispatch=False) as scheduler:
            at_ms = time.time_ns() // 1_000_000 + FAR_MS
            await Producer(scheduler, history).schedule_many(payloads, at_ms=at_ms, lane="far")
        history.close()

    def acts(self) -> Mapping[str, Acts]:
        return {
            **self.clock_acts(),
            "disk full": (lambda fault: self._limit_files(self._full_bytes()), self._make_room),
            "file locked": (self._lock, self._unlock),
        }

    def _full_bytes(self) -> int:
        files = [*self.folder.glob("history-*.jsonl"), *self.folder.glob("delay.db-wal")]
        return max(file.stat().st_size for file in files) + ROOM_BYTES

    def _make_room(self, fault: Fault) -> None:
        self._limit_files(resource.RLIM_INFINITY)

    def _limit_files(self, size: int) -> None:
        for process in (*self.services, *self.clients):
            with suppress(ProcessLookupError):  # it was killed, and is not replaced yet
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def _lock(self, fault: Fault) -> None:
        self._locked = sqlite3.connect(self.scene.path, timeout=LOCK_S, isolation_level=None)
        with suppress(sqlite3.OperationalError):  # a stopped process holds the lock
            self._locked.execute("BEGIN IMMEDIATE")

    def _unlock(self, fault: Fault) -> None:
        self._locked.close()

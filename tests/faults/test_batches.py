"""F1: kill -9 in the middle of a batch. Only the messages of this batch run again, and no message is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from aiodelay import Message, Scheduler
from aiodelay.sqlite import SqliteStore

pytestmark = pytest.mark.asyncio

MESSAGES, BATCH = 120, 20


@dataclass
class Work:
    number: int


def serve(scheduler: Scheduler, log: Path, *, dies_in: int = 0) -> None:
    """Add a handler that writes each batch into a file. In batch number `dies_in`, it kills its process half-way."""
    runs = 0

    @scheduler.handler(batch=BATCH, concurrency=1)
    async def work(events: list[Work]) -> None:
        nonlocal runs
        runs += 1
        numbers = [str(event.number) for event in events]
        with log.open("a") as file:
            file.write("\n".join(numbers[: BATCH // 2] if runs == dies_in else numbers) + "\n")
        if runs == dies_in:
            os.kill(os.getpid(), signal.SIGKILL)


async def die(file: Path, log: Path) -> None:
    """Run until the third batch ends this process."""
    scheduler = Scheduler(SqliteStore(file))
    serve(scheduler, log, dies_in=3)
    async with scheduler:
        await scheduler.run_until_idle()


async def test_f1_a_kill_in_a_batch_repeats_only_this_batch(tmp_path: Path) -> None:
    file, log = tmp_path / "delay.db", tmp_path / "log"
    async with Scheduler(SqliteStore(file), dispatch=False) as producer:
        await producer.schedule_many(Message(Work(n), delay="0s") for n in range(MESSAGES))
    code = (
        f"import asyncio, pathlib, sys; from {__name__} import die; asyncio.run(die(*map(pathlib.Path, sys.argv[1:])))"
    )
    victim = subprocess.run([sys.executable, "-c", code, file, log], check=False)  # noqa: ASYNC221 - nothing runs beside it
    assert victim.returncode == -signal.SIGKILL
    before = list(map(int, log.read_text().split()))
    assert before == list(range(2 * BATCH + BATCH // 2))
    scheduler = Scheduler(SqliteStore(file))
    serve(scheduler, log)
    async with scheduler:
        await scheduler.run_until_idle()
    runs = Counter(map(int, log.read_text().split()))
    assert set(runs) == set(range(MESSAGES))
    assert [number for number, n in runs.items() if n > 1] == before[2 * BATCH :]

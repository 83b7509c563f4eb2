"""The soak: `python -m tests.nemesis.soak --minutes 60`. A steady load on Redis for a long time, with random faults.

One service and one client are spared from the faults. At the end, all messages were delivered, and these two processes
and the Redis server must hold no more than at the beginning. A file gets the figures of every ten seconds.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, NamedTuple

import msgspec

from aiodelay.core.values import RETRY_WINDOW_MS
from tests.faults.programs.soaker import CONCURRENCY, Plan, Sample
from tests.support.processes import Worker

from .chart import as_svg, figures_in
from .redis import RedisStage
from .schedule import Fault, Kind, draw
from .stage import CLIENTS, PROCESS_KINDS, SERVICES, Acts, inject

__all__ = ["LINGERS_S", "MOST_AGAIN", "Mark", "SoakStage", "soak", "unexplained"]

PAUSE_S = (5.0, 25.0)
"""The time between two faults."""
SAMPLE_S = 10.0
DRAINED_S = 120.0
FIRST = 1 << 40
"""The difference between the first numbers of two clients."""
_SERVICES_HIT = {kind.name: int(kind.of == "service") for kind in PROCESS_KINDS}
"""The number of services that each kind of fault hits; the other kinds hit all."""
SLACK = {"tasks": 3, "threads": 6, "files": 16, "kb": 40_000, "redis_kb": 2_000, "redis_keys": 8}
"""What may be held more at the end than at the beginning.

Threads that were needed once stay, and so do connections of the pools. `kb` is the memory of a process: the first
messages load modules and fill caches.
"""
MOST_AGAIN = 4 * CONCURRENCY
"""The most messages that one fault of one service can have run again: those that run, and those that have run and are
not settled. These may be as many as run and wait.
"""
LINGERS_S = 60.0
"""A fault can have messages run again for so long: the length of a lease is 15 s, and a machine may be busy."""
LOST_S = 30.0
"""A failover can lose the settlements of the messages that become due in so many seconds, also those of a backlog."""
FIGURES = ("median_ms", "late_ms", "tasks", "threads", "files", "kb", "redis_kb", "redis_keys")


class Mark(NamedTuple):
    """The beginning of a fault.

    Attributes:
        at_s: The time of the monotonic clock.
        runs: The number of runs until then.
        most_again: The most messages that the fault can have run again.
    """

    at_s: float
    runs: int
    most_again: int


def unexplained(runs: Sequence[int], marks: Sequence[Mark]) -> list[str]:
    """Return a text for each time between two faults in which more messages ran again than the faults explain.

    Args:
        runs: The number of the message of each run, in order.
        marks: The faults, in order.
    """
    found, seen = [], set[int]()
    for i, mark in enumerate((Mark(float("-inf"), 0, 0), *marks)):
        part = runs[mark.runs : marks[i].runs if i < len(marks) else None]
        again = len(part) - len({*part} - seen)
        seen.update(part)
        allowed = sum(each.most_again for each in marks[:i] if each.at_s > mark.at_s - LINGERS_S)
        if again > allowed:
            found.append(f"B1: {again} messages ran again after fault {i}, and the faults explain {allowed}")
    return found


class SoakStage(RedisStage):
    """Services and clients that count, and write no history. Their clock does not step.

    Args:
        folder: The folder for all files of the run.
        seed: The seed of the schedule.
        seconds: The time of the load.
        rate: Messages per second of all clients.
        figures: The file for the figures.
    """

    kinds: ClassVar[tuple[Kind, ...]] = tuple(kind for kind in RedisStage.kinds if kind.of != "clock")

    def __init__(self, folder: Path, seed: int, seconds: float, *, rate: int, figures: Path) -> None:
        super().__init__(folder, seed, seconds)
        self._rate, self._figures = rate, figures
        self._clients = 0
        self._marks: list[Mark] = []

    def open(self, stack: ExitStack) -> None:
        super().open(stack)
        self._steady = self.start_service("steady", SERVICES)
        self._steady.line("ready")
        self._begun_s = self._sampled_s = time.monotonic()
        self._figures.write_text(",".join(("seconds", *FIGURES)) + "\n")
        self.first = self._sample()

    def start_service(self, name: str, number: int) -> Worker:
        plan = Plan(store=self.scene.url, numbers=f"{self.folder / 'handled'}")
        return self.crew.start("soaker", plan, name=name, forks=number < SERVICES)  # its memory is measured

    def start_client(self, name: str, seconds: float) -> Worker:
        self._clients += 1
        first, rate = self._clients * FIRST, self._rate // CLIENTS
        numbers = f"{self.folder / 'acknowledged'}"
        plan = Plan(store=self.scene.url, numbers=numbers, first=first, rate=rate, seconds=seconds)
        return self.crew.start("soaker", plan, name=name)

    def acts(self) -> Mapping[str, Acts]:
        return {name: acts for name, acts in super().acts().items() if name in {kind.name for kind in self.kinds}}

    def begins(self, fault: Fault) -> None:
        """Note how many runs there were before the fault."""
        most_again = MOST_AGAIN * _SERVICES_HIT.get(fault.kind, SERVICES + 1)
        if fault.kind == "failover":
            most_again += round((fault.lasts_s + LOST_S) * self._rate)
        self._marks.append(Mark(time.monotonic(), len(self._handled()), most_again))

    # --- figures ------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Write a line of figures, if the last line is old enough."""
        if time.monotonic() - self._sampled_s >= SAMPLE_S:
            self._sampled_s = time.monotonic()
            self._sample()

    def _sample(self) -> dict[str, int]:
        """Write and return what the steady service and the primary hold. A server that does not answer has 0."""
        status = Path(f"/proc/{self._steady.pid}/status").read_text()
        os.kill(self._steady.pid, signal.SIGUSR1)
        held = msgspec.json.decode(self._steady.line("holds"), type=Sample)
        resident = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
        assert resident is not None
        figures = {**msgspec.to_builtins(held), "kb": int(resident[1]), **self._of_redis()}
        line = [f"{time.monotonic() - self._begun_s:.0f}", *(str(figures[name]) for name in FIGURES)]
        with self._figures.open("a") as file:
            file.write(",".join(line) + "\n")
        return figures

    def _of_redis(self) -> dict[str, int]:
        try:
            memory = re.search(rb"used_memory_dataset:(\d+)", self.primary.command("INFO", "memory"))
            keys = self.primary.command("DBSIZE")
        except OSError:
            return {"redis_kb": 0, "redis_keys": 0}
        return {"redis_kb": int(memory[1]) // 1024 if memory else 0, "redis_keys": int(keys[1:])}

    # --- the end ------------------------------------------------------------------------------------------

    def judge(self) -> str:
        ends_s = time.monotonic() + DRAINED_S
        while (missing := self._acknowledged() - set(map(abs, self._handled()))) and time.monotonic() < ends_s:
            time.sleep(1)
        if missing:
            self.violations.append(f"S2: {len(missing)} messages are lost, such as {sorted(missing)[:5]}")
        handled = Counter(self._handled())
        if early := [number for number in handled if number < 0]:
            self.violations.append(f"S1: {len(early)} messages were early, such as {early[:5]}")
        self.violations += unexplained([abs(number) for number in self._handled()], self._marks)
        self.violations += self._grown()
        self.end([*self.services, self._steady])
        again = handled.total() - len(handled)
        return f"{len(self._acknowledged())} acknowledged, {handled.total()} runs, {again} of them again"

    def _grown(self) -> list[str]:
        """Wait until no more is held than at the beginning, at most until the store forgets the last commands.

        Returns:
            A text for each figure that has grown.
        """
        ends_s = time.monotonic() + RETRY_WINDOW_MS / 1000 + DRAINED_S
        while True:
            held = self._sample()
            grown = [
                f"R1: {held[name] - self.first[name]} {name} more" for name in SLACK if self._has_grown(held, name)
            ]
            if not grown or time.monotonic() > ends_s:
                return grown
            time.sleep(SAMPLE_S)

    def _has_grown(self, held: Mapping[str, int], name: str) -> bool:
        return held[name] > self.first[name] + SLACK[name]

    def _acknowledged(self) -> set[int]:
        return set(numbers_in(self.folder / "acknowledged"))

    def _handled(self) -> array[int]:
        return numbers_in(self.folder / "handled")


def numbers_in(path: Path) -> array[int]:
    """Return the numbers in a file. Each was written whole."""
    data = path.read_bytes() if path.exists() else b""
    return array("q", data)


def soak(stage: SoakStage, seed: int, seconds: float) -> str:
    """Run the load and the faults, and judge. Return a line of figures."""
    faults = draw(seed, seconds, stage.kinds, stage.targets, PAUSE_S)
    print(f"seed {seed}, {seconds:g} s, {len(faults)} faults:", *faults, sep="\n", flush=True)
    stage.start()
    injected = inject(stage, faults, stage.watch)
    for client in stage.clients:
        while client.is_alive:
            stage.watch()
            time.sleep(1)
        stage.has_ended(client)
    return f"{stage.judge()}; {dict(injected)}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=int, default=500, help="messages per second; default 500")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--figures", type=Path, default=Path("soak.csv"), help="the file for the figures")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw the figures into this SVG file")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aiodelay-soak-", ignore_cleanup_errors=True) as name:
        options = {"rate": chosen.rate, "figures": chosen.figures}
        with SoakStage(Path(name), chosen.seed, chosen.minutes * 60, **options) as stage:
            print(soak(stage, chosen.seed, chosen.minutes * 60))
            print(*stage.violations, sep="\n")
    if chosen.chart is not None:
        title = f"Soak: {chosen.rate:,} messages a second for {chosen.minutes:g} minutes, with random faults"
        chosen.chart.write_text(as_svg(figures_in(chosen.figures), title))
    return 1 if stage.violations else 0


if __name__ == "__main__":
    sys.exit(main())

"""`CheckedStage`: a stage whose processes write histories, and whose checker decides. SQLite and Redis use it."""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from aiodelay.testing import history as h
from aiodelay.testing.history import Limits, check
from tests.faults.programs.worker import Plan, Stream
from tests.faults.scene import Scene
from tests.support.judging import final_of
from tests.support.processes import Worker
from tests.support.server_clock import FileClock

from .schedule import Fault, Kind
from .stage import Acts, Stage

__all__ = ["CLOCK_STEPPED", "CheckedStage"]

CLOCK_STEPPED = Kind("clock stepped", "clock", value=(-5.0, 5.0))
"""The value is the new offset of the clock, in seconds."""
RATE, IDS = 40, 150
"""Commands per second of each client, and the number of ids that all of them share."""
TAKEOVER_MS = 60_000
SPARE = 8
CLAIMED_AHEAD_S = 5.0
"""The longest time from a claim until its run begins, in a process that is not stopped meanwhile."""
IDLE_S = 120.0


class CheckedStage(Stage):
    """A stage on a store with claims. Each process has a history file of its own."""

    scene: Scene
    clock: FileClock
    clock_of_stores = ""
    """The file with the offset, if the stores of the processes read it; "" if their server does."""

    def __init__(self, folder: Path, seed: int, seconds: float) -> None:
        super().__init__(folder, seed, seconds)
        self._offsets = [(0, 0)]  # since when, in ns of the monotonic clock, and the offset in ns
        self._doubts_ns: list[tuple[int, int]] = []

    def plan(self, name: str, **settings: object) -> Plan:
        plan = self.scene.plan(name, clock=self.clock_of_stores, **settings)
        return msgspec.structs.replace(plan, history=f"{self.history_of(name)}")

    def history_of(self, name: str) -> Path:
        """Return the history file of a process."""
        return self.folder / f"history-{name}.jsonl"

    def start_service(self, name: str, number: int) -> Worker:
        plan = self.plan(name, serve=("work",), pulls=number == 2, sink=True, run_ms=20, until="sigterm")
        return self.crew.start("worker", plan, name=name)

    def start_client(self, name: str, seconds: float) -> Worker:
        flow = Stream(seconds=seconds, rate=RATE, ids=IDS, seed=self.seed, all_kinds=True)
        return self.crew.start("worker", self.plan(name, stream=flow, until="produced"), name=name)

    def clock_acts(self) -> dict[str, Acts]:
        """Return the acts of a step of the clock, which stays stepped."""
        return {CLOCK_STEPPED.name: (self._step, lambda fault: None)}

    def _step(self, fault: Fault) -> None:
        """Step the clock. For the checker, the leases that were open then are in doubt: they may end early or late."""
        former_ns, since_ns = self.clock.offset_ns, time.monotonic_ns()
        self._offsets.append((since_ns, int(fault.value * 1e9)))
        self.clock.offset_ns = int(fault.value * 1e9)
        least_ns = max(abs(self.clock.offset_ns - former_ns), self._lease_ns()) + 2_000_000_000
        self._doubts_ns.append((since_ns - least_ns, since_ns))
        self.crew.history.write(h.Loss(since_ns=since_ns - least_ns, commands=False))

    def _lease_ns(self) -> int:
        return self.scene.plan("").lease_ms * 1_000_000

    # --- the end ------------------------------------------------------------------------------------------

    def judge(self) -> str:
        closer = self.crew.start(
            "worker", self.plan("closer", serve=("work",), sink=True, until="empty"), name="closer"
        )
        try:
            closer.ended_well(IDLE_S)
        except AssertionError as error:
            self.violations.append(f"L4: messages are left: {error}")
        self.end(self.services)
        self.crew.history.write(final_of(self.scene.store_url(), self.scene.leases))
        report = check(self._events(), Limits(takeover_ms=TAKEOVER_MS, spare=SPARE))
        self.violations += map(str, report.violations)
        story = self.scene.story()
        assert story.final is not None
        self.violations += [
            f"L5: {message_id} is a dead letter: {reason}" for message_id, _, reason in story.final.dead
        ]
        errors = Counter(each.answer or "no answer" for each in story.operations if each.outcome != "ok")
        self.excused = self._excused()
        return f"{report}; {dict(errors)}; {self.excused:.0%} of the time excused by steps of the clock"

    def _excused(self) -> float:
        """Return the share of the run in which leases are in doubt because of a step of the clock."""
        covered_ns, until_ns = 0, round(self.begun_s * 1e9)
        for since_ns, stepped_ns in self._doubts_ns:
            covered_ns += max(stepped_ns - max(since_ns, until_ns), 0)
            until_ns = max(until_ns, stepped_ns)
        return covered_ns / 1e9 / self.seconds

    def _events(self) -> list[h.Event]:
        """Return the events of all processes, with the wall clock of the store for the beginnings of runs."""
        whole = self.folder / "history.jsonl"
        with whole.open("ab") as file:
            for path in sorted(self.folder.glob("history-*.jsonl")):
                with path.open("rb") as part:
                    shutil.copyfileobj(part, file)
                path.unlink()
        events = h.read(whole)
        for event in events:
            if isinstance(event, h.RunStarted):
                event.wall_ms += math.ceil(max(self._offsets_around(event.at_ns)) / 1e6)
        return events

    def _offsets_around(self, at_ns: int) -> Iterator[int]:
        """Yield the offsets of the clock from the earliest time of the claim until a run began."""
        claimed_ns = at_ns - round((CLAIMED_AHEAD_S + self.longest_s) * 1e9)
        for stepped_ns, offset_ns in reversed(self._offsets):
            if stepped_ns <= at_ns:
                yield offset_ns
                if stepped_ns <= claimed_ns:
                    return

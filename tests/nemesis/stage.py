"""`Stage`: the processes of one run on one store, and the faults of these processes. Each stack adds its own faults."""

from __future__ import annotations

import itertools
import signal
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import ClassVar, NamedTuple, Self, TypeAlias

from tests.support.little_memory import take_memory
from tests.support.processes import Crew, Worker

from .schedule import Fault, Kind, draw, moments, write

__all__ = [
    "CLIENTS",
    "PROCESS_KINDS",
    "SERVICES",
    "Act",
    "Acts",
    "Result",
    "Span",
    "Stage",
    "inject",
    "play",
]

SERVICES, CLIENTS = 3, 2
EXITS = (0, -signal.SIGTERM)
"""The exit codes of a process that was told to end, perhaps before it listened."""
PROCESS_KINDS = (
    Kind("service killed", "service", lasts_s=(0.0, 2.0)),
    Kind("service stopped", "service", lasts_s=(0.2, 6.0)),
    Kind("service ended", "service", lasts_s=(0.0, 2.0)),
    Kind("service out of memory", "service", lasts_s=(0.2, 2.0)),
    Kind("client killed", "client", lasts_s=(0.0, 2.0)),
)

Act: TypeAlias = Callable[[Fault], None]
Acts: TypeAlias = tuple[Act, Act]
"""The functions that begin and end a fault."""


class Span(NamedTuple):
    """The time of a fault in ns of the monotonic clock, and its kind. On a slow machine, it lasts longer than drawn."""

    begin_ns: int
    end_ns: int
    kind: str


class Result:
    """The result of one run.

    Attributes:
        injected: The number of faults of each kind.
        violations: A text for each broken rule.
        summary: A line of figures.
        excused: The share of the time in which steps of the clock excuse leases from some rules, 0 to 1.
    """

    def __init__(self, injected: Counter[str], violations: list[str], summary: str, excused: float = 0.0) -> None:
        self.injected, self.violations, self.summary, self.excused = injected, violations, summary, excused


class Stage(ABC):
    """The services and clients of one run. Services deliver, and clients give commands until the run ends.

    Args:
        folder: The folder for all files of the run.
        seed: The seed of the commands of the clients.
        seconds: The length of the run.

    Attributes:
        violations: A text for each broken rule.
        spans: The faults that have ended.
        excused: As in `Result`.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[Kind, ...]]
    targets: ClassVar[Mapping[str, int]]

    def __init__(self, folder: Path, seed: int, seconds: float) -> None:
        self.folder, self.seed, self.seconds = folder, seed, seconds
        self._stack = ExitStack()
        self._numbers = itertools.count(1)
        self._ending: list[Worker] = []
        self.violations: list[str] = []
        self.spans: list[Span] = []
        self.excused = 0.0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.crew = stack.enter_context(Crew(self.folder, shows_errors=False))
            self.open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(exc_type, exc, traceback)

    # --- what each stack says -----------------------------------------------------------------------------

    @abstractmethod
    def open(self, stack: ExitStack) -> None:
        """Start the servers. The stack ends them."""

    @abstractmethod
    def start_service(self, name: str, number: int) -> Worker:
        """Start a process that delivers messages."""

    @abstractmethod
    def start_client(self, name: str, seconds: float) -> Worker:
        """Start a process that gives commands for so many seconds, and then ends."""

    @abstractmethod
    def acts(self) -> Mapping[str, Acts]:
        """Return the functions that begin and end each kind of fault, except for the faults of processes."""

    def is_ready_for(self, fault: Fault) -> bool:
        """Return whether the target of a fault works. If not, the fault is left out."""
        return True

    def begins(self, fault: Fault) -> None:  # noqa: B027 - most stages need not know
        """Note that a fault begins now."""

    @abstractmethod
    def judge(self) -> str:
        """Deliver all messages that are left, end all services, and add broken rules to `violations`.

        Returns:
            A line of figures.
        """

    @property
    def longest_s(self) -> float:
        """The time that the longest fault took."""
        return max((each.end_ns - each.begin_ns for each in self.spans), default=0) / 1e9

    # --- processes ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all services and clients, and wait until they work."""
        self.ends_s = time.monotonic() + self.seconds
        self.services = [self._service(number) for number in range(SERVICES)]
        for service in self.services:
            service.line("ready")
        self.begun_s = time.monotonic()
        self.ends_s = self.begun_s + self.seconds
        self.clients = [self._client() for _ in range(CLIENTS)]
        for client in self.clients:
            client.line("ready")

    def _service(self, number: int) -> Worker:
        return self.start_service(f"service-{next(self._numbers)}", number)

    def _client(self) -> Worker:
        return self.start_client(f"client-{next(self._numbers)}", max(self.ends_s - time.monotonic(), 0.1))

    def process_acts(self) -> dict[str, Acts]:
        return {
            "service killed": (lambda fault: self._kill(self.services[fault.target]), self._replace_service),
            "service stopped": (self._stop, self._continue),
            "service ended": (lambda fault: self.terminate(self.services[fault.target]), self._replace_service),
            "service out of memory": (self._take_memory, self._kill_and_replace),
            "client killed": (lambda fault: self._kill(self.clients[fault.target]), self._replace_client),
        }

    def _replace_service(self, fault: Fault) -> None:
        self.services[fault.target] = self._service(fault.target)

    def _replace_client(self, fault: Fault) -> None:
        self.clients[fault.target] = self._client()

    def _stop(self, fault: Fault) -> None:
        self._check(self.services[fault.target])
        self.services[fault.target].stop()

    def _continue(self, fault: Fault) -> None:
        self.services[fault.target].continue_()

    def _take_memory(self, fault: Fault) -> None:
        self._check(self.services[fault.target])
        take_memory(self.services[fault.target].pid)

    def _kill_and_replace(self, fault: Fault) -> None:
        """Kill a service, as the system or a supervisor does when memory is short, and start another one."""
        self.services[fault.target].kill()
        self._replace_service(fault)

    def terminate(self, process: Worker) -> None:
        """Tell a process to end. `end` waits for its end, which may come only after the end of other faults."""
        process.terminate()
        self._ending.append(process)

    def end(self, processes: list[Worker]) -> None:
        """Tell processes to end, and wait for their end and for that of processes that were told before."""
        for process in processes:
            self.terminate(process)
        for process in self._ending:
            self.has_ended(process)
        self._ending.clear()

    def has_ended(self, process: Worker) -> None:
        """Wait for the end of a process that was told to end. Any other end is a violation."""
        if (code := process.wait()) not in EXITS:
            self.violations.append(f"crash: {process.name} ended with {code}: {process.errors[-2_000:]}")

    def _kill(self, process: Worker) -> None:
        self._check(process)
        process.kill()

    def _check(self, process: Worker) -> None:
        if not process.is_alive:
            self.has_ended(process)


def inject(stage: Stage, faults: Sequence[Fault], during: Callable[[], None] = lambda: None) -> Counter[str]:
    """Inject the faults of a schedule. Return the number of faults of each kind. Targets that do not work get no fault.

    Args:
        stage: The stage, whose processes run.
        faults: The schedule.
        during: Is called at least once a second.
    """
    injected: Counter[str] = Counter()
    acts = {**stage.process_acts(), **stage.acts()}
    begun_s = time.monotonic()
    since_ns: dict[Fault, int] = {}
    left_out: set[Fault] = set()
    for at_s, is_end, fault in moments(faults):
        while (left_s := begun_s + at_s - time.monotonic()) > 0:
            during()
            time.sleep(min(left_s, 1))  # the pause until the next fault begins or ends
        if not is_end and not stage.is_ready_for(fault):
            left_out.add(fault)
        if fault in left_out:
            continue
        if not is_end:
            since_ns[fault] = time.monotonic_ns()
            stage.begins(fault)
        acts[fault.kind][is_end](fault)
        if is_end:
            stage.spans.append(Span(since_ns[fault], time.monotonic_ns(), fault.kind))
        injected[fault.kind] += not is_end
    return injected


def play(stage: Stage, seed: int, seconds: float, *, with_clock: bool = True) -> Result:
    """Draw the schedule of a seed, inject its faults, and judge the run.

    The schedule goes to standard output, and to the file `schedule.jsonl` in the folder of the stage.

    Args:
        stage: The stage.
        seed: The seed of the schedule.
        seconds: The length of the run.
        with_clock: Whether clocks step.
    """
    kinds = [kind for kind in stage.kinds if with_clock or kind.of != "clock"]
    faults = draw(seed, seconds, kinds, stage.targets)
    write(stage.folder / "schedule.jsonl", faults)
    print(f"{stage.name}, seed {seed}, {seconds:g} s, {len(faults)} faults:", *faults, sep="\n", flush=True)
    stage.start()
    injected = inject(stage, faults)
    for client in stage.clients:
        stage.has_ended(client)
    summary = stage.judge()
    return Result(injected, stage.violations, summary, stage.excused)

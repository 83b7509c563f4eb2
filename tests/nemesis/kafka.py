"""`KafkaStage` and `KafkaClusterStage`: a group of services on one broker, or on three that replicate each partition.

A proxy stands between all clients and each broker. A `read_committed` reader of the target topic, and the files that
the handlers write, show what was delivered.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, NamedTuple

import msgspec
from aiokafka import AIOKafkaConsumer, ConsumerRecord

from aiodelay.backends.kafka.records import READ_TO
from aiodelay.testing import history as h
from aiodelay.testing.history import Operation, Story
from aiodelay.testing.servers import free_port
from tests.faults.programs.kafka_owner import CONCURRENCY, Run
from tests.faults.programs.kafka_owner import Plan as OwnerPlan
from tests.faults.programs.kafka_user import AFTER_MS, Plan
from tests.support.kafka import Broker, create_topic, read
from tests.support.processes import Worker
from tests.support.proxy import Mode, Proxy, proxied_by_thread
from tests.support.server_clock import FileClock
from tests.support.topics import CLEANED

from .schedule import Fault, Kind
from .stage import CLIENTS, PROCESS_KINDS, SERVICES, Act, Acts, Span, Stage

__all__ = [
    "AHEAD_S",
    "LINGERS_S",
    "MOST_AGAIN",
    "SURE_S",
    "KafkaClusterStage",
    "KafkaStage",
    "Known",
    "Step",
    "read_ends",
]

RATE = 25
SURE_S = 2.0
"""An owner has read a change so long after its acknowledgement, unless a fault prevents it."""
LINGERS_S = 10.0
"""The effect of a fault may last so much longer: a client waits so long for an answer (`timeout_ms`)."""
TAKEOVER_S = 120.0
"""The longest wait for the last messages that are due: the promised 15 s, and the delay of a busy machine."""
AHEAD_S = 5.0
"""The clock of a service is at most so far ahead or behind."""
MOST_AGAIN = 3 * CONCURRENCY
"""The most messages that one fault of one service can have run again: those that run, and those that have run and are
not settled, which may be as many as run and wait.
"""
AGAIN_S = 60.0
"""A fault can have messages run again for so long: a new service starts, joins the group and takes partitions over."""
BROKERS = 3
CLUSTER = {
    "min_insync_replicas": "2",
    "offsets_topic_replication_factor": "3",
    "transaction_state_log_replication_factor": "3",
    "transaction_state_log_min_isr": "2",
    "share_coordinator_state_topic_replication_factor": "3",
    "share_coordinator_state_topic_min_isr": "2",
    "leader_imbalance_check_interval_seconds": "5",
}
"""Settings of the brokers of a cluster. Leaders soon return to a broker that has come back."""


_SERVICES_HIT = {"clock stepped": 1, **{kind.name: int(kind.of == "service") for kind in PROCESS_KINDS}}
"""The number of services that each kind of fault hits; the other kinds hit all."""


class KafkaStage(Stage):
    name = "kafka"
    kinds: ClassVar[tuple[Kind, ...]] = (
        *PROCESS_KINDS,
        Kind("clock stepped", "clock", value=(-AHEAD_S, AHEAD_S)),
        Kind("service joins and leaves", "group", lasts_s=(1.0, 5.0)),
        Kind("broker killed", "broker", lasts_s=(0.1, 4.0)),
        Kind("broker stopped", "broker", lasts_s=(0.3, 6.0)),
        Kind("disk full", "broker", lasts_s=(0.5, 3.0)),
        Kind("connections cut", "link"),
        Kind("connections half-open", "link"),
        Kind("black hole", "link", lasts_s=(0.3, 5.0)),
        Kind("answers lost", "link", lasts_s=(0.2, 2.0)),
        Kind("requests lost", "link", lasts_s=(0.2, 2.0)),
        Kind("slow answers", "link", lasts_s=(0.5, 4.0), value=(0.02, 0.5)),
    )
    targets: ClassVar = {
        "service": SERVICES,
        "client": CLIENTS,
        "clock": SERVICES,
        "group": 1,
        "broker": 1,
        "link": 1,
    }

    count: ClassVar = 1
    """The number of brokers. Each of them has a replica of each partition."""
    settings: ClassVar = {**CLEANED, "min_compaction_lag_ms": 120_000}
    """The settings of the topic of schedules. A partition may be away for longer than the 30 s of `CLEANED`."""

    def __init__(self, folder: Path, seed: int, seconds: float) -> None:
        super().__init__(folder, seed, seconds)
        self._starts = ThreadPoolExecutor(1)
        self._start: Future[None] | None = None
        self._clocks = [FileClock(self._clock_file(number)) for number in range(SERVICES)]
        self._steps: list[Step] = []

    def open(self, stack: ExitStack) -> None:
        stack.enter_context(self._starts)
        self.proxies = [stack.enter_context(proxied_by_thread(1)) for _ in range(self.count)]
        self.brokers = self.new_brokers()
        for broker, proxy in zip(self.brokers, self.proxies, strict=True):
            stack.callback(broker.stop)
            proxy.point_to(int(broker.login.rpartition(":")[2]))
            broker.launch()
        for broker in self.brokers:
            broker.wait_until_ready()
        self._bootstrap = ",".join(broker.bootstrap for broker in self.brokers)
        self._store = f"kafka://{','.join(f'127.0.0.1:{proxy.port}' for proxy in self.proxies)}/schedules"
        self._runs = self.folder / "runs.jsonl"
        asyncio.run(self._create_topics())

    def new_brokers(self) -> list[Broker]:
        return [self.new_broker(self.proxies[0], "{controller}")]

    def new_broker(self, proxy: Proxy, controller: str, **settings: str) -> Broker:
        """Return a broker that tells clients the address of a proxy. The broker is not started."""
        return Broker(
            listeners=f"PLAINTEXT://127.0.0.1:{{port}},SEEN://127.0.0.1:{{login}},CONTROLLER://127.0.0.1:{controller}",
            advertised_listeners=f"PLAINTEXT://127.0.0.1:{{port}},SEEN://127.0.0.1:{proxy.port}",
            listener_security_protocol_map="CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SEEN:PLAINTEXT",
            transaction_abort_timed_out_transaction_cleanup_interval_ms="500",
            **settings,
        )

    async def _create_topics(self) -> None:
        await create_topic(self._bootstrap, "target", partitions=2, replicas=self.count)
        await create_topic(self._bootstrap, "schedules", partitions=5, replicas=self.count, **self.settings)

    def start_service(self, name: str, number: int) -> Worker:
        clock = f"{self._clock_file(number)}" if number < SERVICES else ""
        plan = OwnerPlan(name=name, store=self._store, runs=f"{self._runs}", redrives=True, clock=clock)
        return self.crew.start("kafka_owner", plan, name=name)

    def start_client(self, name: str, seconds: float) -> Worker:
        plan = Plan(
            name=name,
            store=self._store,
            history=f"{self.crew.history_path}",
            target="target",
            seconds=seconds,
            rate=RATE,
            seed=self.seed,
        )
        return self.crew.start("kafka_user", plan, name=name)

    def _clock_file(self, number: int) -> Path:
        return self.folder / f"offset-{number}"

    def acts(self) -> Mapping[str, Acts]:
        return {
            "clock stepped": (self._step, lambda fault: None),
            "service joins and leaves": (self._join, lambda fault: self.terminate(self._guest)),
            "broker killed": (lambda fault: self._broker(fault).kill(), self._launch),
            "broker stopped": (lambda fault: self._broker(fault).freeze(), lambda fault: self._broker(fault).thaw()),
            "disk full": (lambda fault: self._broker(fault).fill_disk(), self._restart),
            "connections cut": (lambda fault: self.proxies[fault.target].cut(), lambda fault: None),
            "connections half-open": (lambda fault: self.proxies[fault.target].freeze(), lambda fault: None),
            "black hole": (self._pass("black hole"), self._pass("pass")),
            "answers lost": (self._pass("lose answers"), self._pass("pass")),
            "requests lost": (self._pass("lose requests"), self._pass("pass")),
            "slow answers": (self._delay, self._hurry),
        }

    def _step(self, fault: Fault) -> None:
        """Step the clock of one service, and of those that replace it."""
        self._steps.append(Step(time.time_ns() / 1e6, fault.target, fault.value * 1_000))
        self._clocks[fault.target].offset_ns = int(fault.value * 1e9)

    def _join(self, fault: Fault) -> None:
        self._guest = self.start_service(f"guest-{fault.at_s:.2f}", SERVICES)

    def _broker(self, fault: Fault) -> Broker:
        return self.brokers[int(fault.value)]

    def is_ready_for(self, fault: Fault) -> bool:
        """Return False for a fault of a broker, while a broker that was started does not work yet."""
        if self._start is None or all(kind.of != "broker" for kind in self.kinds if kind.name == fault.kind):
            return True
        return self._start.done() and self._start.result() is None

    def _launch(self, fault: Fault) -> None:
        """Start a broker. On a busy machine, it works only after many seconds, and other faults go on meanwhile."""
        broker = self._broker(fault)
        broker.launch()
        self._start = self._starts.submit(broker.wait_until_ready)

    def _restart(self, fault: Fault) -> None:
        self._broker(fault).kill()
        self._launch(fault)

    def _pass(self, mode: Mode) -> Act:
        def act(fault: Fault) -> None:
            self.proxies[fault.target].mode = mode

        return act

    def _delay(self, fault: Fault) -> None:
        self.proxies[fault.target].delay_answers_s = fault.value

    def _hurry(self, fault: Fault) -> None:
        self.proxies[fault.target].delay_answers_s = 0.0

    # --- the end ------------------------------------------------------------------------------------------

    def judge(self) -> str:
        if self._start is not None:
            self._start.result()
        story = Story(h.read(self.crew.history_path))
        known = Known(story, self.spans, self._steps)
        patience_s = AFTER_MS / 1000 + TAKEOVER_S
        expected = known.expected("kafka")
        records = asyncio.run(read_until(self._bootstrap, expected, patience_s))
        runs = self._runs_until(known.expected("work"), patience_s)
        self.end(self.services)
        known = Known(story, self.spans, self._steps, asyncio.run(read_ends(self._bootstrap, "schedules")))
        moved: dict[str, list[int]] = defaultdict(list)
        ran: dict[str, list[int]] = defaultdict(list)
        for record in records:
            moved[h.digest_of(record.value or b"")].append(record.timestamp)
        for run in runs:
            ran[h.digest_of(run.payload.encode())].append(run.started_ms)
        counted = {}
        for lane, delivered in (("kafka", moved), ("work", ran)):
            counted[lane], broken = known.judge(lane, delivered, is_exact=lane == "kafka")
            self.violations += broken
        if self.violations:
            asyncio.run(write_records(self._bootstrap, self.folder / "records.txt"))
        outcomes = Counter(operation.outcome for operation in known.operations.values())
        told = "; ".join(f"{lane}: {dict(numbers)}" for lane, numbers in counted.items())
        times = f"longest fault: {self.longest_s:.1f} s"
        return f"{told}; commands: {dict(outcomes)}; {times}; {len(self.violations)} violations"

    def _runs_until(self, expected: set[str], patience_s: float) -> list[Run]:
        ends_s = time.monotonic() + patience_s
        while True:
            runs = read_runs(self._runs)
            if expected <= {h.digest_of(run.payload.encode()) for run in runs} or time.monotonic() > ends_s:
                return runs
            time.sleep(0.5)


class KafkaClusterStage(KafkaStage):
    """Three brokers, which are also the controllers. One of them at a time has a fault, and its partitions move."""

    name = "kafka-cluster"
    kinds: ClassVar[tuple[Kind, ...]] = (
        *(kind for kind in KafkaStage.kinds if kind.of != "broker"),
        Kind("broker killed", "broker", lasts_s=(0.1, 8.0), value=(0, BROKERS)),
        Kind("broker stopped", "broker", lasts_s=(0.3, 10.0), value=(0, BROKERS)),
        Kind("disk full", "broker", lasts_s=(0.5, 6.0), value=(0, BROKERS)),
    )
    targets: ClassVar = {**KafkaStage.targets, "link": BROKERS}
    count = BROKERS
    settings: ClassVar = {**CLEANED, "min_compaction_lag_ms": 600_000}
    """This is the least lag that a store accepts."""

    def new_brokers(self) -> list[Broker]:
        ports = [free_port() for _ in range(BROKERS)]
        settings = CLUSTER | {
            "controller_quorum_voters": ",".join(f"{i}@127.0.0.1:{port}" for i, port in enumerate(ports, 1))
        }
        return [
            self.new_broker(proxy, f"{port}", node_id=f"{i}", **settings)
            for i, (proxy, port) in enumerate(zip(self.proxies, ports, strict=True), 1)
        ]


def read_runs(path: Path) -> list[Run]:
    """Return all runs of handlers. Each line was written by one call, so no line is cut short."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Run) for line in lines]


async def read_until(bootstrap: str, expected: set[str], patience_s: float) -> list[ConsumerRecord]:
    """Return the committed records of the target, once all expected payloads are there, and two seconds later."""
    options = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
    found: list[ConsumerRecord] = []
    missing = set(expected)
    async with AIOKafkaConsumer("target", bootstrap_servers=bootstrap, **options) as consumer:
        ends_s = time.monotonic() + patience_s
        while time.monotonic() < ends_s:
            for batch in (await consumer.getmany(timeout_ms=200)).values():
                found += batch
                missing -= {h.digest_of(record.value or b"") for record in batch}
            if not missing:
                ends_s = min(ends_s, time.monotonic() + 2)
    return found


async def read_ends(bootstrap: str, topic: str) -> dict[str, int]:
    """Return the times at which the owners have recorded the ends of messages, by the digest of the payload.

    Kafka has compacted the topic, so some messages and some ends may be missing.
    """
    put_at: dict[str, dict[str, int]] = defaultdict(dict)  # the last offset of each payload, by id
    ended_ms: dict[str, int] = {}
    for record in sorted(await read(bootstrap, topic), key=lambda each: (each.partition, each.offset)):
        of_id = put_at[bytes(record.key).hex()]
        if record.value is not None:
            digest = h.digest_of(record.value)
            of_id[digest] = record.offset
            ended_ms.pop(digest, None)  # it was stored again: for a retry, or from a dead letter
            continue
        read_to = int(dict(record.headers).get(READ_TO, b"0"))
        ended_ms |= {digest: record.timestamp for digest, offset in of_id.items() if offset < read_to}
        put_at[bytes(record.key).hex()] = {digest: at for digest, at in of_id.items() if at >= read_to}
    return ended_ms


async def write_records(bootstrap: str, path: Path) -> None:
    """Write all records of both topics to a file, also those of transactions that were aborted."""
    async with AIOKafkaConsumer("schedules", "target", bootstrap_servers=bootstrap) as consumer:
        ends = await consumer.end_offsets(consumer.assignment())
        await consumer.seek_to_beginning()
        with path.open("w") as file:
            while any([await consumer.position(place) < end for place, end in ends.items()]):
                for place, batch in (await consumer.getmany(timeout_ms=200)).items():
                    for each in batch:
                        where = f"{place.topic}/{place.partition} {each.offset} {each.timestamp}"
                        print(where, each.key, each.value, each.headers, file=file)


class Step(NamedTuple):
    """A step of the clock of a service: its time in epoch ms, the number of the service, and the new offset in ms."""

    at_ms: float
    service: int
    ahead_ms: float


class Known:
    """The commands of all clients. One task gave all commands about an id, one after the other.

    Args:
        story: The history of the clients.
        spans: The faults.
        steps: The steps of clocks, in the order of time.
        ended_ms: The times at which the owners have recorded the ends of messages, in epoch ms, by the digest of the
            payload.

    Attributes:
        operations: The commands that schedule a message, by the digest of their payload, which no other command has.
    """

    def __init__(
        self,
        story: Story,
        spans: Sequence[Span],
        steps: Sequence[Step] = (),
        ended_ms: Mapping[str, int] | None = None,
    ) -> None:
        self._by_id, self._spans, self._steps, self._ended_ms = story.by_id(), spans, steps, ended_ms or {}
        self._longest_ms = max((each.end_ns - each.begin_ns for each in spans), default=0) / 1e6
        self.operations: dict[str, Operation] = {
            each.call.digest: each for each in story.operations if each.call.op == "schedule"
        }
        self._wall_ns = time.time_ns() - time.monotonic_ns()

    def expected(self, lane: str) -> set[str]:
        """Return the digests of the payloads that must be delivered."""
        last = (self._last_done(operations) for operations in self._by_id.values())
        return {each.call.digest for each in last if each is not None and each.call.lane == lane}

    def _last_done(self, operations: list[Operation]) -> Operation | None:
        """Return the command that schedules the message that must be delivered; None = there need not be any."""
        if any(each.outcome == "info" for each in operations):
            return None
        done = [each for each in operations if each.outcome == "ok"]
        return done[-1] if done and done[-1].call.op == "schedule" else None

    def judge(self, lane: str, delivered: Mapping[str, list[int]], *, is_exact: bool) -> tuple[Counter[str], list[str]]:
        """Compare deliveries with commands. Return figures, and a text for each broken rule.

        Args:
            lane: The lane of the messages.
            delivered: The times of delivery in epoch ms, by the digest of the payload.
            is_exact: Whether each message must be delivered exactly once.
        """
        counted: Counter[str] = Counter()
        broken = [f"S2: {self._named(digest)} was lost" for digest in self.expected(lane) - delivered.keys()]
        for digest, times in delivered.items():
            operation = self.operations.get(digest)
            if operation is None or operation.call.lane != lane or operation.outcome == "fail":
                broken.append(f"S8: {digest} was delivered to {lane}: {operation}")
                continue
            counted["delivered"] += 1
            counted["again"] += len(times) - 1
            early_ms = (operation.call.at_ms or 0) - min(times) - self._ahead_ms(min(times))
            if early_ms > 0:
                broken.append(f"S1: {self._named(digest)} was delivered {early_ms:.0f} ms early")
            if is_exact and len(times) > 1:
                broken.append(f"S3: {self._named(digest)} was delivered {len(times)} times, at {times}")
            back_ms = max(times) - self._ended_ms.get(digest, max(times))
            if back_ms > LINGERS_S * 1_000 + self._longest_ms:
                broken.append(f"S6: {self._named(digest)} was delivered {back_ms / 1_000:.1f} s after its end")
            if self._was_changed_in_time(operation):
                broken.append(f"S4, S5: {self._named(digest)} was delivered, and had been changed long before")
        of_lane = [each for each in self.operations.values() if each.call.lane == lane]
        counted["changed in time"] = sum(map(self._was_changed_in_time, of_lane))
        again = [pair for times in delivered.values() for pair in pairwise(sorted(times))]
        if not is_exact and (left := self._unexplained(again)):
            broken.append(f"B1: {len(left)} repeated runs are more than the faults explain, such as at {left[:5]}")
        return counted, broken

    def _ahead_ms(self, at_ms: float) -> float:
        """Return how far a clock of a service was ahead when it claimed a message that was delivered at this time."""
        claimed_ms = at_ms - self._longest_ms - LINGERS_S * 1_000
        offsets = dict[int, float]()
        found = 0.0
        for step in self._steps:
            if step.at_ms > at_ms:
                break
            if step.at_ms > claimed_ms:
                found = max(found, step.ahead_ms, offsets.get(step.service, 0.0))
            offsets[step.service] = step.ahead_ms
        return max(found, *offsets.values(), 0.0)

    def _unexplained(self, again: Sequence[tuple[int, int]]) -> list[int]:
        """Return the times of the repeated runs that no fault explains, in epoch ms.

        A fault explains the repetition of a message that was in flight during the fault, or up to `AGAIN_S` later. It
        explains only so many repetitions.

        Args:
            again: The beginnings of a run and of the next run of the same message, in epoch ms.
        """
        room = {span: MOST_AGAIN * _SERVICES_HIT.get(span.kind, SERVICES + 1) for span in self._spans}
        left = []
        for before_ms, after_ms in sorted(again, key=lambda pair: pair[1]):
            before_ns, after_ns = (each * 1_000_000 - self._wall_ns for each in (before_ms, after_ms))
            causes = [
                span
                for span in room
                if room[span] and span.begin_ns < after_ns and before_ns < span.end_ns + AGAIN_S * 1e9
            ]
            if causes:
                room[min(causes, key=lambda span: span.end_ns)] -= 1
            else:
                left.append(after_ms)
        return left

    def _was_changed_in_time(self, operation: Operation) -> bool:
        """Return whether a message was surely replaced or cancelled long before its due time.

        Then every owner that may still deliver has read the change, even if it could not read during the longest fault
        of this time.
        """
        later = [each for each in self._by_id[operation.id] if each.asked_ns > operation.asked_ns]
        done_ns = min((each.answered_ns for each in later if each.outcome == "ok"), default=None)
        if done_ns is None or operation.outcome == "info":
            return False
        due_ns = (operation.call.at_ms or 0) * 1_000_000 - self._wall_ns
        lingers_ns = LINGERS_S * 1e9
        faults = (end - begin for begin, end, _ in self._spans if begin < due_ns and done_ns < end + lingers_ns)
        longest_ns = max((each + lingers_ns for each in faults), default=0)
        ahead_ns = AHEAD_S * 1e9 if self._steps else 0.0
        return done_ns + SURE_S * 1e9 + longest_ns + ahead_ns < due_ns

    def _named(self, digest: str) -> str:
        operation = self.operations[digest]
        return f"{operation.id}, scheduled by {operation.call.process} for {operation.call.at_ms} ({digest})"

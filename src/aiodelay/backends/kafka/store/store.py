"""`kafka://host:9092/schedules`: a store that keeps its messages in compacted topics and needs no other database.

`KafkaStore` joins the parts. `assignment/` owns partitions, and `commands/` carries out commands. `KafkaStore` inherits
classes that each implement one port of the store, such as `Inspection` and `Pauses`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Self

from aiokafka import TopicPartition
from msgspec.structs import replace

from aiodelay.backends.kafka.client import CLOSE_S, ClockCheck
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.topics.group import HEARTBEAT_MS, METADATA_MS, SESSION_MS
from aiodelay.backends.kafka.topics.positions import Positions
from aiodelay.backends.kafka.topics.targets import Targets
from aiodelay.backends.kafka.topics.topic import prepare
from aiodelay.backends.kafka.topics.writer import Writer
from aiodelay.core.completion import run_to_completion
from aiodelay.core.table_scan import Columns, Scan
from aiodelay.core.values import (
    CONFLICT_MODES,
    Command,
    Instance,
    Lane,
    Outcome,
    PutBack,
    SourcePosition,
    Stored,
    WorkStatus,
)
from aiodelay.errors import ConfigurationError
from aiodelay.ports import StoreTraits, Work
from aiodelay.ports.clock import Clock, SystemClock

from .assignment import Assignment, Lookup, Readiness
from .commands import RECORDED, Commands, Intakes, PutBacks, RemoteCancels, UserWrites
from .feature_markers import FeatureMarkers
from .inspection import Inspection
from .instances import instances_of
from .journal import HistoryJournal
from .partition import Partition
from .pauses import Pauses
from .store_options import read_store_url
from .store_parts import StoreParts
from .store_tasks import StoreTasks
from .table_scan import Part, Scanner
from .transfer import SAFETY_POLL_MS, Transfers
from .work import KafkaWork

__all__ = ["KafkaStore", "open_store"]

_TRAITS = StoreTraits(
    durable=True,
    conflicts=CONFLICT_MODES - {"append"},
    cancel="verdict",
    lookup="anywhere",
    safety_poll_ms=SAFETY_POLL_MS,
    positions="recorded",
    longest_lease_ms=SESSION_MS - 2 * HEARTBEAT_MS,  # after SESSION_MS of silence, the group gives the partitions away
)


_PRODUCER_TRAITS = replace(_TRAITS, conflicts=RECORDED, cancel="recorded", lookup="owner", changes=False)


class KafkaStore(Inspection, Transfers, Pauses, FeatureMarkers, HistoryJournal):
    """Keeps messages in compacted topics. The processes that have opened `work` share the partitions.

    New messages go into the first topic. If an id is stored in two topics, it names two messages. Then a command with
    this id is about the message in the first of these topics.

    A consumer group for each topic shares the partitions again whenever a process comes or goes. With the options
    `member=k` and `members=n` there is no group: this process owns every n-th partition, beginning with partition k.

    A process that owns all partitions returns the final outcome of each command. Any other process writes its commands
    as requests into the topic, and the owners read and carry out the requests.

    A process that never opens `work` only schedules. From the topics, it reads only the owners' answers to cancels of
    one revision, so it returns no other final outcomes.

    Args:
        url: `kafka://host:9092/schedules`. More topics may follow after commas, and options after a question mark.
        clock: The clock of the store; None = the clock of this machine.

    Raises:
        ConfigurationError: The URL cannot be used.
    """

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        options, clock = read_store_url(url), clock or SystemClock()
        self.cluster: Cluster = options.cluster
        self.name: str = options.cluster.name
        tasks, clock_check = StoreTasks(self.name), ClockCheck(self.name, clock)
        writer = Writer(options.cluster, clock_check=clock_check, metadata_max_age_ms=METADATA_MS)
        targets = Targets(options.cluster, clock.now_ms)
        self.assignment: Assignment = Assignment(options, clock, clock_check, targets, tasks)
        lookup = Lookup(self.name, self.assignment, tasks)
        super().__init__(StoreParts(options, clock, tasks, targets, self.assignment, lookup, writer))
        self._readiness = Readiness(options.cluster, options.topics, self.assignment)
        writes = UserWrites(self.name, self.assignment, writer, clock)
        cancels = RemoteCancels(options.cluster, self.assignment, lookup, writer, writes)
        self._positions = Positions(options.cluster, options.topics[0])
        self._intakes = Intakes(self.name, self.assignment, self._positions, writes, tasks)
        self._commands = Commands(self.assignment, lookup, writes, cancels)
        self._put_backs = PutBacks(self.name, lookup, writes)

    @property
    def traits(self) -> StoreTraits:
        """Return the abilities of the store in this process. A process that does not own all partitions has fewer."""
        return _TRAITS if self.assignment.is_whole else _PRODUCER_TRAITS

    @property
    def partitions(self) -> Mapping[TopicPartition, Partition]:
        """The partitions that this process owns."""
        return self.assignment.partitions

    def now_ms(self) -> int:
        """Return the clock's time."""
        return self._parts.clock.now_ms()

    def seconds_until(self, at_ms: int) -> float:
        """Return the seconds from now until an instant, for a timer."""
        return self._parts.clock.seconds_until(at_ms)

    # --- opening and closing ------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if not __debug__:  # aiokafka checks the states of a transaction by assertions, which -O removes
            raise ConfigurationError(
                "python", "started with -O", "Python without -O, because -O removes checks in the Kafka client"
            )
        options = self._parts.options
        topics = await prepare(
            options.cluster,
            options.topics,
            create=options.create_topic,
            partitions=options.partitions,
            history=options.history,
        )
        await self._parts.tasks.open()
        await self._parts.writer.__aenter__()
        self.assignment.open(topics)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        tasks = self._parts.tasks.take()
        async with AsyncExitStack() as closing:  # runs every step, even if one of them fails or is cancelled
            for partition in self.partitions.values():
                closing.callback(partition.close)
            if tasks is not None:
                closing.push_async_callback(self._close_clients)
                closing.push_async_exit(tasks)
                closing.callback(self.assignment.cancel)
                await self._finish()
        self.assignment.close()

    async def _close_clients(self) -> None:
        """Close all clients, all at the same time: each may take twice `CLOSE_S` while the cluster does not answer."""
        assignment = self.assignment
        async with asyncio.TaskGroup() as tasks:
            for each in (self._positions, assignment.factory.fetcher, assignment.watch, self._parts.targets):
                name = f"aiodelay kafka closes {type(each).__name__}"
                tasks.create_task(run_to_completion(each.close(), name=name))
            await self._parts.writer.__aexit__()

    async def _finish(self) -> None:
        """Let open transactions end. Until Kafka aborts an open transaction, readers cannot read beyond it (K3)."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S), asyncio.TaskGroup() as tasks:
                for partition in self.partitions.values():
                    tasks.create_task(partition.finish())

    # --- commands -----------------------------------------------------------------------------------------

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        """Carry out commands. Commands for the same message are carried out in their order."""
        self._parts.tasks.check_open()
        if source is not None:
            return await self._intakes.store(commands, source)
        return await self._commands.apply(commands)

    async def position(self, source: str) -> int | None:
        """Return the position of a source. From now on, batches of an earlier reader of this source are refused."""
        self._parts.tasks.check_open()
        return await self._intakes.position(source)

    async def put_back(self, messages: Sequence[PutBack]) -> Sequence[Stored]:
        """Take messages back. If another process owns the partition, write a request to that process."""
        self._parts.tasks.check_open()
        return await self._put_backs.put_back(messages)

    # --- dispatching --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        """Open the dispatching role of this process, which then owns partitions."""
        self._parts.tasks.check_open()
        self.assignment.own(worker)
        await self._readiness.until_ready()
        if (problem := self._readiness.problem()) is not None:
            raise problem
        work = KafkaWork(self._parts, self._readiness, worker, lanes)
        try:
            yield work
        finally:
            work.close()

    async def instances(self) -> Sequence[Instance]:
        """List this process's workers and the other members of the topics' groups, with their partitions.

        The lanes of other members are unknown. With `member` and `members` there is no group, so other processes are
        unknown too.
        """
        instance = self._parts.options.instance
        return await instances_of(self.assignment, name=self.name, instance=instance, now_ms=self.now_ms())

    def tell_restored(self, told: Callable[[float], None] | None) -> None:
        """Set the function to call for each partition that begins to serve claims.

        Args:
            told: Takes the seconds from the assignment of the partition until it serves claims; None = call nothing.
        """
        self.assignment.told_restored = told

    def guard(self, check: Callable[[str], object]) -> None:
        """Set the check for destinations in records that other programs write.

        The check holds for partitions that this process takes over after this call.
        """
        self.assignment.factory.guard = check

    # --- status and problems ------------------------------------------------------------------------------

    def status(self) -> WorkStatus:
        """Return how many of the owned partitions are ready."""
        return self._readiness.status()

    async def missing_rights(self) -> Sequence[str]:
        """Return the rights that this process lacks, each with the command that grants the right."""
        self._parts.tasks.check_open()
        return await self._readiness.missing_rights()

    async def vanished(self) -> str:
        """Return why a topic that this process schedules into is lost; "" = no such topic is lost.

        For an owner, return "": the status of the owner reports a lost topic.
        """
        return self._readiness.lost_topic()

    async def vanished_elsewhere(self) -> str:
        """Return "", because on Kafka owners leave no note about a deleted topic."""
        return ""

    # --- whole tables -------------------------------------------------------------------------------------

    def scan_parts(self, scan: Scan) -> Sequence[Part]:
        """Return one part for each partition, up to the current end of the partition."""
        return self._scanner().parts()

    def scan_part(self, scan: Scan, part: Part) -> Iterator[Columns]:
        """Read one partition and yield its rows."""
        return self._scanner().read(scan, part)

    def _scanner(self) -> Scanner:
        return Scanner(self.cluster, self._parts.options.topics, self._parts.clock)


def open_store(url: str, *, namespace: str, clock: Clock | None) -> KafkaStore:
    """Return the store for a URL such as `kafka://host:9092/schedules`.

    Options: `create_topic=true`, `partitions` (of a topic that is created), `accept_partitions` (the new number, if a
    topic was given more partitions), `history` (a topic for the journal), `member` of `members`, `instance`, `horizon`,
    `max_pending`, `catch_up`, `index` (a directory), `timeout_ms`. Options for the login: `security`, `sasl`,
    `ca_certs`, `client_cert`, `client_key`.

    Raises:
        ConfigurationError: The URL has another form, an option is unknown or out of range, or a namespace is given.
    """
    if namespace != "default":
        raise ConfigurationError("namespace", namespace, "none on Kafka: give each application its own topic instead")
    return KafkaStore(url, clock=clock)

"""`kafka://host:9092/schedules`: compacted topics as the only database."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from itertools import count
from typing import Self, cast

from aiokafka import TopicPartition
from msgspec import Struct
from msgspec.structs import replace

from aiodelay.clock import Clock, SystemClock
from aiodelay.completion import run_to_completion
from aiodelay.core.dict_table import SERVED_WINDOW_MS, Workers
from aiodelay.errors import (
    ClosedError,
    ConfigurationError,
    StoreMismatchError,
    StoreUnavailableError,
    UnsupportedByStoreError,
    shortened,
)
from aiodelay.identifiers import new_op
from aiodelay.model import (
    Cancel,
    Command,
    DeadKey,
    Instance,
    JournalEntry,
    Lane,
    Outcome,
    Put,
    PutBack,
    Refused,
    SourcePosition,
    Stored,
    Unknown,
    WorkStatus,
)
from aiodelay.ports import StoreTraits, Work
from aiodelay.scanning import Columns, Scan
from aiodelay.timeunits import parse_duration
from aiodelay.transitions import due_of, record_of
from aiodelay.urls import UrlOptions

from . import records
from .asking import ask_to_cancel
from .client import (
    CLOSE_S,
    UNAVAILABLE,
    AbortedError,
    FencedError,
    InDoubtError,
    Outgoing,
    Written,
    log_failure,
    reason_of,
)
from .disk import Disk
from .fetcher import Fetcher
from .group import HEARTBEAT_MS, METADATA_MS, SESSION_MS, Group
from .history import read_history
from .horizon import Fetch
from .options import Cluster, read_cluster, read_topics
from .pace import Pace
from .partition import Callbacks, Partition, Place, Shared, moved_keys
from .pending_index import PendingIndex
from .positions import IntakeSession, PassedError, Positions
from .reader import Reader
from .remedies import is_missing_right, remedied
from .scanning import Part, Scanner
from .sink import NAMES, check_topic
from .targets import Targets
from .topic import LEAST_LAG_MS, missing_rights, prepare
from .topic_watch import TopicWatch
from .trail import KafkaTrail, open_trail
from .transfer import SAFETY_POLL_MS, KafkaTransfer, Transfers
from .work import KafkaWork
from .writer import Writer

__all__ = ["KafkaStore", "open_store"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

FORM = "kafka://host:9092/schedules, kafka://host:9092/schedules,others"
MAX_PARTITIONS = 1000
DAY_MS = 86_400_000
LOOK_AHEAD_S, LOOKS_A_MINUTE = 1.0, 60
READ_S = 2.0
_UNWRITTEN: tuple[type[Exception], ...] = (AbortedError, *UNAVAILABLE)
_UNBEGUN: tuple[type[Exception], ...] = (FencedError, InDoubtError, *_UNWRITTEN)

_TRAITS = StoreTraits(
    durable=True,
    conflicts=frozenset({"replace", "keep", "newer", "error", "if_revision"}),
    cancel="verdict",
    lookup="anywhere",
    safety_poll_ms=SAFETY_POLL_MS,
    positions="recorded",
    longest_lease_ms=SESSION_MS - 2 * HEARTBEAT_MS,  # its group gives its partitions away after SESSION_MS
)


_PRODUCER_TRAITS = replace(
    _TRAITS, conflicts=frozenset({"replace", "keep"}), cancel="recorded", lookup="owner", changes=False
)


class _Options(Struct, frozen=True):
    """A store's URL, read."""

    cluster: Cluster
    topics: Sequence[str]
    create_topic: bool
    partitions: int
    accept_partitions: int
    history: str
    member: int
    members: int
    instance: str
    horizon_ms: int
    max_pending: int
    catch_up: int
    index: str


def _read_url(url: str) -> _Options:
    """Read a store's URL.

    Raises:
        ConfigurationError: It is not of the known form, or an option is unknown or out of range.
        TargetError: A topic's name is none.
    """
    given = UrlOptions(url)
    cluster = read_cluster(given)
    create = given.flag("create_topic")
    partitions = given.integer("partitions", 6, 1, MAX_PARTITIONS)
    accepted = given.integer("accept_partitions", 0, 1, MAX_PARTITIONS)
    members = given.integer("members", 0, 1, MAX_PARTITIONS)
    member = given.integer("member", 0, 0, max(members - 1, 0))
    instance = given.text("instance")
    history = given.text("history")
    horizon_ms = parse_duration(
        given.text("horizon", "1h"), field=f"horizon in {given.masked}", error=ConfigurationError, least_ms=1000
    )
    max_pending = given.integer("max_pending", 10_000_000, 0, 10**12)
    catch_up = given.integer("catch_up", 0, 0, 10**9)
    index = given.text("index")
    given.finish()
    topics = read_topics(given, "url", FORM)
    for topic in topics:
        check_topic(topic, "topic in the store's URL")
    if instance and not records.is_topic(instance):
        raise ConfigurationError(f"instance in {given.masked}", shortened(instance), NAMES)
    if instance and members:
        raise ConfigurationError(f"instance in {given.masked}", "given beside members", "one of them")
    if history:
        check_topic(history, "history in the store's URL")
    if history in topics:
        raise ConfigurationError(f"history in {given.masked}", history, "a topic of its own")
    return _Options(
        cluster,
        topics,
        create,
        partitions,
        accepted,
        history,
        member,
        members,
        instance,
        horizon_ms,
        max_pending,
        catch_up,
        index,
    )


class KafkaStore(Transfers):
    """Keeps messages in compacted topics, whose partitions are shared by all processes that have opened `work`.

    What it schedules stands in the first topic. The same id in two topics is two messages: what is asked or commanded
    by id is of the first topic in which one stands.

    They are shared anew whenever a process comes or goes, by a consumer group for each topic; or, as `member` k of
    `members` n, this one owns every n-th from the k-th on. Only a process that owns all has verdicts: elsewhere a
    message may be another's, and what is asked for is written for its owner to read.

    A process that does not open it only schedules: it reads nothing and has no verdicts either.

    Args:
        url: `kafka://host:9092/schedules`, more topics after commas, with options.
        clock: Where the store reads the time; None = this machine's.

    Raises:
        ConfigurationError: The URL cannot be used.
    """

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        self._options = _read_url(url)
        self.cluster: Cluster = self._options.cluster
        self.schedules: Sequence[str] = self._options.topics
        self.name: str = self.cluster.name
        self._clock = clock or SystemClock()
        self.targets: Targets = Targets(self.cluster, self.now_ms)
        self.moving: dict[KafkaTransfer, None] = {}
        self.partitions: Mapping[TopicPartition, Partition] = {}
        self._counts: dict[str, int] = {}
        self._patience_s: dict[str, float] = {}
        self._lag_ms: dict[str, int] = {}
        self._claims = count(1)
        self._groups: dict[str, Group] = {}
        self._watch = self._new_watch()
        self._lost: dict[str, StoreMismatchError] = {}
        self._reader = Reader(self.cluster)
        self.workers: Workers = Workers()
        self._tasks: asyncio.TaskGroup | None = None
        self._running: dict[object, asyncio.Task[None]] = {}
        self._positions = Positions(self.cluster, self.schedules[0])
        self._beginning: dict[str, asyncio.Task[IntakeSession | Exception]] = {}
        self._pace = Pace(self._options.catch_up)
        self._fetcher = Fetcher(self.cluster)
        self._guard: Callable[[str], object] | None = None
        self._told_restored: Callable[[float], None] | None = None
        self._writer = Writer(self.cluster, metadata_max_age_ms=METADATA_MS)

    @property
    def traits(self) -> StoreTraits:
        """What it can and cannot do: less where it only schedules."""
        return _TRAITS if self._decides else _PRODUCER_TRAITS

    @property
    def _decides(self) -> bool:
        """Whether it owns every message, and so knows how a command ends."""
        return bool(self.partitions) and len(self.partitions) == sum(self._counts.values())

    def now_ms(self) -> int:
        """Return the clock's time."""
        return self._clock.now_ms()

    def seconds_until(self, at_ms: int) -> float:
        """Return the seconds from now until an instant, for a timer."""
        return self._clock.seconds_until(at_ms)

    async def __aenter__(self) -> Self:
        if not __debug__:  # aiokafka guards the states of a transaction by assertions
            raise ConfigurationError("python", "-O", "Python without -O, which takes away checks of the Kafka client")
        options = self._options
        topics = await prepare(
            options.cluster,
            options.topics,
            create=options.create_topic,
            partitions=options.partitions,
            history=options.history,
        )
        self._watch, self._lost = self._new_watch(), {}
        self._counts = {topic.name: topic.partitions for topic in topics}
        self._patience_s = {
            topic.name: int(topic.settings.get("delete.retention.ms", DAY_MS)) / 2000 for topic in topics
        }
        self._lag_ms = {topic.name: int(topic.settings.get("min.compaction.lag.ms", LEAST_LAG_MS)) for topic in topics}
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        await self._writer.__aenter__()
        self._watching = self._tasks.create_task(self._watch.run(), name="aiodelay kafka topics")
        return self

    def _new_watch(self) -> TopicWatch:
        return TopicWatch(self.cluster, self.schedules, self._lose)

    def _own(self, worker: str) -> None:
        """Begin to own partitions.

        Args:
            worker: What other members know this process by.

        Raises:
            ConfigurationError: There is no directory for their index.
        """
        if self._running or self._tasks is None:
            return
        if (folder := self._options.index) and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
            raise ConfigurationError(f"index in {self.name}", folder, "a directory in which files can be made")
        if not self._options.members:
            self._groups = {
                topic: Group(
                    self.cluster,
                    topic,
                    f"aiodelay.{topic}",
                    self._assign,
                    member=worker,
                    instance=self._options.instance,
                )
                for topic in self._counts
            }
        self._running[self._reader] = self._tasks.create_task(self._reader.run(), name="aiodelay kafka reader")
        for topic, group in self._groups.items():
            self._running[group] = self._tasks.create_task(group.run(), name=f"aiodelay kafka group {topic}")
        self._running[self._fetcher] = self._tasks.create_task(self._look_ahead(), name="aiodelay kafka horizon")
        if not self._groups:
            for topic, n in self._counts.items():
                self._assign(topic, range(self._options.member, n, self._options.members))

    def _assign(self, topic: str, numbers: Collection[int]) -> None:
        """Own these partitions of a topic from now on, and no others; one that stays goes on undisturbed."""
        if self._tasks is None:
            return
        if topic in self._lost:
            numbers = ()
        if not numbers:
            self._watch.doubt(topic)
        before, wanted = self.partitions, {TopicPartition(topic, n) for n in numbers if n < self._counts[topic]}
        kept = {place: each for place, each in before.items() if place.topic != topic or place in wanted}
        added = {place: self._made(place) for place in sorted(wanted - before.keys())}
        self.partitions = kept | added
        for place in before.keys() - kept.keys():
            before[place].give_up()
            self._running.pop(before[place]).cancel()
        for partition in added.values():
            name = f"aiodelay kafka partition {partition.index.name}"
            self._running[partition] = self._tasks.create_task(partition.run(), name=name)
        self._read_open()
        self.wake_all()

    def _lose(self, topic: str, what: str) -> None:
        """Stop to own partitions of a topic that was deleted, and of any later topic of its name."""
        if topic in self._lost:
            return
        then = "the topic as it was; or schedule the lost messages again, and start again"
        problem = StoreMismatchError(f"topic {topic}", f"{what}: its pending messages are gone", then)
        self._lost[topic] = problem
        log.error("%s: nothing more is delivered or changed: %s", topic, problem)
        self._assign(topic, ())
        group = self._running.pop(self._groups.get(topic), None)
        if group is not None:
            group.cancel()

    def _read_open(self) -> None:
        """Read the partitions of which it is known from where on."""
        self._reader.assign({place: each for place, each in self.partitions.items() if each.is_open})

    def _made(self, place: TopicPartition) -> Partition:
        n = self._counts[place.topic]
        fetch = partial(self._fetcher.fetch, place)
        shared = Shared(
            cluster=self.cluster,
            schedules=self.schedules,
            targets=self.targets,
            clock=self._clock,
            claims=self._claims,
            workers=self.workers,
            pace=self._pace,
            history=self._options.history,
            horizon_ms=self._options.horizon_ms,
            guard=self._guard,
        )
        callbacks = Callbacks(
            may_begin=partial(self._may_begin, place),
            silence=partial(self._silence, place.topic),
            on_change=self.wake_all,
            skip=partial(self._reader.skip, place),
            on_open=self._read_open,
            on_restored=self._on_restored,
        )
        return Partition(
            Place(place.topic, place.partition, n, self._options.accept_partitions == n),
            shared,
            callbacks,
            fetch=fetch,
            patience_s=self._patience_s[place.topic],
            disk=self._disk_of(place, fetch),
        )

    async def _may_begin(self, place: TopicPartition, is_fenced: bool) -> None:  # noqa: FBT001 - a callback
        """Return when a partition's session may begin; whoever shares partitions by number is their owner."""
        group = self._groups.get(place.topic)
        if group is not None:
            await group.may_begin(is_fenced)
        await self._watch.until_same(place)

    def _silence(self, topic: str) -> str:
        """Say why the group may have given a topic's partitions away; whoever shares them by number keeps them."""
        group = self._groups.get(topic)
        return "" if group is None else group.silence

    def tell_restored(self, told: Callable[[float], None] | None) -> None:
        """Tell of each partition from when it is owned until it serves claims, in seconds."""
        self._told_restored = told

    def _on_restored(self, seconds: float) -> None:
        if self._told_restored is not None:
            self._told_restored(seconds)

    def guard(self, check: Callable[[str], object]) -> None:
        """Judge where the records go that others write, from the next opening on."""
        self._guard = check

    def _disk_of(self, place: TopicPartition, fetch: Fetch) -> Disk | None:
        folder = self._options.index
        if not folder:
            return None
        path = os.path.join(folder, f"{place.topic}-{place.partition}.index")
        max_age_ms = min(int(self._patience_s[place.topic] * 1000), self._lag_ms[place.topic])
        return Disk(path, fetch, self._clock, max_age_ms=max_age_ms)

    async def _look_ahead(self) -> None:
        """Bring near what has come near, until cancelled; tell, once a minute, if there is too much."""
        turns = count()
        while True:
            if next(turns) % LOOKS_A_MINUTE == 0 and (full := self.fullness()):
                log.error("%s: %s", self.name, full)
            for partition in list(self.partitions.values()):
                if partition.is_ready:
                    try:
                        if await partition.horizon.follow():
                            self.wake_all()
                    except Exception as error:  # noqa: BLE001 - as in `SessionRunner.run`
                        what = f"{partition.index.name}: what comes near cannot be read"
                        log_failure(log, what, reason_of(error), error, (StoreUnavailableError,))
            await asyncio.sleep(LOOK_AHEAD_S)

    async def _until_ready(self) -> None:
        """Wait for the first share of the partitions, and until it has been read; at most as long as for answers."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.cluster.timeout_ms / 1000):
                for group in self._groups.values():
                    await group.was_assigned.wait()
        await asyncio.gather(*(partition.until_ready() for partition in self.partitions.values()))

    def status(self) -> WorkStatus:
        """Say how many of the partitions that are owned are ready.

        A process that owns none, because others own all, is ready while the topics are known to be there.
        """
        partitions = self.partitions.values()
        ready, total = sum(partition.is_ready for partition in partitions), len(partitions)
        if (problem := self._problem()) is not None:
            return WorkStatus("ended", ready, total, str(problem))
        is_assigned = all(group.was_assigned.is_set() for group in self._groups.values())
        if ready == total and is_assigned and not self._watch.doubts:
            return WorkStatus("ready", ready, total, self.fullness())
        whys = [*self._watch.doubts.values()] if ready == total else []
        return WorkStatus("loading", ready, total, next(iter([*whys, *self._whys()]), ""))

    def _whys(self) -> list[str]:
        """Return why partitions are not served, as far as they say."""
        whys = [each.why for each in self.partitions.values()]
        whys += [each.why or each.silence for each in self._groups.values()]
        return [why for why in (*whys, self._reader.why) if why]

    async def missing_rights(self) -> Sequence[str]:
        """Name the rights that this process lacks, each with the command that grants it.

        A process that only schedules needs Write on the topic that it schedules into. An owner of partitions also needs
        to read, to join the group and to begin transactions; it has tried these when this is called.
        """
        self.checked()
        if self._running:
            found = await missing_rights(self.cluster, self.schedules, ("Read", "Write"))
            found += [why for why in self._whys() if is_missing_right(why)]
        else:
            found = await missing_rights(self.cluster, self.schedules[:1], ("Write",))
        return [remedied(each, self.cluster) for each in dict.fromkeys(found)]

    def _problem(self) -> StoreMismatchError | None:
        """Return what ends the delivery of a topic, or of a partition, until the process starts again."""
        problems = [*self._lost.values(), *(each.problem for each in self._groups.values())]
        problems += [each.problem for each in self.partitions.values()]
        return next(filter(None, problems), None)

    async def vanished(self) -> str:
        """Return what happened to a topic that this process schedules into; an owner's status tells of it."""
        return "" if self._running else next(map(str, self._lost.values()), "")

    async def vanished_elsewhere(self) -> str:
        """Return nothing: owners leave no note of a deleted topic."""
        return ""

    async def __aexit__(self, *exc_info: object) -> None:
        tasks, self._tasks = self._tasks, None
        async with AsyncExitStack() as closing:  # all of it, also if it is cancelled on the way
            for partition in self.partitions.values():
                closing.callback(partition.close)
            if tasks is not None:
                closing.push_async_callback(self._close_clients)
                closing.push_async_exit(tasks)
                for task in (self._watching, *self._running.values()):
                    closing.callback(task.cancel)
                await self._finish()
        self._running.clear()
        self.partitions = {}

    async def _close_clients(self) -> None:
        """Close all clients at the same time: each may take twice `CLOSE_S` while the cluster is away."""
        async with asyncio.TaskGroup() as tasks:
            for each in (self._positions, self._fetcher, self._watch, self.targets):
                name = f"aiodelay kafka closes {type(each).__name__}"
                tasks.create_task(run_to_completion(each.close(), name=name))
            await self._writer.__aexit__()

    async def _finish(self) -> None:
        """Let transactions end: one that is left open holds up the topic's readers until Kafka aborts it (K3)."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S), asyncio.TaskGroup() as tasks:
                for partition in self.partitions.values():
                    tasks.create_task(partition.finish())

    def checked(self) -> None:
        """Refuse use while closed.

        Raises:
            ClosedError: It is not open.
        """
        if self._tasks is None:
            raise ClosedError(self.name, "closed")

    def owned(self) -> Collection[Partition]:
        """Return the partitions that can be looked into.

        Raises:
            ClosedError: It is not open.
            UnsupportedByStoreError: This process only schedules.
            StoreUnavailableError: A topic is not the one it was.
        """
        self.checked()
        for problem in self._lost.values():
            raise StoreUnavailableError(self.name, str(problem))
        if not self._running:
            raise UnsupportedByStoreError("lookup", "a process that only schedules", "a process that dispatches")
        return self.partitions.values()

    def partition_of(self, message_id: str) -> Partition:
        """Return the partition in which a message of this id stands.

        Raises:
            UnsupportedByStoreError: It is another process's.
        """
        return self._where(self._places(message_id), lambda index: index.knows(message_id))

    def partition_of_letter(self, key: DeadKey) -> Partition:
        """Return the partition in which a dead letter stands."""
        return self._where(self._places(key.id), lambda index: index.table.letters.has(key))

    def _where(self, places: Sequence[TopicPartition], is_there: Callable[[PendingIndex], bool]) -> Partition:
        """Return where a message stands, in the first topic that holds it; else where it would be put."""
        for place in places:
            found = next((each for each in self._at(place) if is_there(each.index)), None)
            if found is not None:
                return found
            self._check_owned(place)
        return self.partitions[places[0]]

    def partitions_of(self, message_id: str) -> Sequence[Partition]:
        """Return the partitions that are owned in which messages of this id may stand, in the order of the topics."""
        return [each for place in self._places(message_id) for each in self._at(place)]

    def all_partitions_of(self, message_id: str) -> Sequence[Partition]:
        """Return all partitions in which messages of this id may stand.

        Raises:
            UnsupportedByStoreError: One of them is another process's.
        """
        self.owned()
        for place in self._places(message_id):
            self._check_owned(place)
        return self.partitions_of(message_id)

    def _check_owned(self, place: TopicPartition) -> None:
        if place not in self.partitions:
            raise UnsupportedByStoreError("lookup", f"partition {place.partition}", "the process that owns it")

    def _at(self, own: TopicPartition) -> Iterator[Partition]:
        """Return a key's own partition, if it is owned, and those of its topic in which other keys stand as well."""
        if own in self.partitions:
            yield self.partitions[own]
        for place, partition in self.partitions.items():
            if partition.index.placement.is_mixed and place.topic == own.topic and place != own:
                yield partition

    def _places(self, message_id: str) -> list[TopicPartition]:
        key = records.key_of(message_id)
        return [TopicPartition(topic, records.partition_of(key, n)) for topic, n in self._counts.items()]

    def fullness(self) -> str:
        """Say, in words, that more is pending than was allowed; "" if it is not."""
        most, pending = self._options.max_pending, sum(each.index.pending for each in self.partitions.values())
        if not most or pending < most:
            return ""
        return f"{pending} messages are pending, and max_pending={most} allows no more: raise it, or add processes"

    def wake_all(self) -> None:
        """End every wait of this process."""
        self.workers.wake()
        for transfer in self.moving:
            transfer.wake()

    # --- commands -----------------------------------------------------------------------------------------

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        """Carry out commands; those of one message in order."""
        self.checked()
        if source is not None:
            assert self._tasks is not None
            storing = self._tasks.create_task(
                self._store_read(*self._recordable(commands), source), name="aiodelay kafka intake"
            )
            return await asyncio.shield(storing)  # K3
        if not self._decides:
            if commands and all(_may_be_asked(each) for each in commands):
                return await self._ask(cast("Sequence[Cancel]", commands))
            try:
                return await self._record(commands)
            except UnsupportedByStoreError as error:
                if not self._groups:
                    raise
                return [Refused("unavailable", str(error)) for _ in commands]  # until just now it owned all
        by_id: dict[str, list[int]] = {}
        full = self.fullness()
        for i, command in enumerate(commands):
            by_id.setdefault(command.id, []).append(i)
        outcomes: list[Outcome | None] = [None] * len(commands)

        async def carry_out(indices: Sequence[int]) -> None:
            for i in indices:
                outcomes[i] = await self._commanded(commands[i], full)

        async with asyncio.TaskGroup() as tasks:
            for indices in by_id.values():
                tasks.create_task(carry_out(indices))
        return [outcome for outcome in outcomes if outcome is not None]

    async def _commanded(self, command: Command, full: str) -> Outcome:
        """Carry out a command as the owner: a put in the first topic, others where the message stands."""
        places = self._places(command.id)
        if isinstance(command, Put):
            del places[1:]
        else:
            for each in self.partitions_of(command.id):
                await each.until_ready()
        try:
            partition = self._where(places, lambda index: index.knows(command.id, command.op))
        except UnsupportedByStoreError as error:
            return Refused("unavailable", str(error))  # until just now it owned all
        if full and isinstance(command, Put) and not partition.index.knows(command.id, command.op):
            return Refused("full", full)
        return await partition.commands.command(command)

    async def _store_read(
        self, outgoing: Sequence[Outgoing], answers: Sequence[Stored], source: SourcePosition
    ) -> Sequence[Outcome]:
        """Write commands as any user may, with the position of the intake that read them; never raises."""
        outcome: Outcome
        try:
            if refusal := self.fullness():
                return [Refused("full", refusal) for _ in answers]
            if refusal := await self._moved_keys():
                return [Refused("unavailable", refusal) for _ in answers]
            offsets = await self._positions.store(outgoing, source)
        except (PassedError, FencedError):
            outcome = Refused("passed")
        except InDoubtError as error:
            outcome = Unknown(reason_of(error))
        except _UNWRITTEN as error:
            outcome = Refused("unavailable", reason_of(error))
        except Exception as error:  # noqa: BLE001 - as in `SessionRunner.run`
            log_failure(log, f"{self.name}: an intake's batch", reason_of(error), error, ())
            outcome = Unknown(reason_of(error))
        else:
            await self._until_read(outgoing, offsets)
            return answers
        return [outcome for _ in answers]

    async def _until_read(self, outgoing: Sequence[Outgoing], offsets: Sequence[int]) -> None:
        """Wait until what was written has been read, as far as this process reads it and that comes soon."""
        last: dict[TopicPartition, int] = {}
        for record, offset in zip(outgoing, offsets, strict=True):
            assert record.partition is not None
            last[TopicPartition(record.topic, record.partition)] = offset
        with suppress(TimeoutError):
            async with asyncio.timeout(READ_S):
                for place, offset in last.items():
                    if place in self.partitions:
                        await self.partitions[place].until_read(offset)

    async def position(self, source: str) -> int | None:
        """Return an intake's position; whoever has taken the source in before is refused from then on."""
        self.checked()
        assert self._tasks is not None
        beginning = self._beginning.get(source)
        if beginning is None or beginning.done():
            beginning = self._tasks.create_task(self._begin_intake(source), name="aiodelay kafka intake begins")
            self._beginning[source] = beginning
        try:
            begun = await asyncio.shield(beginning)  # K3
            if isinstance(begun, Exception):
                raise begun
            return await self._positions.position(source, begun)
        except _UNBEGUN as error:
            raise StoreUnavailableError(self.name, reason_of(error)) from error

    async def _begin_intake(self, source: str) -> IntakeSession | Exception:
        """Begin to take a source in, or return why that failed; never raises."""
        try:
            return await self._positions.begin(source)
        except Exception as error:  # noqa: BLE001 - whoever waits for it gets it
            return error

    async def _record(self, commands: Sequence[Command]) -> Sequence[Outcome]:
        """Write commands as any user may; whoever owns the partitions reads them.

        Raises:
            UnsupportedByStoreError: Only an owner could carry one out; nothing was written.
        """
        outgoing, answers = self._recordable(commands)
        try:
            if refusal := await self._moved_keys():
                return [Refused("unavailable", refusal) for _ in commands]
            written = await self._writer.write(outgoing)
        except UNAVAILABLE as error:
            return [Refused("unavailable", reason_of(error)) for _ in commands]
        return [_told(each, answer) for each, answer in zip(written, answers, strict=True)]

    async def _ask(self, cancels: Sequence[Cancel]) -> Sequence[Outcome]:
        """Leave cancels to the owners; a message that is not in its own partition is looked for in all of them."""
        asked = [replace(each, op=new_op()) for each in cancels]
        everywhere = [TopicPartition(topic, number) for topic, n in self._counts.items() for number in range(n)]
        try:
            if refusal := await self._moved_keys():
                return [Refused("unavailable", refusal) for _ in cancels]
            outcomes = await ask_to_cancel(self.cluster, self._writer, {each: self._places(each.id) for each in asked})
            strays = [i for i, each in enumerate(outcomes) if each == Refused("not_found")]
            again = {replace(asked[i], op=new_op()): everywhere for i in strays}
            for i, found in zip(strays, await ask_to_cancel(self.cluster, self._writer, again), strict=True):
                outcomes[i] = found
        except UNAVAILABLE as error:
            return [Unknown(reason_of(error)) for _ in cancels]
        except StoreUnavailableError as error:
            return [Unknown(error.reason) for _ in cancels]
        return outcomes

    def _recordable(self, commands: Sequence[Command]) -> tuple[list[Outgoing], list[Stored]]:
        """Return what commands come to as any user may write them, and their answers once that is written.

        Raises:
            UnsupportedByStoreError: Only an owner could carry one out.
        """
        now, outgoing, answers = self.now_ms(), [], []
        topic, n = next(iter(self._counts.items()))
        for command in commands:
            wire, answer = _recorded(command, now)
            outgoing.append(Outgoing(topic, *wire, records.partition_of(records.key_of(command.id), n)))
            answers.append(answer)
        return outgoing, answers

    async def _moved_keys(self) -> str:
        """Say why nothing may be written: the topic is not what it was; "" if it is.

        Raises:
            KafkaError, TimeoutError, OSError: The cluster does not say.
        """
        topic, n = next(iter(self._counts.items()))
        if topic in self._lost:
            return str(self._lost[topic])
        found = await (await self._writer.start()).partitions(topic)
        return "" if found is None or found == n else str(moved_keys(topic, n, found))

    # --- what comes back ----------------------------------------------------------------------------------

    async def put_back(self, messages: Sequence[PutBack]) -> Sequence[Stored]:
        """Take messages back: those of partitions that are owned as their owner, others by asking for it in writing."""
        self.checked()
        answers = [Stored("stored", each.record.revision, each.record.due_ms) for each in messages]
        elsewhere: list[PutBack] = []
        owned: dict[str, list[int]] = {}
        for i, message in enumerate(messages):
            if self._owner_of(message) is None:
                elsewhere.append(message)
            else:
                owned.setdefault(message.record.id, []).append(i)

        async def put_back(indices: Sequence[int]) -> None:
            for i in indices:
                if (owner := self._owner_of(messages[i])) is None:
                    raise StoreUnavailableError(self.name, "the partition is another process's now")
                answers[i] = await owner.commands.put_back(messages[i])

        try:
            async with asyncio.TaskGroup() as tasks:
                if elsewhere:
                    tasks.create_task(self._ask_back(elsewhere))
                for indices in owned.values():
                    tasks.create_task(put_back(indices))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return answers

    def _owner_of(self, message: PutBack) -> Partition | None:
        """Return where a message is put, if that partition is owned."""
        return self.partitions.get(self._places(message.record.id)[0])

    async def _ask_back(self, messages: Sequence[PutBack]) -> None:
        now = self.now_ms()
        topic, n = next(iter(self._counts.items()))
        outgoing = [
            Outgoing(topic, *records.encode_back(each, now), records.partition_of(records.key_of(each.record.id), n))
            for each in messages
        ]
        try:
            written = await self._writer.write(outgoing)
            error = next((each.error for each in written if each.error is not None), None)
            if error is not None:
                raise error
        except UNAVAILABLE as error:
            raise StoreUnavailableError(self.name, reason_of(error)) from error

    # --- holds --------------------------------------------------------------------------------------------

    async def hold(self, lane: Lane, address: str | None = None) -> bool:
        """Pause a lane or an address of it, in every partition: whoever owns one reads it there."""
        return await self._set_hold(lane, address, is_held=True)

    async def release(self, lane: Lane, address: str | None = None) -> bool:
        """Resume a lane or an address of it."""
        return await self._set_hold(lane, address, is_held=False)

    async def holds(self) -> Sequence[tuple[Lane, str | None]]:
        """List what is held."""
        found = {held for partition in self.owned() for held in partition.index.inspection.holds()}
        return sorted(found, key=lambda held: (held[0], held[1] is not None, held[1] or ""))

    async def _set_hold(self, lane: Lane, address: str | None, *, is_held: bool) -> bool:
        was_held = (lane, address) in await self.holds()
        wire = records.encode_hold(lane, address, is_held=is_held)
        places = [TopicPartition(topic, i) for topic, n in self._counts.items() for i in range(n)]
        try:
            async with asyncio.timeout(self.cluster.timeout_ms / 1000):
                written = await self._writer.write([Outgoing(place.topic, *wire, place.partition) for place in places])
                for place, each in zip(places, written, strict=True):
                    if each.error is not None:
                        raise each.error
                    if place in self.partitions:
                        await self.partitions[place].until_read(each.offset)
        except UNAVAILABLE as error:
            raise StoreUnavailableError(self.name, f"held in part, or not: {reason_of(error)}") from error
        return was_held != is_held

    # --- instances ----------------------------------------------------------------------------------------

    async def instances(self) -> Sequence[Instance]:
        """List this process's workers, and the other members of the topics' groups; all with their partitions.

        What others serve is not known. Without a group, as `member` of `members`, others are not known either.
        """
        now, here = self.now_ms(), _parts(self.partitions)
        found = [
            Instance(self._options.instance or each.name, tuple(sorted(each.lanes)), each.seen_ms, here)
            for each in self.workers
            if each.seen_ms > now - SERVED_WINDOW_MS
        ]
        others: defaultdict[str, list[TopicPartition]] = defaultdict(list)
        try:
            for group in self._groups.values():
                for name, places in (await group.others()).items():
                    others[name] += places
        except UNAVAILABLE as error:
            raise StoreUnavailableError(self.name, reason_of(error)) from error
        found += [Instance(name, None, now, _parts(places)) for name, places in others.items()]
        return sorted(found, key=lambda each: each.name)

    # --- whole tables -------------------------------------------------------------------------------------

    def scan_parts(self, scan: Scan) -> Sequence[Part]:
        """Return a part for each partition, up to where it ends now."""
        return self._scanner().parts()

    def scan_part(self, scan: Scan, part: Part) -> Iterator[Columns]:
        """Read a partition."""
        return self._scanner().read(scan, part)

    def _scanner(self) -> Scanner:
        return Scanner(self.cluster, self.schedules, self._clock)

    # --- the journal --------------------------------------------------------------------------------------

    async def journal(
        self, *, message_id: str | None = None, after: int = 0, limit: int = 100
    ) -> Sequence[JournalEntry]:
        """List what the history topic holds: what became of messages here, as long as the topic keeps it."""
        self.checked()
        topic = self._history()
        return await read_history(self.cluster, topic, message_id=message_id, after=after, limit=limit)

    def trail(self) -> AbstractAsyncContextManager[KafkaTrail]:
        """Open the history topic alone; numbers are offsets."""
        return open_trail(self.cluster, self._history())

    def _history(self) -> str:
        if not self._options.history:
            raise UnsupportedByStoreError("journal", "off", "'kafka://host/schedules?history=<topic>'")
        return self._options.history

    # --- dispatching --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        """Open the dispatching role."""
        self.checked()
        self._own(worker)
        await self._until_ready()
        if (problem := self._problem()) is not None:
            raise problem
        work = KafkaWork(self, worker, lanes)
        try:
            yield work
        finally:
            work.close()


def _parts(places: Iterable[TopicPartition]) -> tuple[str, ...]:
    return tuple(f"{place.topic}/{place.partition}" for place in sorted(places))


def _may_be_asked(command: Command) -> bool:
    return isinstance(command, Cancel) and command.only is not None and command.only[1] is not None


def _recorded(command: Command, now: int) -> tuple[records.Wire, Stored]:
    """Return what a user writes, and the answer once it is written."""
    if isinstance(command, Put) and command.conflict.mode in ("replace", "keep"):
        record = record_of(command, due_of(command.due, now), now)
        wire = records.encode_record(record) if command.conflict.mode == "replace" else records.encode_keep(record)
        return wire, Stored("stored", now, record.due_ms)
    if isinstance(command, Cancel) and command.only is None:
        return records.encode_cancel(records.key_of(command.id)), Stored("recorded", 0, 0)
    what = f"conflict {command.conflict.mode}" if isinstance(command, Put) else type(command).__name__
    raise UnsupportedByStoreError("command", what, "replace, keep and cancel; or a process that owns all")


def _told(written: Written, answer: Stored) -> Outcome:
    if written.error is None:
        return answer
    return Unknown(reason_of(written.error)) if written.in_doubt else Refused("unavailable", reason_of(written.error))


def open_store(url: str, *, namespace: str, clock: Clock | None) -> KafkaStore:
    """Open `kafka://host:9092/schedules`.

    Options: `create_topic=true`, `partitions` of a topic that is created, `accept_partitions` of one that was given
    more since, `history`, a topic that is told what becomes of messages, `member` of `members`, `instance`, `horizon`,
    `max_pending`, `catch_up`, `index`, a directory, `timeout_ms`; to log in `security`, `sasl`, `ca_certs`,
    `client_cert`, `client_key`.

    Raises:
        ConfigurationError: The URL is not of this form, an option is unknown or out of range, or there is a namespace.
    """
    if namespace != "default":
        raise ConfigurationError("namespace", namespace, "none on Kafka: a topic of its own keeps an application apart")
    return KafkaStore(url, clock=clock)

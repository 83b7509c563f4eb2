"""F10: the primary dies and a replica replaces it. Each durability level loses at most what it may lose."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from itertools import product

import pytest

from aiodelay import Retry, Scheduler
from aiodelay.core.ids import new_op
from aiodelay.core.values import (
    After,
    Cancel,
    Command,
    Demand,
    Done,
    Envelope,
    LaneLimits,
    Limit,
    Outcome,
    Put,
    Query,
    Refused,
    SettleOutcome,
    SourcePosition,
    Stored,
    Unknown,
)
from aiodelay.errors import StoreUnavailableError
from aiodelay.redis import RedisStore
from aiodelay.testing import history as h
from aiodelay.testing.history import Limits, check
from tests.faults.programs.worker import Stream
from tests.faults.scene import TAKEOVER_MS, RedisScene
from tests.support.processes import PATIENCE_S
from tests.support.proxy import Proxy, proxied, proxied_by_thread
from tests.support.servers import RedisServer, offset_of, redis_programs, replicate, replicated_until_ns, start
from tests.support.slow_stores import PATIENT, opened_patiently
from tests.support.waiting import until, until_sync

LANE = "work"
LACKS_BYTES = 20_000
"""Some dozens of commands."""
REPLICATION = ("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0")


class Pair:
    """A primary and its replica, with a proxy between them."""

    def __init__(self, primary: RedisServer, replica: RedisServer, link: Proxy) -> None:
        self.primary, self.replica, self.link = primary, replica, link

    def store(self, durability: str, timeout_ms: int = 10_000) -> RedisStore:
        """A client of its own, as another process has it."""
        return RedisStore(f"{self.primary.url}?durability={durability}&timeout_ms={timeout_ms}", namespace="faults")

    def hasty(self) -> AbstractAsyncContextManager[RedisStore]:
        """A client whose commands wait 300 ms for the replica."""
        return opened_patiently(lambda: self.store("replicated:1", 300))


@pytest.fixture(params=redis_programs(), ids=lambda found: found.name)
def servers(request: pytest.FixtureRequest) -> Iterator[tuple[RedisServer, RedisServer]]:
    primary, replica = (start(request.param.program, *REPLICATION) for _ in range(2))
    yield primary, replica
    primary.stop()
    replica.stop()


@asynccontextmanager
async def paired(servers: tuple[RedisServer, RedisServer]) -> AsyncIterator[Pair]:
    primary, replica = servers
    async with proxied(primary.port) as link:
        await asyncio.to_thread(replicate, replica, link.port)
        yield Pair(primary, replica, link)


def put(message_id: str) -> Put:
    return Put(new_op(), Envelope(message_id, LANE, payload=b"p"), After(60_000))


async def do(store: RedisStore, command: Command, *, source: SourcePosition | None = None) -> Outcome:
    (outcome,) = await store.apply([command], source=source)
    return outcome


async def lacks_replica(store: RedisStore, command: Command, *, source: SourcePosition | None = None) -> None:
    """Give a command whose answer must be that no replica has it. Repeat it if a slow machine prevents an answer."""
    ends = time.monotonic() + PATIENCE_S
    while True:
        outcome = await do(store, command, source=source)
        if isinstance(outcome, Unknown) and "replicas have it" in outcome.detail:
            return
        is_slow = isinstance(outcome, Unknown) or (
            isinstance(outcome, Refused) and outcome.reason == "unavailable" and "no connection" in outcome.detail
        )
        assert is_slow, outcome
        assert time.monotonic() < ends, outcome


async def fails_without_replica(change: Callable[[], Awaitable[object]]) -> None:
    """Make a change whose error must be that no replica has it. Repeat it if a slow machine prevents an answer."""

    async def is_told() -> bool:
        with pytest.raises(StoreUnavailableError) as caught:
            await change()
        reason = str(caught.value)
        assert any(each in reason for each in ("0 of 1 replicas have it", "no answer", "no connection")), reason
        return "0 of 1 replicas have it" in reason

    await until(is_told, "the server answers in time that no replica has it")


async def ids(store: RedisStore) -> set[str]:
    return {each.record.id for each in await store.search(Query(limit=1000))}


async def fail_over(pair: Pair) -> None:
    pair.primary.kill()
    pair.replica.command("REPLICAOF", "NO", "ONE")


def test_f10_what_was_called_replicated_outlives_the_primary(servers: tuple[RedisServer, RedisServer]) -> None:
    async def play() -> None:
        async with paired(servers) as pair:
            async with (
                pair.store("replicated:1") as store,
                pair.hasty() as hasty,
                pair.store("memory") as careless,
            ):
                assert isinstance(await do(store, put("kept")), Stored)
                assert isinstance(await do(store, put("cancelled")), Stored)
                assert isinstance(await do(store, Cancel(new_op(), "cancelled")), Stored)
                pair.link.mode = "black hole"
                await lacks_replica(hasty, put("in doubt"))
                assert isinstance(await do(careless, put("lost")), Stored), "as docs/guarantees.md says of `memory`"
            await fail_over(pair)
            async with RedisStore(f"{pair.replica.url}?{PATIENT}", namespace="faults") as store:
                assert await ids(store) == {"kept"}

    asyncio.run(play())


@pytest.mark.valkey_too  # its WAIT returns at once on a connection that has written nothing
def test_f10_changes_by_an_operator_wait_for_the_replica_too(servers: tuple[RedisServer, RedisServer]) -> None:
    async def fail(payload: bytes) -> None:
        raise RuntimeError("as told")

    async def play() -> None:
        async with paired(servers) as pair:
            scheduler = Scheduler(pair.store("memory"), retry=Retry(attempts=1))
            scheduler.add_handler(fail, name=LANE)
            async with scheduler:
                for message_id in ("a", "b"):
                    await scheduler.schedule(b"p", to=f"handler:{LANE}", id=message_id, delay="0s")
                await scheduler.run_until_idle()
            async with pair.hasty() as store, pair.hasty() as again:
                async with pair.store("memory") as patient:
                    one, other = [letter.key for letter in await patient.dead_letters()]
                pair.link.mode = "black hole"
                limits = LaneLimits(whole=Limit(concurrency=1))
                changes: list[Callable[[RedisStore], Awaitable[object]]] = [
                    lambda of: of.redrive([one]),
                    lambda of: of.purge([other]),
                    lambda of: of.pause(LANE),
                    lambda of: of.resume(LANE),
                    lambda of: of.set_limits(LANE, limits, is_declared=False),
                    lambda of: of.switch_on(["append"]),
                ]
                for change, of in product(changes, (store, again)):  # the second call changes nothing
                    await fails_without_replica(partial(change, of))

    asyncio.run(play())


def test_f10_a_repeated_command_is_no_more_done_than_the_first(servers: tuple[RedisServer, RedisServer]) -> None:
    """It writes nothing of its own, on another connection: its answer must wait for the replica all the same."""

    async def play() -> None:
        async with (
            paired(servers) as pair,
            pair.hasty() as one,
            pair.hasty() as two,
            pair.store("replicated:1") as patient,
        ):
            position = SourcePosition("intake", 0, 1)
            earlier, kept = put("earlier"), put("kept")
            assert isinstance(await do(patient, earlier), Stored)
            pair.link.mode = "black hole"
            commands: list[Command] = [put("m"), Cancel(new_op(), "earlier"), Cancel(new_op(), "nothing")]
            for command in commands:
                await lacks_replica(one, command)
                await lacks_replica(two, command)
            await lacks_replica(one, kept, source=position)
            await lacks_replica(two, kept, source=position)
            pair.link.mode = "pass"
            assert [isinstance(await do(patient, command), Stored | Refused) for command in commands] == [True] * 3
            assert await do(patient, kept, source=position) == Refused("passed")
            await fail_over(pair)
            async with RedisStore(f"{pair.replica.url}?{PATIENT}", namespace="faults") as store:
                assert await ids(store) == {"m", "kept"}

    asyncio.run(play())


def test_f10_a_settlement_of_a_lost_claim_changes_no_answer_to_a_repeated_command(
    servers: tuple[RedisServer, RedisServer],
) -> None:
    """The replica stores the command anew, as another revision: this revision is the answer from then on."""

    async def play() -> None:
        async with (
            paired(servers) as pair,
            proxied(pair.primary.port) as front,
            RedisStore(f"redis://127.0.0.1:{front.port}?{PATIENT}", namespace="faults") as store,
            store.work("w", [LANE]) as work,
        ):
            assert isinstance(await do(store, put("replicated")), Stored)
            await asyncio.to_thread(replicated_until_ns, pair.primary, pair.replica)
            pair.link.mode = "black hole"
            command = Put(new_op(), Envelope("m", LANE), After(0))
            assert isinstance(await do(store, command), Stored)
            (lost,) = (await work.claim({LANE: Demand(9)}, request="r", lease_ms=15_000)).claims
            await fail_over(pair)
            front.point_to(pair.replica.port)
            while not isinstance(stored := await do(store, command), Stored):
                assert isinstance(stored, Refused | Unknown)  # the connections to the primary are gone
            assert stored.revision > lost.record.revision
            settled = await work.settle([Done("m", lost.record.revision, lost.token)])
            assert list(settled) != [SettleOutcome.SETTLED]
            assert await do(store, command) == stored

    asyncio.run(play())


def test_a_full_server_answers_repeated_commands_all_the_same(servers: tuple[RedisServer, RedisServer]) -> None:
    """`full` means surely not written: it must not be said of what was."""

    async def play() -> None:
        async with RedisStore(f"{servers[0].url}?{PATIENT}", namespace="faults") as store:
            command = put("m")
            first = await do(store, command)
            servers[0].command("CONFIG", "SET", "maxmemory", "100kb")
            assert isinstance(await do(store, put("more")), Refused)
            assert await do(store, command) == first

    asyncio.run(play())


# --- several processes, their history ---------------------------------------------------------------------


def strike(
    scene: RedisScene, replica: RedisServer, heir: RedisServer, link: Proxy, front: Proxy, *, is_careless: bool
) -> int:
    """Let the replica fall behind, kill the primary, put the replica in its place; return since when it lacked.

    If commands are acknowledged without the replica, it must lack one whose message nobody runs before the kill.
    """
    since_ns = replicated_until_ns(scene.server, replica)
    link.mode = "black hole"
    hole_ns, written = time.monotonic_ns(), offset_of(scene.server, "master_repl_offset")

    def lacks() -> bool:
        if offset_of(scene.server, "master_repl_offset") <= written + LACKS_BYTES:
            return False
        later = [each for each in scene.story().puts() if each.asked_ns > hole_ns and each.call.lane == "far"]
        return not is_careless or bool(later)

    until_sync(lacks, "the replica falls behind", PATIENCE_S)
    scene.server.kill()
    replica.command("REPLICAOF", "NO", "ONE")
    replicate(heir, replica.port)
    front.point_to(replica.port)
    scene.server = replica
    return since_ns


def broken_rules(scene: RedisScene) -> set[str]:
    """Return what the history would break if acknowledged commands were not to be lost."""
    events = h.read(scene.crew.history_path)
    for event in events:
        if isinstance(event, h.Loss):
            event.commands = False
    return {each.rule for each in check(events).violations}


@pytest.mark.parametrize("durability", ["replicated:1", "memory"])
def test_f10_a_failover_under_load_loses_what_its_level_says(redis_scene: RedisScene, durability: str) -> None:
    replica, heir = (start(redis_scene.server.program, *REPLICATION) for _ in range(2))
    try:
        with proxied_by_thread(redis_scene.server.port) as link, proxied_by_thread(redis_scene.server.port) as front:
            replicate(replica, link.port)
            redis_scene.url = f"redis://127.0.0.1:{front.port}?durability={durability}&timeout_ms=500"
            flow = Stream(seconds=5, rate=60, ids=100, seed=1, until_told=True)
            workers = [redis_scene.start(name, serve=("work",), run_ms=20, stream=flow) for name in ("a", "b")]
            for worker in workers:
                worker.line("run 40")
            is_careless = durability == "memory"
            since_ns = strike(redis_scene, replica, heir, link, front, is_careless=is_careless)
            redis_scene.crew.history.write(h.Loss(since_ns=since_ns, commands=is_careless))
            for worker in workers:
                worker.terminate()  # it gives commands for 5 s at least, and until now
            for worker in workers:
                worker.ended_well()
            assert redis_scene.judge(Limits(takeover_ms=TAKEOVER_MS)).delivered > 60
            if is_careless:  # not less either: had it been called replicated, it would have been found out
                assert "S2" in broken_rules(redis_scene)
    finally:
        replica.stop()
        heir.stop()

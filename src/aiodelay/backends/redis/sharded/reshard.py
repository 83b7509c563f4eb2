"""`reshard`: moves a namespace to another number of shards. Its processes wait meanwhile.

The steps are recorded in shard 0, so a move that was killed goes on when it is run again:

1. All shards get a layout under which no script changes anything (`ShardLayout.is_moving`).
2. The entries of each shard move to their new shards (`Mover`).
3. The number of messages is compared with the number before. From then on, the move is not repeated.
4. The processes that were alive before the move look alive again, and leases are spared for a time (`LifeSigns`).
5. All shards get the new layout, shard 0 last. From then on, the processes follow (`Follower`).

The shards may be on the nodes of a cluster, each of which may fail over at any time. The first step confirms all
earlier writes in each shard, and each write is confirmed (`MoveClient`). After a failure, the move begins again.

A mover may stand still until another one has ended the move. From the first step of a mover on, the servers refuse the
writes of earlier movers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from uuid import uuid4

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from aiodelay.backends.redis.connection.faults import Fault
from aiodelay.backends.redis.connection.locator import slot_of
from aiodelay.backends.redis.connection.options import Options, read_url
from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.records.keys import Keys, keys_of
from aiodelay.backends.redis.records.reading import features_in
from aiodelay.backends.redis.records.shards import MOST_SHARDS, ShardLayout
from aiodelay.core.features import check_known
from aiodelay.errors import (
    ConfigurationError,
    StoreMismatchError,
    StoreTooNewError,
    StoreUnavailableError,
    UnsupportedByStoreError,
)

from .intakes import carry_positions
from .life_signs import LifeSigns
from .move_client import MoveClient
from .moving import AT_ONCE, Mover, lane_of_letter
from .opening import layout_in

__all__ = ["Moved", "reshard"]

log: logging.Logger = logging.getLogger("aiodelay.redis")

LOCK_MS = 3_000
"""How long the lock lasts that keeps other movers away."""
RENEWED_S = 0.5
"""After this time, the mover renews the lock before it goes on."""
FAILOVER_S, AGAIN_S = 60.0, 0.5
"""How long a move that has begun is repeated while a server does not answer, and the pause before each repetition."""


class Moved(Struct, frozen=True):
    """The result of a move.

    Attributes:
        former: The former number of shards.
        shards: The present number of shards.
        messages: The number of messages and dead letters of the namespace.
        journal: The number of journal entries that were deleted with their shards.
        waited_ms: How long the processes of the namespace had to wait, in ms.
    """

    former: int
    shards: int
    messages: int
    journal: int = 0
    waited_ms: int = 0


class _Plan(Struct, frozen=True):
    """A move that has begun, as the field `reshard` of shard 0's `meta` has it.

    Attributes:
        former: The former number of shards.
        shards: The new number of shards.
        epoch: The new epoch.
        began_ms: The time at which the move began, in epoch ms: the smallest time of the servers of all shards.
        spared_ms: The time at which a lease must not have ended, so that it is spared after the move. It is `began_ms`,
            or the same time of the former move, if that move still spares leases.
        messages: The number of messages and dead letters; None before they are counted.
        is_moved: Whether all entries are in their new shards.
    """

    former: int
    shards: int
    epoch: int
    began_ms: int
    spared_ms: int
    messages: int | None = None
    is_moved: bool = False

    def shards_from(self, namespace: str, number: int) -> list[Keys]:
        """Return the keys of all shards from a number on, before and after the move."""
        return [Keys(namespace, shard) for shard in range(number, max(self.former, self.shards))]


async def reshard(url: str, namespace: str, shards: int, told: Callable[[int, int], object]) -> Moved:
    """Move a namespace to another number of shards, or go on with a move that was stopped.

    Args:
        url: The URL of the store.
        namespace: The namespace.
        shards: The new number of shards.
        told: Called now and then with the number of messages that were examined, and with the number of all messages.

    Raises:
        ConfigurationError: The number of shards is not allowed, or another number was begun with. Or a cluster has
            replicas, and the URL does not say that writes wait for them.
        UnsupportedByStoreError: The namespace has limits. These need one shard.
        StoreTooNewError: The namespace uses a feature that this version does not know.
        StoreMismatchError: The namespace does not exist.
        StoreUnavailableError: The server did not answer, or another mover is at work. Run it again.
    """
    options = read_url(url)
    if not 1 <= shards <= MOST_SHARDS:
        raise ConfigurationError("shards", str(shards), f"1 to {MOST_SHARDS}")
    options = replace(options, connection={**options.connection, "protocol": 2})
    return await _Reshard(options, keys_of(namespace).namespace, shards, told).run()


class _Reshard:
    def __init__(self, options: Options, namespace: str, shards: int, told: Callable[[int, int], object]) -> None:
        self._client = MoveClient(options, self._keep_lock)
        self._options, self._name, self._namespace = options, options.name, namespace
        self._shards, self._told = shards, told
        self._first = Keys(namespace)
        self._meta, self._lock = self._first.key("meta"), self._first.key("reshard")
        self._owner = uuid4().hex.encode()
        self._seen = 0
        self._renewed_s = 0.0
        self._renewing = asyncio.Lock()  # Several writes at the same time may find the lock too old.
        self._schema: bytes | None = None
        self._has_begun = False
        self._moved: Moved | None = None

    async def run(self) -> Moved:
        try:
            await self._take_lock()
            try:
                return await self._run_through_failovers()
            finally:
                with suppress(Fault):
                    if await self._client.read("GET", self._lock) == self._owner:
                        await self._client.read("DEL", self._lock)
        except Fault as fault:
            if fault.mismatch is not None:
                raise fault.mismatch from fault
            raise StoreUnavailableError(self._name, fault.reason, action="moved") from fault
        finally:
            await self._client.aclose()

    async def _run_through_failovers(self) -> Moved:
        """Move. If a server does not answer, begin again, as a move that was killed does."""
        clock, failing_s = asyncio.get_running_loop().time, 0.0
        while True:
            began_s = clock()
            try:
                return await self._run()
            except Fault as fault:
                if not failing_s or clock() - began_s > FAILOVER_S:
                    failing_s = clock()
                is_passing = fault.is_connection or fault.is_moving or fault.is_unconfirmed
                if not (self._has_begun and is_passing) or clock() - failing_s > FAILOVER_S:
                    raise
                log.warning("%s: the move was interrupted: %s; it begins again", self._name, fault.reason)
            await asyncio.sleep(AGAIN_S)

    async def _run(self) -> Moved:
        self._renewed_s = 0.0
        if self._has_begun:
            await self._keep_lock()  # before it reads the plan, which another process may change without the lock
        self._schema, written = await self._client.read("HMGET", self._meta, "schema", "reshard")
        if self._schema is None:
            raise StoreMismatchError(
                f"namespace {self._namespace!r} of {self._name}", "new", "a namespace that a process has opened"
            )
        plan = msgspec.json.decode(written, type=_Plan) if written else await self._planned(self._schema)
        if plan.former == plan.shards:
            return self._moved or Moved(plan.former, plan.shards, await self._messages(plan.shards))
        if plan.shards != self._shards:
            raise ConfigurationError(
                "shards", str(self._shards), f"{plan.shards}: a move to this number was begun and stopped"
            )
        await self._check_durability(plan)
        if not written:
            for keys in plan.shards_from(self._namespace, 0):  # Until now, no process has to wait.
                await self._client.confirm(keys)
        await self._client.take_over(self._first)
        # Race: until `take_over`, an earlier mover that stood still may have begun or ended a move.
        if await self._client.read("HMGET", self._meta, "schema", "reshard") != [self._schema, written]:
            raise self._another("is at work")
        self._has_begun = True
        if not plan.is_moved:
            plan = await self._move(plan)
        return await self._finish(plan)

    # --- before -------------------------------------------------------------------------------------------

    async def _planned(self, schema: bytes) -> _Plan:
        layout = layout_in(self._name, self._namespace, schema)
        former = layout.shards
        epoch = int(await self._client.read("HGET", self._meta, "epoch") or layout.epoch)
        if former != self._shards:
            await self._check(former)
        times = [await self._times(Keys(self._namespace, shard)) for shard in range(former)]
        began_ms, spared_ms = (min(each) for each in zip(*times, strict=True))
        return _Plan(former, self._shards, epoch + 1, began_ms, spared_ms)

    async def _times(self, keys: Keys) -> tuple[int, int]:
        """Return the time of a shard's server, and the time at which leases that are spared now must not have ended."""
        now_ms = await self._client.now_ms(keys)
        spared = await self._client.read("HGET", keys.key("meta"), "spared")
        former_ms, until_ms = map(int, spared.split()) if spared else (now_ms, 0)
        return now_ms, former_ms if now_ms < until_ms else now_ms

    async def _check_durability(self, plan: _Plan) -> None:
        """Refuse a move on nodes with replicas if its writes would not wait for them.

        The mover copies entries and deletes them then. On one server, a replica that has the deletion has the copy too.
        On two nodes, it may not.
        """
        level, _ = self._options.durability
        if not self._options.is_cluster or level == "replicated":
            return
        slots = {slot_of(each.tag) for each in plan.shards_from(self._namespace, 0)}
        for first, last, _, *replicas in await self._client.read("CLUSTER", "SLOTS"):
            if replicas and any(first <= slot <= last for slot in slots):
                allowed = "replicated:<number of replicas>: a failover during the move could lose messages otherwise"
                raise ConfigurationError(f"durability in {self._name}", level, allowed)

    async def _check(self, shards: int) -> None:
        """Refuse a namespace whose data need one shard, or a newer version of aiodelay."""
        check_known(self._name, await self._features(shards))
        for shard in range(shards):
            if (await self._client.read("HGET", Keys(self._namespace, shard).key("meta"), "limited") or b"").strip():
                allowed = "a namespace without limits (`aiodelay limit`)"
                raise UnsupportedByStoreError("a limit of a lane", "set", allowed)

    async def _freeze(self, plan: _Plan) -> None:
        moving = ShardLayout(1, plan.epoch, is_moving=True).schema
        await self._client.write("HSET", self._meta, "schema", moving, "reshard", msgspec.json.encode(plan))
        self._schema = moving.encode()
        for keys in plan.shards_from(self._namespace, 1):
            await self._client.write("HSET", keys.key("meta"), "schema", moving)
            await self._client.write("HSETNX", keys.key("meta"), "uuid", uuid4().hex)

    async def _check_frozen(self, plan: _Plan) -> None:
        """Check the data again that a process may have changed before the shards were frozen. If so, end the move."""
        try:
            await self._check(plan.former)
        except (UnsupportedByStoreError, StoreTooNewError):
            await self._publish(replace(plan, shards=plan.former), plan.shards_from(self._namespace, plan.former))
            raise

    # --- the move -----------------------------------------------------------------------------------------

    async def _move(self, plan: _Plan) -> _Plan:
        """Move all entries to their new shards. A repetition is safe."""
        await self._freeze(plan)
        messages = plan.messages
        if messages is None:
            await self._check_frozen(plan)
            messages = await self._messages(plan.former)
            plan = await self._noted(replace(plan, messages=messages))
        await self._share_features(plan)
        self._seen = 0
        for shard in range(plan.former):
            await self._mover(shard, plan.shards, messages).move()
        await carry_positions(self._client, self._namespace, plan.former, plan.shards)
        self._told(messages, messages)
        await self._count_letters(plan)
        if (found := await self._messages(plan.shards)) != messages:
            raise StoreMismatchError(
                f"number of messages of {self._name}", f"{found} after the move", f"{messages}, as before"
            )
        return await self._noted(replace(plan, is_moved=True))

    async def _features(self, shards: int) -> dict[str, str]:
        metas = [Keys(self._namespace, shard).key("meta") for shard in range(shards)]
        found = [features_in(await self._client.read("HGET", each, "features")) for each in metas]
        return {name: by for each in reversed(found) for name, by in each.items()}

    async def _share_features(self, plan: _Plan) -> None:
        """Give all shards the features of all former shards. `append` may be in use in one shard only."""
        features = await self._features(plan.former)
        check_known(self._name, features)  # A newer version may have begun this move.
        recorded = " ".join(f"{name}={by}" for name, by in features.items())
        for keys in plan.shards_from(self._namespace, 0) if recorded else ():
            await self._client.write("HSET", keys.key("meta"), "features", recorded)

    async def _noted(self, plan: _Plan) -> _Plan:
        await self._client.write("HSET", self._meta, "reshard", msgspec.json.encode(plan))
        return plan

    def _mover(self, shard: int, shards: int, messages: int = 0) -> Mover:
        async def told(examined: int) -> None:
            await self._keep_lock()
            self._seen += examined
            if examined:
                self._told(min(self._seen, messages), messages)

        return Mover(self._client, self._namespace, shard, shards, told)

    async def _messages(self, shards: int) -> int:
        keys = [Keys(self._namespace, shard) for shard in range(shards)]
        return sum([await self._client.read("HLEN", each.key(name)) for each in keys for name in ("msg", "dead")])

    async def _count_letters(self, plan: _Plan) -> None:
        """Write the number of dead letters of each lane."""
        for shard in range(plan.shards):
            keys, letters = Keys(self._namespace, shard), dict[bytes, int]()
            async for entries in self._client.scan("HSCAN", keys, keys.key("dead"), AT_ONCE):
                letters |= {name: lane_of_letter(value) for name, value in entries}
                await self._keep_lock()
            counts = Counter(letters.values())
            for number in await self._client.read("HVALS", keys.key("lanes")):
                await self._client.write("HSET", keys.key("meta"), f"dead:{int(number)}", counts[int(number)])

    # --- after --------------------------------------------------------------------------------------------

    async def _finish(self, plan: _Plan) -> Moved:
        """Delete the data of the shards that are no longer used, and end the move."""
        journal = 0
        for shard in range(plan.shards, plan.former):
            journal += await self._client.read("XLEN", Keys(self._namespace, shard).key("journal"))
            await self._mover(shard, plan.shards).remove()
        waited_ms = await self._client.now_ms(self._first) - plan.began_ms
        self._moved = Moved(plan.former, plan.shards, plan.messages or 0, journal, waited_ms)
        await self._publish(plan, plan.shards_from(self._namespace, plan.shards))
        return self._moved

    async def _publish(self, plan: _Plan, unused: Iterable[Keys]) -> None:
        """Give all shards the new layout, shard 0 last."""
        schema = ShardLayout(plan.shards, plan.epoch).schema
        later = [Keys(self._namespace, shard) for shard in range(plan.shards)]
        spared = await LifeSigns(self._client, plan.began_ms, plan.spared_ms).renew(later)
        for keys in unused:
            await self._client.write("HSET", keys.key("meta"), "schema", schema)
        for keys, own in list(zip(later, spared, strict=True))[1:]:
            fields: list[Arg] = ["schema", schema, "shards", plan.shards, "spared", own]
            await self._client.write("HSET", keys.key("meta"), *fields)
        # An empty plan and the layout are written in one step: after it, the move cannot be begun again.
        last: list[Arg] = ["schema", schema, "shards", plan.shards, "spared", spared[0], "epoch", plan.epoch]
        await self._client.write("HSET", self._meta, *last, "reshard", "")

    # --- the lock -----------------------------------------------------------------------------------------

    async def _take_lock(self) -> None:
        for _ in range(2 * LOCK_MS // 100):
            if await self._has_locked():
                return
            await asyncio.sleep(0.1)
        raise self._another("is at work")

    async def _has_locked(self) -> bool:
        return bool(await self._client.read("SET", self._lock, self._owner, "NX", "PX", LOCK_MS))

    async def _keep_lock(self) -> None:
        """Renew the lock, if the last renewal was some time ago.

        A lock may be lost, because a server failed over, or because this process stood still. Then another process may
        have ended the move.
        """
        async with self._renewing:
            now_s = asyncio.get_running_loop().time()
            if now_s >= self._renewed_s + RENEWED_S:
                await self._renew_lock()
                self._renewed_s = now_s

    async def _renew_lock(self) -> None:
        owner = await self._client.read("GET", self._lock)
        if owner == self._owner:
            await self._client.read("PEXPIRE", self._lock, LOCK_MS)
        elif owner is None and await self._client.read("HGET", self._meta, "schema") != self._schema:
            raise self._another("has ended the move")
        elif owner is not None or not await self._has_locked():
            raise self._another("has taken over")

    def _another(self, does: str) -> StoreUnavailableError:
        return StoreUnavailableError(self._name, f"another `aiodelay reshard` {does}", action="moved")

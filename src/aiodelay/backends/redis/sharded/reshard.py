"""`reshard`: moves a namespace to another number of shards. Its processes wait meanwhile.

The steps are recorded in shard 0, so a move that was killed goes on when it is run again:

1. All shards get a layout under which no script changes anything (`ShardLayout.is_moving`).
2. The entries of each shard move to their new shards (`Mover`).
3. The number of messages is compared with the number before.
4. The processes that were alive before the move look alive again, and leases are spared for a time (`LifeSigns`).
5. All shards get the new layout, shard 0 last. From then on, the processes follow (`Follower`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from aiodelay.backends.redis.connection.checks import server_time_ms
from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.faults import Fault
from aiodelay.backends.redis.connection.options import read_url
from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.records.keys import Keys, keys_of
from aiodelay.backends.redis.records.shards import MOST_SHARDS, ShardLayout
from aiodelay.errors import ConfigurationError, StoreMismatchError, StoreUnavailableError, UnsupportedByStoreError

from .intakes import carry_positions
from .life_signs import LifeSigns
from .moving import Mover, lane_of_letter
from .opening import check_deployment, layout_in

__all__ = ["Moved", "reshard"]

LOCK_MS = 3_000
"""How long the lock lasts that keeps other movers away."""
RENEWED_S = 0.5
"""After this time, the mover renews the lock before it goes on."""


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
    """A move that has begun, as the field `reshard` of shard 0's `meta` has it. First, all messages are counted."""

    former: int
    shards: int
    epoch: int
    began_ms: int
    messages: int | None = None

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
        ConfigurationError: The number of shards is not allowed, or another number was begun with.
        UnsupportedByStoreError: The namespace has limits, or is on a cluster. These need one shard.
        StoreMismatchError: The namespace does not exist.
        StoreUnavailableError: The server did not answer, or another mover is at work. Run it again.
    """
    options = read_url(url)
    if not 1 <= shards <= MOST_SHARDS:
        raise ConfigurationError("shards", str(shards), f"1 to {MOST_SHARDS}")
    check_deployment(options, shards)
    options = replace(options, connection={**options.connection, "protocol": 2})
    client = Client(options)
    try:
        return await _Reshard(client, options.name, keys_of(namespace).namespace, shards, told).run()
    except Fault as fault:
        raise StoreUnavailableError(options.name, fault.reason, action="moved") from fault
    finally:
        await client.aclose()


class _Reshard:
    def __init__(
        self, client: Client, name: str, namespace: str, shards: int, told: Callable[[int, int], object]
    ) -> None:
        self._client, self._name, self._namespace, self._shards, self._told = client, name, namespace, shards, told
        self._meta, self._lock = Keys(namespace).key("meta"), Keys(namespace).key("reshard")
        self._owner = uuid4().hex.encode()
        self._seen = 0
        self._renewed_s = 0.0

    async def run(self) -> Moved:
        await self._take_lock()
        try:
            return await self._run()
        finally:
            if await self._command("GET", self._lock) == self._owner:
                await self._command("DEL", self._lock)

    async def _run(self) -> Moved:
        schema, written = await self._command("HMGET", self._meta, "schema", "reshard")
        if schema is None:
            raise StoreMismatchError(
                f"namespace {self._namespace!r} of {self._name}", "new", "a namespace that a process has opened"
            )
        plan = msgspec.json.decode(written, type=_Plan) if written else await self._planned(schema)
        if plan.former == plan.shards:
            return Moved(plan.former, plan.shards, await self._messages(plan.shards))
        if plan.shards != self._shards:
            raise ConfigurationError(
                "shards", str(self._shards), f"{plan.shards}: a move to this number was begun and stopped"
            )
        await self._freeze(plan)
        messages = plan.messages
        if messages is None:
            await self._check_frozen(plan)
            messages = await self._messages(plan.former)
            plan = replace(plan, messages=messages)
            await self._command("HSET", self._meta, "reshard", msgspec.json.encode(plan))
        for shard in range(plan.former):
            await self._mover(shard, plan.shards, messages).move()
        await carry_positions(self._client, self._namespace, plan.former, plan.shards)
        self._told(messages, messages)
        await self._count_letters(plan)
        if (found := await self._messages(max(plan.former, plan.shards))) != messages:
            raise StoreMismatchError(
                f"number of messages of {self._name}", f"{found} after the move", f"{messages}, as before"
            )
        journal = await self._finish(plan)
        return Moved(plan.former, plan.shards, messages, journal, await self._now_ms() - plan.began_ms)

    # --- before -------------------------------------------------------------------------------------------

    async def _planned(self, schema: bytes) -> _Plan:
        layout = layout_in(self._name, self._namespace, schema)
        former = layout.shards
        epoch = int(await self._command("HGET", self._meta, "epoch") or layout.epoch)
        if former != self._shards:
            for shard in range(former):
                await self._check(shard)
        return _Plan(former, self._shards, epoch + 1, await self._now_ms())

    async def _check(self, shard: int) -> None:
        """Refuse a namespace whose data need one shard."""
        keys = Keys(self._namespace, shard)
        if (await self._command("HGET", keys.key("meta"), "limited") or b"").strip():
            raise UnsupportedByStoreError("a limit of a lane", "set", "a namespace without limits (`aiodelay limit`)")

    async def _freeze(self, plan: _Plan) -> None:
        moving = ShardLayout(1, plan.epoch, is_moving=True).schema
        await self._command("HSET", self._meta, "schema", moving, "reshard", msgspec.json.encode(plan))
        for keys in plan.shards_from(self._namespace, 1):
            await self._command("HSET", keys.key("meta"), "schema", moving)
            await self._command("HSETNX", keys.key("meta"), "uuid", uuid4().hex)

    async def _check_frozen(self, plan: _Plan) -> None:
        """Check the data again that a process may have changed before the shards were frozen. If so, end the move."""
        try:
            for shard in range(plan.former):
                await self._check(shard)
        except UnsupportedByStoreError:
            await self._publish(replace(plan, shards=plan.former), plan.shards_from(self._namespace, plan.former))
            raise

    # --- the move -----------------------------------------------------------------------------------------

    def _mover(self, shard: int, shards: int, messages: int = 0) -> Mover:
        async def told(examined: int) -> None:
            await self._keep_lock()
            self._seen += examined
            if examined:
                self._told(min(self._seen, messages), messages)

        return Mover(self._client, self._namespace, shard, shards, told)

    async def _messages(self, shards: int) -> int:
        keys = [Keys(self._namespace, shard) for shard in range(shards)]
        return sum([await self._command("HLEN", each.key(name)) for each in keys for name in ("msg", "dead")])

    async def _count_letters(self, plan: _Plan) -> None:
        """Write the number of dead letters of each lane."""
        for shard in range(plan.shards):
            keys, counts = Keys(self._namespace, shard), dict[int, int]()
            cursor: Arg = 0
            while True:
                cursor, flat = await self._command("HSCAN", keys.key("dead"), cursor, "COUNT", 300)
                for value in flat[1::2]:
                    lane = lane_of_letter(value)
                    counts[lane] = counts.get(lane, 0) + 1
                await self._keep_lock()
                if int(cursor) == 0:
                    break
            for number in await self._command("HVALS", keys.key("lanes")):
                await self._command("HSET", keys.key("meta"), f"dead:{int(number)}", counts.get(int(number), 0))

    async def _finish(self, plan: _Plan) -> int:
        """Delete the data of the shards that are no longer used, and end the move."""
        journal = 0
        for shard in range(plan.shards, plan.former):
            journal += await self._command("XLEN", Keys(self._namespace, shard).key("journal"))
            await self._mover(shard, plan.shards).remove()
        await self._publish(plan, plan.shards_from(self._namespace, plan.shards))
        return journal

    async def _publish(self, plan: _Plan, unused: Iterable[Keys]) -> None:
        """Give all shards the new layout, shard 0 last."""
        schema = ShardLayout(plan.shards, plan.epoch).schema
        later = [Keys(self._namespace, shard) for shard in range(plan.shards)]
        spared = await LifeSigns(self._client, plan.began_ms, await self._now_ms()).renew(later[0], later)
        for keys in unused:
            await self._command("HSET", keys.key("meta"), "schema", schema)
        for keys in later[1:]:
            await self._command("HSET", keys.key("meta"), "schema", schema, "shards", plan.shards, "spared", spared)
        # An empty plan and the layout are written in one step: after it, the move cannot be begun again.
        last: list[Arg] = ["schema", schema, "shards", plan.shards, "spared", spared, "epoch", plan.epoch]
        await self._command("HSET", self._meta, *last, "reshard", "")

    # --- the lock -----------------------------------------------------------------------------------------

    async def _take_lock(self) -> None:
        for _ in range(2 * LOCK_MS // 100):
            if await self._command("SET", self._lock, self._owner, "NX", "PX", LOCK_MS):
                return
            await asyncio.sleep(0.1)
        raise StoreUnavailableError(self._name, "another `aiodelay reshard` is at work", action="moved")

    async def _keep_lock(self) -> None:
        """Renew the lock, if the last renewal was some time ago."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._renewed_s + RENEWED_S:
            return
        self._renewed_s = now_s
        if await self._command("GET", self._lock) != self._owner:
            raise StoreUnavailableError(self._name, "another `aiodelay reshard` has taken over", action="moved")
        await self._command("PEXPIRE", self._lock, LOCK_MS)

    async def _now_ms(self) -> int:
        return int(await server_time_ms(self._client))

    async def _command(self, *arguments: Arg) -> Any:  # noqa: ANN401 - what the command returns
        return await self._client.command(*arguments)

"""`ShardedIntakes`: stores the commands of intakes in several shards. Each shard keeps the positions of its sources.

One step stores a shard's part of a batch and moves the shard's position to the end of the batch. If a process ends
between the shards, some shards have later positions than others. The next reader of the source begins at the smallest
position, and each shard skips the commands that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from aiodelay.backends.redis.records.keys import Keys
from aiodelay.backends.redis.records.positions import ShardPosition, carried, current
from aiodelay.backends.redis.records.shards import shard_of
from aiodelay.backends.redis.store.store import RedisStore
from aiodelay.core.values import Command, Outcome, Refused, SourcePosition, Stored, Unknown
from aiodelay.errors import ConfigurationError, StoreError

from .calls import all_of
from .move_client import MoveClient

__all__ = ["ShardedIntakes", "carry_positions"]

_Texts: TypeAlias = list[str | None]
"""The position of each shard as text; None if a shard has no position."""
KNOWN = Stored("recorded", 0, 0)
"""The outcome of a command that its shard has already, from a call whose answers are lost."""


class _Part(Struct):
    """A shard's part of a batch, and its result.

    Attributes:
        at: The indexes of the commands in the batch.
        former: The position of the shard before the step, as text.
        later: Its position after the step, as text.
        outcomes: The outcome of each command.
        failure: Why the shard has carried out no command.
        is_stored: Whether the shard has the position `former`. If not, it has none.
    """

    at: list[int]
    former: str
    later: str
    outcomes: Sequence[Outcome] = ()
    failure: Refused | Unknown | None = None
    is_stored: bool = False


class ShardedIntakes:
    """Stores the commands of intakes, and remembers the positions of their sources in each shard.

    The remembered positions may be outdated. Each script compares the position that it moves, so a call with an
    outdated position stores nothing.

    Args:
        shards: Returns the open stores of all shards, in order.
    """

    def __init__(self, shards: Callable[[], Sequence[RedisStore]]) -> None:
        self._shards = shards
        self._known: dict[str, tuple[Sequence[RedisStore], _Texts]] = {}
        self._answers: dict[str, dict[int, Outcome]] = {}  # of shards that are ahead of others, by position

    async def position(self, source: str) -> int | None:
        """Return the smallest position of the shards, or None if no shard has a position.

        Raises:
            StoreError: A shard did not answer.
        """
        shards = self._shards()
        texts = await _read(shards, source)
        self._known[source] = (shards, texts)
        return _least(texts)

    async def store(self, commands: Sequence[Command], source: SourcePosition) -> Sequence[Outcome]:
        """Carry out commands and move the positions of all shards. Return one outcome for each command, in order.

        If a shard fails and another does not, all outcomes are `Unknown`. Then some shards are ahead of others.

        Raises:
            ConfigurationError: The source names positions, but not one for each command.
        """
        if source.positions and len(source.positions) != len(commands):
            raise ConfigurationError(
                "source.positions", f"{len(source.positions)} positions", f"{len(commands)}, one for each command"
            )
        # Forget the positions for the time of this call: if it is cancelled, nobody knows which shards have moved.
        shards = self._shards()
        known, texts = self._known.pop(source.source, (shards, None))
        try:
            if texts is None or known is not shards or not _may_begin(texts, source):
                texts = await _read(shards, source.source)
        except StoreError as error:
            return [Refused("unavailable", str(error))] * len(commands)
        if not _may_begin(texts, source):
            return [Refused("passed")] * len(commands)
        if failure := await _begin(shards, texts, source):
            return [failure] * len(commands)
        parts = _parts(commands, source, texts)
        if parts is None:
            reason = "a shard has some of these commands already, and source.positions does not say which"
            return [Refused("unavailable", reason)] * len(commands)
        await _carry_out(shards, parts, commands, source)
        if all(part.failure is None for part in parts.values()):
            later = [parts[i].later if i in parts else text for i, text in enumerate(texts)]
            self._known[source.source] = (shards, later)
        return self._outcomes(commands, source, parts)

    def _outcomes(
        self, commands: Sequence[Command], source: SourcePosition, parts: Mapping[int, _Part]
    ) -> Sequence[Outcome]:
        """Return the outcomes of a batch. Remember the outcomes of some shards until all shards have the batch."""
        answers = self._answers.pop(source.source, {})
        if source.position < source.first:
            answers.clear()
        own = {i: each for part in parts.values() for i, each in zip(part.at, part.outcomes, strict=False)}
        done = [part for part in parts.values() if part.failure is None]
        if source.positions:
            answers |= {source.positions[i]: own[i] for part in done for i in part.at}
        failed = {shard: part.failure for shard, part in parts.items() if part.failure is not None}
        left = {position: each for position, each in answers.items() if failed or position > source.position}
        if left:
            self._answers[source.source] = left
        if failed:
            failure = _failure(failed, is_partial=bool(done))
            return [failure if done else own.get(i, failure) for i in range(len(commands))]
        earlier = [answers.get(each, KNOWN) for each in source.positions] or [KNOWN] * len(commands)
        return [own.get(i, each) for i, each in enumerate(earlier)]


async def _read(shards: Sequence[RedisStore], source: str) -> _Texts:
    return await all_of([each.position_text(source) for each in shards])


async def _begin(shards: Sequence[RedisStore], texts: _Texts, source: SourcePosition) -> Refused | Unknown | None:
    """Give a position to each shard that has none. Return the reason if that fails.

    Shard 0 comes first: if two readers begin at different positions, it decides. No shard gets messages before all
    shards have a position: the next reader would not know where a shard without a position begins.
    """
    if len(shards) == 1:
        return None
    begin = min(_places(texts), key=lambda each: each.position, default=ShardPosition(source.first)).text
    missing = [shard for shard, text in enumerate(texts) if text is None]
    for group in (missing[:1], missing[1:]):
        parts = {shard: _Part([], begin, begin) for shard in group}
        await _carry_out(shards, parts, (), source)
        for shard, part in parts.items():
            if part.failure is not None:
                return part.failure
            texts[shard] = begin
    return None


async def _carry_out(
    shards: Sequence[RedisStore], parts: Mapping[int, _Part], commands: Sequence[Command], source: SourcePosition
) -> None:
    """Carry out the parts of some shards, at the same time."""

    async def one(shard: int, part: _Part) -> None:
        own = [commands[i] for i in part.at]
        part.outcomes, part.failure = await shards[shard].apply_part(
            own, source=source.source, former=part.former, later=part.later, is_stored=part.is_stored
        )

    await all_of([one(shard, part) for shard, part in parts.items()])


def _parts(commands: Sequence[Command], source: SourcePosition, texts: _Texts) -> dict[int, _Part] | None:
    """Return the parts of the shards that have to move; None if it is unknown which commands a shard has."""
    places = _places(texts) or [ShardPosition(source.first)]
    is_back = source.position < source.first
    parts: dict[int, _Part] = {}
    for shard, place in enumerate(places):
        if is_back or place.position < source.position or place.position == source.first:
            later = place.back_at(source.position) if is_back else place.at(source.position)
            if len(places) == 1:
                later = replace(later, cuts=0, since=0)  # one step moves all shards
            text = texts[shard]
            parts[shard] = _Part([], text or place.text, later.text, is_stored=text is not None)
    for i, command in enumerate(commands):
        shard = shard_of(command.id, len(places))
        if shard not in parts:
            continue
        place = places[shard]
        if is_back or (place.position == source.first and not place.moved):
            parts[shard].at.append(i)
        elif not source.positions:
            return None
        elif not place.has(command.id, source.positions[i]):
            parts[shard].at.append(i)
    return parts


def _failure(failed: Mapping[int, Refused | Unknown], *, is_partial: bool) -> Refused | Unknown:
    """Return the outcome of all commands of a batch that some shards have not carried out."""
    for failure in failed.values():
        if isinstance(failure, Unknown):
            return failure
    shard, refused = next(iter(failed.items()))
    assert isinstance(refused, Refused)
    if is_partial:
        reason = " ".join(filter(None, (refused.reason, refused.detail)))
        return Unknown(f"other shards have their part; shard {shard} refuses its part: {reason}")
    return refused


def _places(texts: _Texts) -> list[ShardPosition]:
    return current([None if each is None else ShardPosition.of(each) for each in texts])


def _least(texts: _Texts) -> int | None:
    return min((each.position for each in _places(texts)), default=None)


def _may_begin(texts: _Texts, source: SourcePosition) -> bool:
    return source.continues(_least(texts))


async def carry_positions(client: MoveClient, namespace: str, former: int, shards: int) -> None:
    """Give the shards of a namespace that is being moved the positions of its former shards.

    No process changes the positions meanwhile. If the call fails half-way, it is repeated. Then some shards have a new
    position already, which says no more than the former ones.

    Args:
        client: Reads and writes the keys.
        namespace: The namespace.
        former: The former number of shards.
        shards: The new number of shards.
    """
    found: list[Mapping[bytes, bytes]] = []
    for shard in range(former):
        flat = await client.read("HGETALL", Keys(namespace, shard).key("src"))
        found.append(dict(zip(flat[::2], flat[1::2], strict=True)))
    texts: list[bytes | str] = []
    for source in sorted({source for each in found for source in each}):
        own = [each.get(source) for each in found]
        texts += [source, carried(_places([None if each is None else each.decode() for each in own])).text]
    for shard in range(shards) if texts else ():
        keys = Keys(namespace, shard)
        await client.write("HSET", keys.key("src"), *texts)
        await client.write("HSET", keys.key("meta"), "sources", len(texts) // 2)

"""Calls to several shards at the same time, and the distribution of a batch to the shards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar, cast

from aiodelay.backends.redis.records.shards import shard_of

__all__ = ["all_of", "answers_by_shard", "by_shard", "outcomes_of"]

T = TypeVar("T")
R = TypeVar("R")


async def outcomes_of(calls: Sequence[Coroutine[Any, Any, R]]) -> list[R | Exception]:
    """Make calls at the same time. Return the result or the error of each, in order.

    A cancellation cancels all calls.
    """
    found = await asyncio.gather(*calls, return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException) and not isinstance(each, Exception):
            raise each
    return cast("list[R | Exception]", found)


async def all_of(calls: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
    """Make calls at the same time, and return their results in order. If one fails, raise its error at the end."""
    if len(calls) == 1:
        return [await calls[0]]
    results: list[R] = []
    for each in await outcomes_of(calls):
        if isinstance(each, Exception):
            raise each
        results.append(each)
    return results


async def by_shard(
    items: Sequence[T],
    shards: int,
    id_of: Callable[[T], str],
    call: Callable[[int, Sequence[T]], Awaitable[Sequence[R]]],
) -> list[R]:
    """Divide a batch by the shards of its ids, and make one call for each shard. Return the results in order.

    Args:
        items: The batch.
        shards: The number of shards.
        id_of: Returns the message id of an item.
        call: Makes the call for a shard, and returns one result for each of its items, in order.
    """
    results, errors = await answers_by_shard(items, shards, id_of, call)
    for error in errors.values():
        raise error
    return cast("list[R]", results)


async def answers_by_shard(
    items: Sequence[T],
    shards: int,
    id_of: Callable[[T], str],
    call: Callable[[int, Sequence[T]], Awaitable[Sequence[R]]],
) -> tuple[list[R | None], Mapping[int, Exception]]:
    """Divide a batch as `by_shard` does, and raise no error of a shard.

    Returns:
        The results in order, None for each item of a shard that failed; and the errors by shard.
    """
    places = _places(items, shards, id_of)
    results: list[R | None] = [None] * len(items)

    async def one(shard: int, at: Sequence[int]) -> None:
        for i, result in zip(at, await call(shard, [items[i] for i in at]), strict=True):
            results[i] = result

    found = await outcomes_of([one(shard, at) for shard, at in places.items()])
    return results, {shard: each for shard, each in zip(places, found, strict=True) if isinstance(each, Exception)}


def _places(items: Sequence[T], shards: int, id_of: Callable[[T], str]) -> Mapping[int, list[int]]:
    places: dict[int, list[int]] = {}
    for i, item in enumerate(items):
        places.setdefault(shard_of(id_of(item), shards), []).append(i)
    return places

"""Carries out commands. Commands that were refused because of a move are repeated on the new shards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from aiodelay.core.values import Command, Outcome, Refused
from aiodelay.errors import StoreUnavailableError

from .following import Follower

__all__ = ["applied", "applied_from_intake"]

MOST_WAIT_S = 1.0
"""The longest wait for the end of a move. Callers repeat refused commands, and know how long."""


async def applied(
    follower: Follower, commands: Sequence[Command], apply: Callable[[Sequence[Command]], Awaitable[Sequence[Outcome]]]
) -> Sequence[Outcome]:
    """Carry out commands. Return one outcome for each command, in order.

    Args:
        follower: The shards.
        commands: The commands.
        apply: Carries out commands on the present shards, once.
    """
    until_s = asyncio.get_running_loop().time() + min(follower.wait_s, MOST_WAIT_S)
    former = follower.present
    async with former:
        outcomes = await apply(commands)
    while former.is_stale and (refused := [i for i, each in enumerate(outcomes) if _is_refused(each)]):
        try:
            await follower.take_over(former, until_s)
        except StoreUnavailableError as error:
            still = Refused("unavailable", error.reason)
            return [still if i in refused else each for i, each in enumerate(outcomes)]
        former = follower.present
        async with former:
            repeated = dict(zip(refused, await apply([commands[i] for i in refused]), strict=True))
        outcomes = [repeated.get(i, each) for i, each in enumerate(outcomes)]
    return outcomes


async def applied_from_intake(
    follower: Follower, store: Callable[[], Awaitable[Sequence[Outcome]]]
) -> Sequence[Outcome]:
    """Carry out commands of an intake. Return one outcome for each command, in order.

    The intake repeats refused commands itself: before, it asks the new shards for its position.

    Args:
        follower: The shards.
        store: Carries out the commands on the present shards, once.
    """
    former = follower.present
    async with former:
        outcomes = await store()
    if former.is_stale:
        with suppress(StoreUnavailableError):
            await follower.take_over(former, asyncio.get_running_loop().time() + MOST_WAIT_S)
    return outcomes


def _is_refused(outcome: Outcome) -> bool:
    return isinstance(outcome, Refused) and outcome.reason == "unavailable"

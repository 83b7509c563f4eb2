"""`aiodelay reshard`: moves a Redis namespace to another number of shards."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter

from aiodelay.backends.registry import open_store

from .errors import NOT_UNDERSTOOD, CommandError
from .output import confirm, print_json
from .place import Place

__all__ = ["reshard"]

STEPS = 20


async def reshard(
    url: str | None = None,
    /,
    *,
    shards: int,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="")] = False,
    place: Place = Place(),
) -> int:
    """Move a Redis namespace to another number of shards. Its processes may go on running.

    Until the move has ended, the processes wait: the namespace takes and delivers no messages. If the command is
    stopped, run it again: it goes on.

    Args:
        url: The URL of the store. Default: --store.
        shards: The new number of shards, 1 to 64.
        yes: Do not ask for confirmation.
    """
    if url is not None:
        place = replace(place, store=url)
    store = open_store(place.url, namespace=place.namespace, clock=None)
    from aiodelay.backends.redis.sharded.reshard import reshard as move  # noqa: PLC0415 - `--help` loads no backend
    from aiodelay.backends.redis.sharded.store import ShardedStore  # noqa: PLC0415 - as above

    if not isinstance(store, ShardedStore):
        raise CommandError(f"{store.name} has no shards: only a Redis namespace has some", exit_code=NOT_UNDERSTOOD)
    question = f"move namespace {place.namespace!r} of {store.name} to {shards} shards, while its processes wait"
    await confirm(question, yes=yes)
    moved = await move(place.url, place.namespace, shards, _Progress().told)
    if place.json:
        print_json(moved)
    elif moved.former == moved.shards:
        print(f"the namespace already has {_shards(moved.shards)}")
    else:
        print(f"moved {moved.messages} messages and dead letters from {_shards(moved.former)} to {moved.shards}")
        print(f"the processes of the namespace waited {moved.waited_ms / 1000:.1f} s")
        if moved.journal:
            print(f"{moved.journal} journal entries were deleted with their shards")
    return 0


class _Progress:
    """Prints the progress of a move on stderr, at each twentieth of the messages."""

    def __init__(self) -> None:
        self._printed = -1

    def told(self, examined: int, of: int) -> None:
        part = examined * STEPS // of if of else STEPS
        if part > self._printed:
            self._printed = part
            print(f"examined {examined} of {of} messages", file=sys.stderr, flush=True)


def _shards(number: int) -> str:
    return "1 shard" if number == 1 else f"{number} shards"

"""Changes one limit of a handler or sink, as the CLI and the page do."""

from __future__ import annotations

from aiodelay.core.values import Lane, Limit
from aiodelay.engine.control import lanes_and_address
from aiodelay.scheduler import Scheduler

__all__ = ["change_limit", "find_limit", "limited_lane"]


def limited_lane(what: str) -> Lane:
    """Return the name under which a store keeps the limits of a handler or sink: "mail" for "handler:mail".

    Raises:
        ConfigurationError, TargetError: No handler or sink can have that name.
    """
    return lanes_and_address(what)[0][0]


async def find_limit(scheduler: Scheduler, what: str, key: str | None) -> Limit | None:
    """Return a limit of a handler or sink: the limit with a key, or if `key` is None, the limit of all messages."""
    return next((each for each in await _limits(scheduler, what) if (each.key is None) == (key is None)), None)


async def change_limit(scheduler: Scheduler, what: str, key: str | None, new: Limit | None) -> bool:
    """Set or end one limit of a handler or sink. Its other limit stays.

    Args:
        scheduler: An open scheduler.
        what: The name of the handler or sink.
        key: None changes the limit of all messages; any key changes the limit with a key.
        new: The new limit, with a key if `key` is given; None ends the limit.

    Returns:
        Whether there was such a limit before.

    Raises:
        ConfigurationError, UnsupportedByStoreError, StoreUnavailableError: As `Scheduler.set_limits`.
    """
    found = await _limits(scheduler, what)
    others = [each for each in found if (each.key is None) != (key is None)]
    await scheduler.set_limits(what, *others, *(() if new is None else (new,)))
    return len(others) < len(found)


async def _limits(scheduler: Scheduler, what: str) -> list[Limit]:
    return list((await scheduler.limits()).get(limited_lane(what), ()))

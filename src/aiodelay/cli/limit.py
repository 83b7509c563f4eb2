"""The command `limit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from cyclopts import Parameter

from aiodelay.core.values import Lane, Limit, LimitedKey
from aiodelay.errors import cut
from aiodelay.operations.limit_change import change_limit, limited_lane
from aiodelay.operations.limit_shapes import limit_shapes, limited_key_shape

from .errors import NOT_UNDERSTOOD, CommandError
from .output import ago, print_json, print_table
from .place import Place

__all__ = ["limit"]

WHY = {"concurrency": "as many in flight as allowed", "rate": "rate", "lane": "limit of all keys", "": ""}


async def limit(
    what: str | None = None,
    /,
    *,
    key: str | None = None,
    concurrency: int | None = None,
    rate: str | None = None,
    end: Annotated[bool, Parameter(negative="")] = False,
    place: Place = Place(),
) -> None:
    """Limit an event type or a sink for all instances, or show the limits and the keys that wait.

    A limit holds at once. Attempts in flight go on. It stays until you change it, or until the code of the handler
    declares another limit than before.

    Args:
        what: An event type or a sink: payment.check, webhook. Without WHAT, the command lists all limits.
        key: Limit each key. For a sink: "address". For an event type: any name, such as "customer"; only the code gives
            messages their keys. Without it, limit all messages together.
        concurrency: Most messages in flight at once.
        rate: Most messages that begin in a time: 5/min, 1000/s, 10/5m.
        end: End the limit.
    """
    is_change = concurrency is not None or rate is not None or end
    if (what is None and (is_change or key is not None)) or (what is not None and key is not None and not is_change):
        raise CommandError("give WHAT, and --concurrency, --rate or --end", exit_code=NOT_UNDERSTOOD)
    if end and (concurrency is not None or rate is not None):
        raise CommandError("give either --end, or --concurrency and --rate", exit_code=NOT_UNDERSTOOD)
    async with place.opened() as scheduler:
        if what is not None and is_change:
            await change_limit(scheduler, what, key, None if end else Limit(key, concurrency, rate))
        lane = None if what is None else limited_lane(what)
        limits = await scheduler.limits()
        keys = [] if lane is None or lane not in limits else await scheduler.limited_keys(lane)
        now_ms = scheduler.store.now_ms()
    _print({name: found for name, found in limits.items() if lane in (None, name)}, keys, now_ms, json=place.json)


def _print(limits: Mapping[Lane, Sequence[Limit]], keys: Sequence[LimitedKey], now_ms: int, *, json: bool) -> None:
    if json:
        print_json(*(shape for what in sorted(limits) for shape in limit_shapes(what, limits[what])))
        print_json(*(limited_key_shape(each) for each in keys))
        return
    if not limits:
        print("no limits")
        return
    rows = [
        (what, each.key or "", each.concurrency or "", each.rate or "")
        for what in sorted(limits)
        for each in limits[what]
    ]
    print_table(("what", "key", "concurrency", "rate"), rows)
    if keys:
        print()
        print_table(
            ("key", "in flight", "waiting", "since", "because of", "next"), [_row(each, now_ms) for each in keys]
        )


def _row(key: LimitedKey, now_ms: int) -> tuple[object, ...]:
    name = "" if key.key is None else cut(key.key.decode("utf-8", "backslashreplace"))
    until = "" if key.until_ms is None else ago(key.until_ms, now_ms)
    since = "" if key.since_ms is None else ago(key.since_ms, now_ms)
    return name, key.running, key.waiting, since, WHY[key.why], until

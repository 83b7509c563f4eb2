"""What requests find: the schedulers by name, who may ask, and what is kept between two requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Query, Request

from aiodelay.core.validation import Targets
from aiodelay.core.values import Message
from aiodelay.operations.activity import ActivityMeter
from aiodelay.operations.queries import LatenessMeter
from aiodelay.scheduler import Scheduler

from .plans import Operations, Plans
from .problems import wrong
from .security import ApiLimits

__all__ = [
    "After",
    "Limit",
    "Opened",
    "Served",
    "Store",
    "served_of",
    "store_of",
]


@dataclass(frozen=True, slots=True)
class Opened:
    """One store of the service.

    Attributes:
        name: What requests call it.
        scheduler: Open.
        targets: Where messages may be scheduled to.
        lateness: What its journal has told so far.
        activity: What its journal has told of the last hour so far.
    """

    name: str
    scheduler: Scheduler
    targets: Targets
    lateness: LatenessMeter = field(default_factory=LatenessMeter)
    activity: ActivityMeter = field(default_factory=ActivityMeter)

    def check(self, message: Message) -> None:
        """Refuse a destination that is not allowed; what is no destination at all, the scheduler refuses.

        Raises:
            TargetNotAllowedError: Says what is.
        """
        if isinstance(message.to, str):
            self.targets.check(message.to)


@dataclass(slots=True)
class Served:
    """What the routes of one app share.

    Attributes:
        stores: By name.
        limits: How much a client may ask for.
        read_only: Nothing may be changed.
        plans: What waits to be confirmed.
        operations: Bulk operations that run, and the results of the latest.
        streams: How many streams are being read.
    """

    stores: Mapping[str, Opened]
    limits: ApiLimits
    read_only: bool
    plans: Plans = field(default_factory=Plans)
    operations: Operations = field(default_factory=Operations)
    streams: int = 0


def served_of(request: Request) -> Served:
    """Return what the app of this request has."""
    served = request.app.state.served
    assert isinstance(served, Served)
    return served


def store_of(request: Request) -> Opened:
    """Return the store that a request names.

    Raises:
        ApiError: There is none such.
    """
    stores = served_of(request).stores
    store = request.query_params.get("store") if request.scope["query_string"] else None
    if store is None and len(stores) == 1:
        return next(iter(stores.values()))
    if store is None or store not in stores:
        got = "missing" if store is None else repr(store)
        raise wrong(422, "UnknownStoreError", "store", got, ", ".join(stores))
    return stores[store]


async def _store(
    request: Request,
    store: Annotated[str | None, Query(description="Which store, where there are several.", max_length=64)] = None,
) -> Opened:
    del store  # named for the documentation alone
    return store_of(request)


async def _limit(
    request: Request,
    limit: Annotated[int | None, Query(ge=1, description="Most items; the service has a limit too.")] = None,
) -> int:
    most = served_of(request).limits.max_page
    if limit is not None and limit > most:
        raise wrong(422, "PageTooLargeError", "limit", str(limit), f"1 to {most}")
    return min(100, most) if limit is None else limit


Store = Annotated[Opened, Depends(_store)]
Limit = Annotated[int, Depends(_limit)]
After = Annotated[str | None, Query(description="The `after` of the page before.", max_length=2_000)]

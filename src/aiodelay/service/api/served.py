"""`Served`: the state that the routes of one app share, and the route parameters that find it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Query, Request

from aiodelay.core.validation import Targets
from aiodelay.core.values import Message
from aiodelay.errors import MessageIdError, shortened
from aiodelay.operations.activity import ActivityMeter
from aiodelay.operations.queries import LatenessMeter
from aiodelay.scheduler import Scheduler
from aiodelay.service.health import PROBE

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
        name: The name that requests give as `?store=`.
        scheduler: The scheduler of the store, open.
        targets: The destinations to which messages may be scheduled.
        lateness: The lateness measured from the journal.
        activity: The activity of the last hour, measured from the journal.
    """

    name: str
    scheduler: Scheduler
    targets: Targets
    lateness: LatenessMeter = field(default_factory=LatenessMeter)
    activity: ActivityMeter = field(default_factory=ActivityMeter)

    def check(self, message: Message) -> None:
        """Refuse a destination that is not allowed, and the id of the probe message.

        The scheduler itself refuses a `to` that is not a destination.

        Raises:
            TargetNotAllowedError: The destination is not allowed. The error lists the allowed destinations.
            MessageIdError: The message has the id of the probe message, which `/readyz` replaces and cancels.
        """
        if message.id == PROBE:
            raise MessageIdError("id", shortened(PROBE), "another id; this is the id of the probe message")
        if isinstance(message.to, str):
            self.targets.check(message.to)


@dataclass(slots=True)
class Served:
    """The state that the routes of one app share.

    Attributes:
        stores: The stores by name.
        limits: The limits on requests.
        read_only: Whether the service refuses every change.
        plans: The plans of bulk actions that wait for their confirmation.
        operations: The bulk operations that run, and the results of the operations that have ended last.
        streams: The number of streams that are being read.
    """

    stores: Mapping[str, Opened]
    limits: ApiLimits
    read_only: bool
    plans: Plans = field(default_factory=Plans)
    operations: Operations = field(default_factory=Operations)
    streams: int = 0


def served_of(request: Request) -> Served:
    """Return the shared state of the app that answers this request."""
    served = request.app.state.served
    assert isinstance(served, Served)
    return served


def store_of(request: Request) -> Opened:
    """Return the store that a request names.

    Raises:
        ApiError: The request names no store of this service.
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
    store: Annotated[
        str | None, Query(description="The name of the store, if the service has several.", max_length=64)
    ] = None,
) -> Opened:
    del store  # declared only so that the OpenAPI document lists the parameter
    return store_of(request)


async def _limit(
    request: Request,
    limit: Annotated[
        int | None, Query(ge=1, description="The most items to return. The service sets an upper limit.")
    ] = None,
) -> int:
    most = served_of(request).limits.max_page
    if limit is not None and limit > most:
        raise wrong(422, "PageTooLargeError", "limit", str(limit), f"1 to {most}")
    return min(100, most) if limit is None else limit


Store = Annotated[Opened, Depends(_store)]
Limit = Annotated[int, Depends(_limit)]
After = Annotated[str | None, Query(description="The `after` of the previous page.", max_length=2_000)]

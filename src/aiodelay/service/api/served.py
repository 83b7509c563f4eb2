"""What requests find: the schedulers by name, who may ask, and what is kept between two requests."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Query, Request

from aiodelay.clock import Clock, SystemClock
from aiodelay.inputs import Targets
from aiodelay.messages import Message
from aiodelay.model import DeadKey
from aiodelay.queries import LatenessMeter
from aiodelay.scheduler import Scheduler

from .problems import ApiError, wrong
from .security import ApiLimits

__all__ = [
    "PLAN_MS",
    "After",
    "Limit",
    "Opened",
    "Plan",
    "Plans",
    "Served",
    "Store",
    "served_of",
    "store_of",
]

PLAN_MS = 300_000
PLANS = 64


@dataclass(frozen=True, slots=True)
class Opened:
    """One store of the service.

    Attributes:
        name: What requests call it.
        scheduler: Open.
        targets: Where messages may be scheduled to.
        lateness: What its journal has told so far.
    """

    name: str
    scheduler: Scheduler
    targets: Targets
    lateness: LatenessMeter = field(default_factory=LatenessMeter)

    def check(self, message: Message) -> None:
        """Refuse a destination that is not allowed; what is no destination at all, the scheduler refuses.

        Raises:
            TargetNotAllowedError: Says what is.
        """
        if isinstance(message.to, str):
            self.targets.check(message.to)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a caller may confirm, once: an action on exactly what was found.

    Attributes:
        action: What is done.
        by: Who may confirm it.
        store: In which store.
        ids: To which messages.
        letters: Or to which dead letters.
        options: Of the action.
    """

    action: str
    by: str
    store: str
    ids: Sequence[str] = ()
    letters: Sequence[DeadKey] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The ids of what it is done to."""
        return list(self.ids) or [key.id for key in self.letters]


class Plans:
    """Plans, for a while; the oldest give way to new ones."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._plans: OrderedDict[str, tuple[int, Plan]] = OrderedDict()

    def add(self, plan: Plan) -> str:
        """Return what confirms it."""
        token = secrets.token_urlsafe(16)
        self._plans[token] = self._clock.monotonic_ms() + PLAN_MS, plan
        while len(self._plans) > PLANS:
            self._plans.popitem(last=False)
        return token

    def take(self, token: str, *, by: str, store: str) -> Plan:
        """Return a plan, once; raises as `find`."""
        plan = self.find(token, by=by, store=store)
        del self._plans[token]
        return plan

    def find(self, token: str, *, by: str, store: str) -> Plan:
        """Return a plan.

        Raises:
            ApiError: There is none such, of this caller and this store.
        """
        ends_ms, plan = self._plans.get(token, (0, None))
        if plan is None or (plan.by, plan.store) != (by, store) or ends_ms < self._clock.monotonic_ms():
            raise ApiError(404, "PlanNotFoundError", "nothing to confirm here: it was done, or is forgotten; ask again")
        return plan


@dataclass(slots=True)
class Served:
    """What the routes of one app share.

    Attributes:
        stores: By name.
        limits: How much a client may ask for.
        read_only: Nothing may be changed.
        plans: What waits to be confirmed.
        streams: How many streams are being read.
    """

    stores: Mapping[str, Opened]
    limits: ApiLimits
    read_only: bool
    plans: Plans = field(default_factory=Plans)
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

"""The arguments of a `Partition`: its place, the settings of all partitions of a store, and functions to call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from itertools import count
from typing import NamedTuple

from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.pending.rate_limit import RateLimit
from aiodelay.backends.kafka.topics.targets import Targets
from aiodelay.core.dict_table.table import Workers
from aiodelay.errors import StoreTooNewError
from aiodelay.ports.clock import Clock

__all__ = ["Callbacks", "Place", "Shared"]


class Place(NamedTuple):
    """One partition among those of its topic.

    Attributes:
        topic: The schedules topic.
        number: The partition's number.
        partitions: How many partitions the topic has.
        is_accepted: The user has confirmed this count, also against the count that the partition holds.
    """

    topic: str
    number: int
    partitions: int
    is_accepted: bool = False

    @property
    def name(self) -> str:
        """The topic and the number, for logs."""
        return f"{self.topic}/{self.number}"


class Shared(NamedTuple):
    """The settings of all partitions of a store.

    Attributes:
        cluster: Where the topics are.
        schedules: The topics that hold the store's schedules.
        targets: Which topics take messages.
        clock: Where the time is read.
        claims: Numbers for claims.
        workers: The dispatching roles that this process has opened.
        pace: How fast long overdue messages leave.
        history: The topic for the entries of the journal; "" = none.
        horizon_ms: How far ahead an index holds messages whole.
        guard: Refuses a destination to which other programs' messages may not go; None = all are allowed.
    """

    cluster: Cluster
    schedules: Collection[str]
    targets: Targets
    clock: Clock
    claims: count[int]
    workers: Workers
    pace: RateLimit
    history: str
    horizon_ms: int
    guard: Callable[[str], object] | None = None


class Callbacks(NamedTuple):
    """The functions that a partition calls.

    Attributes:
        may_begin: Returns when a session may begin; its argument says whether another owner may have fenced the last
            session off.
        silence: Says why the group may have given the partition away; "" while this process surely has it.
        on_change: Called when workers may find something new to claim.
        skip: Called with the offset at which the reader goes on.
        on_open: Called when the partition knows where reading begins.
        on_restored: Called once the partition serves claims, with the seconds since this process came to own it.
        on_too_new: Called when a feature is in use that this version does not know.
    """

    may_begin: Callable[[bool], Awaitable[None]]
    silence: Callable[[], str]
    on_change: Callable[[], None]
    skip: Callable[[int], None]
    on_open: Callable[[], None]
    on_restored: Callable[[float], None]
    on_too_new: Callable[[StoreTooNewError], None]

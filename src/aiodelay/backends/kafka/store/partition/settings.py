"""The arguments of a `Partition`: its place, the settings of all partitions of the store, and its callbacks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from itertools import count
from typing import NamedTuple

from aiodelay.backends.kafka.client import ClockCheck
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.pending.rate_limit import RateLimit
from aiodelay.backends.kafka.topics.targets import Targets
from aiodelay.core.dict_table.table import Workers
from aiodelay.errors import StoreTooNewError
from aiodelay.ports.clock import Clock

__all__ = ["Callbacks", "Place", "Shared"]


class Place(NamedTuple):
    """One partition, and the number of partitions of its topic.

    Attributes:
        topic: The schedules topic.
        number: The partition's number.
        partitions: The number of partitions of the topic.
        is_accepted: Whether the user accepts this number of partitions, even if another number is recorded.
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
        cluster: The cluster of the topics.
        schedules: The schedules topics of the store.
        targets: Knows which topics take messages.
        clock: The clock of the store.
        clock_check: Compares this clock with the clocks of the brokers.
        claims: Gives the numbers that make the tokens of claims differ.
        workers: The dispatching roles that this process has opened.
        pace: Limits how fast long overdue messages leave.
        history: The history topic, for the entries of the journal; "" = none.
        horizon_ms: The time ahead within which the index keeps whole messages in memory.
        guard: Raises an error for a destination that messages of other programs may not have; None = all are allowed.
    """

    cluster: Cluster
    schedules: Collection[str]
    targets: Targets
    clock: Clock
    clock_check: ClockCheck
    claims: count[int]
    workers: Workers
    pace: RateLimit
    history: str
    horizon_ms: int
    guard: Callable[[str], object] | None = None


class Callbacks(NamedTuple):
    """The functions that a partition calls.

    Attributes:
        may_begin: Waits until a session may begin. Its argument says whether another owner may have fenced off the
            last session.
        silence: Returns why the group may have given the partition away; "" while this process certainly owns it.
        on_change: Called when workers may find new messages to claim.
        skip: Called with the offset from which the reader must go on.
        on_open: Called when the partition knows where reading begins.
        on_restored: Called when the partition serves claims for the first time, with the seconds since its assignment.
        on_too_new: Called when a feature is in use that this version does not know.
    """

    may_begin: Callable[[bool], Awaitable[None]]
    silence: Callable[[], str]
    on_change: Callable[[], None]
    skip: Callable[[int], None]
    on_open: Callable[[], None]
    on_restored: Callable[[float], None]
    on_too_new: Callable[[StoreTooNewError], None]

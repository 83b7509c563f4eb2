"""Abilities that only some stores have. `isinstance` tells whether a store has an ability."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

from aiodelay.core.values import Registered, WorkStatus

__all__ = ["Bounded", "Guarded", "Identified", "Lists", "Loads", "Registry", "Restricted", "Upgradable"]


@runtime_checkable
class Loads(Protocol):
    """A store that must read its data before it serves claims. It may still read after `work` has opened."""

    def status(self) -> WorkStatus:
        """Return how much of the data the store has read. It may be called while `work` is being opened."""
        ...

    def tell_restored(self, told: Callable[[float], None] | None) -> None:
        """Set a function to call when a part of the store begins to serve claims; None removes the function.

        Args:
            told: Called for each part, with the seconds that the reading of the part took.
        """
        ...


@runtime_checkable
class Guarded(Protocol):
    """A store into which other programs write messages directly, without a scheduler's checks."""

    def guard(self, check: Callable[[str], object]) -> None:
        """Make a dead letter of each message from another program whose destination is not allowed.

        Args:
            check: Called with `<sink>:<address>`. It raises `TargetNotAllowedError` for a destination to refuse.
        """
        ...


@runtime_checkable
class Restricted(Protocol):
    """A store whose server grants rights to each user."""

    async def missing_rights(self) -> Sequence[str]:
        """Return the rights that this process needs and lacks, each with its remedy.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        ...


@runtime_checkable
class Bounded(Protocol):
    """A store whose server has a limit for the size of its data. At the limit, it takes nothing more."""

    async def fill(self) -> float | None:
        """Return the used part of the limit: 0 to 1, at times slightly more; None if there is no limit.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        ...


@runtime_checkable
class Identified(Protocol):
    """A store that notices when its data are deleted or replaced while it is open."""

    async def vanished(self) -> str:
        """Return a description of the loss of the store's data; "" while the data are there.

        If a store finds that its data are gone, it leaves a note for other processes; see `vanished_elsewhere`.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        ...

    async def vanished_elsewhere(self) -> str:
        """Return the note that another process left within the last minute, because its data were gone; "" if none did.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        ...


@runtime_checkable
class Lists(Protocol):
    """A store whose server also holds lists that serve as destinations."""

    async def lengths(self, destinations: Collection[str]) -> Mapping[str, int]:
        """Return the number of elements in each named list. A name that is not a list of this server is left out.

        Args:
            destinations: The names of the lists, in the form `<sink>:<address>`.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        ...


@runtime_checkable
class Registry(Protocol):
    """A store that knows the registered consumers of the topics and logs on its server, and the lag of each."""

    async def registered(self, topic: str | None = None) -> Sequence[Registered]:
        """List consumers, ordered by topic, kind and name.

        Args:
            topic: Only consumers of this topic; None = of all topics.

        Raises:
            TargetError: No topic can have that name.
            StoreUnavailableError: The store did not answer.
        """
        ...


@runtime_checkable
class Upgradable(Protocol):
    """A store that processes of several versions share. Its data record which optional features are in use.

    `aiodelay.core.features` lists the features that this version knows. While an unknown feature is in use,
    `Work.claim`, `Work.tidy` and the opening of `work` raise `StoreTooNewError` (V1). Commands, settlements and
    renewals still work.
    """

    async def features(self) -> Mapping[str, str]:
        """Return the features in use, each with the version of aiodelay that switched it on.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        ...

    async def switch_on(self, names: Collection[str]) -> None:
        """Record that features are in use from now on. A feature that is already in use keeps its record.

        Raises:
            StoreUnavailableError: The store did not answer. Some features may be recorded; repeating is safe.
        """
        ...

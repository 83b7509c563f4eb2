"""Abilities that only some stores have: `isinstance` tells whether a store has one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

from aiodelay.core.values import Registered, WorkStatus

__all__ = ["Bounded", "Guarded", "Identified", "Lists", "Loads", "Registry", "Restricted", "Upgradable"]


@runtime_checkable
class Loads(Protocol):
    """A store that has to be read before it serves claims; that may take longer than opening `work` should."""

    def status(self) -> WorkStatus:
        """Say how far that is, also while `work` is being opened."""
        ...

    def tell_restored(self, told: Callable[[float], None] | None) -> None:
        """From now on tell of each part that begins to serve claims how many seconds that took; None: nobody."""
        ...


@runtime_checkable
class Guarded(Protocol):
    """A store into which others write without asking."""

    def guard(self, check: Callable[[str], object]) -> None:
        """Refuse what others address to where it may not go: it becomes a dead letter.

        Args:
            check: Is given `<sink>:<address>`, and raises `TargetNotAllowedError`.
        """
        ...


@runtime_checkable
class Restricted(Protocol):
    """A store whose server grants rights to each user."""

    async def missing_rights(self) -> Sequence[str]:
        """Name the rights that this process needs and lacks, each followed by its remedy.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...


@runtime_checkable
class Bounded(Protocol):
    """A store whose server takes nothing more from a certain size on."""

    async def fill(self) -> float | None:
        """Return how much of the room is used, 0 to 1 and somewhat more; None if it has no bound.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...


@runtime_checkable
class Identified(Protocol):
    """A store that notices when its data are deleted or replaced while it is open."""

    async def vanished(self) -> str:
        """Return what happened to the data that this store was opened on; "" while they are there.

        A store that finds its data gone leaves a note where others can read it: see `vanished_elsewhere`.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...

    async def vanished_elsewhere(self) -> str:
        """Return what another process has noted of its data within the last minute; "" if there is no such note.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...


@runtime_checkable
class Lists(Protocol):
    """A store on whose server lists stand that messages go to."""

    async def lengths(self, destinations: Collection[str]) -> Mapping[str, int]:
        """Return how many elements those lists hold that are named; what is no list here is left out.

        Args:
            destinations: `<sink>:<address>`.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...


@runtime_checkable
class Registry(Protocol):
    """A store that knows the consumers registered with topics and logs beside it, and how far each is behind."""

    async def registered(self, topic: str | None = None) -> Sequence[Registered]:
        """List consumers, by topic, kind and name.

        Args:
            topic: Only of this one.

        Raises:
            TargetError: No topic can have that name.
            StoreUnavailableError: No answer.
        """
        ...


@runtime_checkable
class Upgradable(Protocol):
    """A store that processes of several versions share: its data record which optional features are in use.

    `aiodelay.core.features` says which features this version knows. `Work.claim`, `Work.tidy` and the opening of `work`
    raise `StoreTooNewError` while a feature is in use that this version does not know (V1). Commands, settlements and
    renewals go on.
    """

    async def features(self) -> Mapping[str, str]:
        """Return the features in use, each with the version of aiodelay that switched it on.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...

    async def switch_on(self, names: Collection[str]) -> None:
        """Record features as in use from now on; a feature that is in use already keeps its record.

        Raises:
            StoreUnavailableError: No answer. Some may be recorded; repeating is safe.
        """
        ...

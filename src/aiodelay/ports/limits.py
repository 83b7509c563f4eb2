"""`Limits`: a store that delivers the messages of a lane within limits, over all processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from aiodelay.core.values import Lane, LaneLimits, LimitedKey

__all__ = ["Limits"]


@runtime_checkable
class Limits(Protocol):
    """A store that keeps limits. A claim takes no message beyond the limits of its lane (C1).

    A message counts as in flight from its claim until the claim is settled or lapses. A claim on a message that was
    replaced counts too. Messages beyond a limit wait aside, and the keys of a lane take turns (C2): then S9 holds for
    the messages of each key.
    """

    async def set_limits(self, lane: Lane, limits: LaneLimits, *, is_declared: bool) -> None:
        """Set the limits of a lane, also while messages are in flight. Limits without any number end them.

        Args:
            lane: The lane.
            limits: The new limits.
            is_declared: Whether a program's code declares the limits, at its start. The store then sets them only if
                the last declaration for this lane was another one. So a change by an operator stays until the code
                changes.

        Raises:
            StoreUnavailableError: The store did not answer. Repeating is safe.
        """
        ...

    async def limits(self, *, is_declared: bool = False) -> Mapping[Lane, LaneLimits]:
        """Return the limits of all lanes that have any.

        Args:
            is_declared: Return instead the limits that code declared last. An operator may have changed or ended them.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        ...

    async def limited_keys(self, lane: Lane, *, limit: int = 100, key: bytes | None = None) -> Sequence[LimitedKey]:
        """List keys of a lane that have messages in flight or waiting because of a limit, most waiting messages first.

        Args:
            lane: The lane.
            limit: Most keys to return, 1 to 1,000.
            key: Return only this key of a lane that has a limit by key; None = all keys.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        ...

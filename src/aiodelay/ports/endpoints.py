"""`Endpoints`: a store with sinks and sources of its own, because its server or cluster holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from .sink import Sink
from .source import Source

__all__ = ["Endpoints"]


@runtime_checkable
class Endpoints(Protocol):
    """A store with sinks and sources of its own. A scheduler of this store has them without any setting."""

    @property
    def sinks(self) -> Sequence[Sink]:
        """The store's own sinks, each with a different name."""
        ...

    @property
    def sources(self) -> Sequence[Source]:
        """The store's own sources, each with a different name."""
        ...

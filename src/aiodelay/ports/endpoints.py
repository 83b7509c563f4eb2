"""`Endpoints`: sinks and sources that a store brings along, because its server or cluster holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from .sink import Sink
from .source import Source

__all__ = ["Endpoints"]


@runtime_checkable
class Endpoints(Protocol):
    """A store that brings sinks and sources along. A scheduler has them without settings for them."""

    @property
    def sinks(self) -> Sequence[Sink]:
        """The sinks, each with a different name."""
        ...

    @property
    def sources(self) -> Sequence[Source]:
        """The sources, each with a different name."""
        ...

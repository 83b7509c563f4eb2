"""`Endpoints`: the sinks and sources that a store brings along, because they stand on its server or cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from .sink import Sink
from .source import Source

__all__ = ["Endpoints"]


@runtime_checkable
class Endpoints(Protocol):
    """A store that brings sinks and sources along: a scheduler has them without their being given to it."""

    @property
    def sinks(self) -> Sequence[Sink]:
        """The sinks, each with another name."""
        ...

    @property
    def sources(self) -> Sequence[Source]:
        """The sources, each with another name."""
        ...

"""`TransferBench`: the base class of the suite for transfers, and the short methods of its tests."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar
from uuid import uuid4

import pytest

from aiodelay.core.values import After, Demand, Done, Put, Record, Settlement, Stored, Transferred
from aiodelay.ports import Sink, Store, Transfer

from .stage import Bench, Stage

__all__ = ["MOST_WAIT_MS", "RULE", "Moves", "TransferBench", "ended"]

RULE: Mapping[str, str | int] = {"e": 60_000}
MOST_WAIT_MS = 2_000
"""The longest time until a store tries a blocked destination again, in milliseconds."""


class Moves:
    """The store of a stage and one of its sinks, with short methods for the tests.

    `here` and `there` are two addresses of the sink. Puts go to `here` by default.
    """

    def __init__(self, suite: TransferBench, stage: Stage, *, limit: int = 0) -> None:
        assert isinstance(stage.store, Transfer)
        self.stage: Stage = stage
        self.store: Transfer = stage.store
        self.suite: TransferBench = suite
        self.sink: Sink = suite.make_sink(stage.store, limit=limit)
        own = uuid4().hex
        self.here: str = f"here-{own}"
        self.there: str = own[:8]

    def put(self, message_id: str, due_ms: int = 0, *, address: str = "", **fields: object) -> Put:
        """Return a put with a new op for an address of the sink."""
        place = address or self.here
        return self.stage.put(message_id, After(due_ms), lane=self.sink.name, address=place, **fields)  # type: ignore[arg-type]

    async def stored(self, *puts: Put) -> Stored:
        """Apply puts, which the store must store. Return the last outcome."""
        return await self.stage.stored(*puts)

    async def move(
        self,
        demand: Demand = Demand(500),  # noqa: B008 - frozen
        settlements: Sequence[Settlement] = (),
        *,
        traces: int = 0,
    ) -> Transferred:
        """Move messages once, as far as the demand allows."""
        with self.store.transferring(self.sink) as moves:
            return await moves.transfer(demand, settlements, traces=traces)

    async def move_all(self) -> int:
        """Move messages until no more can be moved now. Return the number of moved messages."""
        moved = 0
        with self.store.transferring(self.sink) as moves:
            for _ in range(100):
                transferred = await moves.transfer(Demand(500))
                moved += transferred.moved
                if transferred.next_due_ms is None or transferred.next_due_ms > transferred.now_ms:
                    return moved
        raise AssertionError("after 100 transfers there are still due messages to move")

    async def arrived(self, address: str = "") -> list[Record]:
        """Return the records at an address, in order."""
        return list(await self.suite.arrived(self.stage.store, self.sink, address or self.here))

    async def ids(self, address: str = "") -> list[str]:
        """Return the ids of the messages at an address, in order."""
        return [record.id for record in await self.arrived(address)]


def ended(record: Record, then: int | None, outcome: str = "delivered") -> Done:
    """Return the settlement that ends one occurrence of a series."""
    return Done(record.id, record.revision, record.due_ms, then, outcome)  # type: ignore[arg-type]


class TransferBench(Bench):
    """The base class of the suite for transfers. It makes the sinks, and reads and changes their destinations."""

    has_limit: ClassVar[bool] = True
    """Whether a destination can be full. False skips the tests of full destinations."""

    @abstractmethod
    def make_sink(self, store: Store, *, limit: int) -> Sink:
        """Return a sink that the store reaches exactly once.

        Args:
            store: The open store.
            limit: The most messages that a destination holds; 0 = any number.
        """

    @abstractmethod
    async def arrived(self, store: Store, sink: Sink, address: str) -> Sequence[Record]:
        """Return the records at a destination, in order."""

    @abstractmethod
    async def clear(self, store: Store, sink: Sink, address: str) -> None:
        """Remove everything from a destination, so that it has room."""

    @abstractmethod
    async def spoil(self, store: Store, sink: Sink, address: str) -> None:
        """Make an empty destination refuse every message until `clear`, for example by data of a wrong type."""

    def moves(self, stage: Stage, *, limit: int = 0) -> Moves:
        """Open a transfer on the store of a stage."""
        if limit and not self.has_limit:
            pytest.skip(f"{stage.store.name} has no destinations that can be full")
        return Moves(self, stage, limit=limit)

"""`SqliteWork`: the object with which one worker claims, settles and tidies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from aiodelay.core.features import VersionCheck
from aiodelay.core.values import (
    Claim,
    Claimed,
    Demand,
    Lane,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    Tidied,
    WorkStatus,
)
from aiodelay.core.wakeup import WakeUp
from aiodelay.ports.clock import Clock

from . import claims, settling, upkeep
from .connection import Failure
from .pulse import SqlitePulse, WriteApart
from .tables import Tables

__all__ = ["STEP_SIZE", "SqliteWork", "Write"]

T = TypeVar("T")

STEP_SIZE = 500
"""The size of a claim or of a step of housekeeping as a `Job`. It counts towards the writer's limit for a batch."""


class Write(Protocol):
    """A function that runs another function in a transaction, as `Handle.write` does."""

    async def __call__(
        self,
        run: Callable[[Tables], T],
        *,
        size: int = 1,
        is_durable: bool = True,
        committed: Callable[[T], object] | None = None,
        failed: Callable[[Failure], object] | None = None,
    ) -> T:
        """Run the function in a transaction, and return its answer."""
        ...


class SqliteWork:
    """Claims, settles and tidies for one worker.

    The methods run on the event loop. They pass functions to `write`, and these functions run in the writer's thread.
    Only the event loop's thread and the writer's thread change this object.

    Args:
        write: A function that runs a function in a transaction.
        write_apart: A function that runs a function in a transaction, for a caller in another thread. The caller blocks
            until the transaction has ended.
        worker: The worker id.
        clock: The clock of the store.
        counter: The counter that gives numbers for the tokens of this process's claims.
        pulse: The sign of life of the worker.
        held: The claims of the worker, which the pulse knows too.
        poll_ms: The longest wait in ms.
    """

    def __init__(
        self,
        write: Write,
        write_apart: WriteApart,
        worker: str,
        clock: Clock,
        counter: claims.ClaimCounter,
        *,
        pulse: SqlitePulse,
        held: settling.HeldClaims,
        poll_ms: int,
    ) -> None:
        self._write, self._write_apart, self._worker, self._clock, self._counter = (
            write,
            write_apart,
            worker,
            clock,
            counter,
        )
        self.pulse: SqlitePulse = pulse
        self._poll_s = poll_ms / 1000
        self.wakeup: WakeUp = WakeUp()
        self._held = held
        self._given: _Given | None = None
        self._turn = 0
        self._version = VersionCheck()

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        given = _Given(request)
        wanted = dict(demand)

        def run(tables: Tables) -> Claimed:
            tables.check_features()
            before = self._given
            if before is not None and before.request == request:
                left = claims.claim_again(tables, wanted, before.claims, before.numbers)
                if left.claims or before.is_certain:
                    given.claims, given.numbers = before.claims, before.numbers
                    return left
            claimed, given.numbers = claims.claim(
                tables,
                wanted,
                worker=self._worker,
                holder=self.pulse.holder,
                lease_ms=lease_ms,
                turn=self._turn + 1,
                number=self._counter.next(),
            )
            given.claims = claimed.claims
            return claimed

        def committed(claimed: Claimed) -> None:
            self._turn += given.claims is claimed.claims
            self._given = given
            self._held.add(given.claims, given.numbers)

        def failed(failure: Failure) -> None:
            if failure.is_in_doubt:
                given.is_certain = False
                self._given = given

        with self._version.noted():
            return await self._write(run, size=STEP_SIZE, is_durable=False, committed=committed, failed=failed)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        return await self._write(
            lambda tables: settling.settle(tables, settlements, self._held),
            size=len(settlements),
            committed=lambda _: self._held.drop(settlements),
        )

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        return await self._write(
            lambda tables: settling.renew(tables, renewals),
            size=len(renewals),
            is_durable=False,
            committed=lambda outcomes: self._held.renewed(renewals, outcomes),
        )

    async def wait(self, *, until_ms: int | None) -> None:
        seconds = self._poll_s
        if until_ms is not None:
            seconds = min(seconds, self._clock.seconds_until(until_ms))
        await self.wakeup.wait(seconds)

    def wake(self) -> None:
        self.wakeup.set()

    def clear(self) -> None:
        self.wakeup.clear()

    async def tidy(self, lanes: Collection[Lane], *, limit: int) -> Tidied:
        def run(tables: Tables) -> Tidied:
            tables.check_features()
            return upkeep.tidy(tables, self._worker, lanes, limit)

        with self._version.noted():
            return await self._write(run, size=STEP_SIZE, is_durable=False)

    def beat(self, ids: Collection[str]) -> None:
        self._write_apart(lambda tables: tables.trials.beat(self._worker, ids), is_durable=False)

    def status(self) -> WorkStatus:
        return self._version.status()


class _Given:
    """The answer to the last claim, for a repetition of the claim.

    `is_certain` is False if the outcome of the claim's commit is unknown. The leases may then be in the file or not.
    """

    __slots__ = ("claims", "is_certain", "numbers", "request")

    def __init__(self, request: str) -> None:
        self.request, self.is_certain = request, True
        self.claims: Sequence[Claim] = ()
        self.numbers: Sequence[int] = ()

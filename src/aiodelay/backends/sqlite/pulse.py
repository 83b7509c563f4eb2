"""`SqlitePulse`: the sign of life of one worker in a file, by which others notice that its process has ended."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol, TypeVar

from aiodelay.core.pulse import PULSE_MS, QUIET_MS
from aiodelay.core.values import Renewal, RenewOutcome, Settlement, SettleOutcome
from aiodelay.errors import AiodelayError
from aiodelay.ports.clock import SystemClock
from aiodelay.ports.pulse import Step

from .claims import return_claims
from .settling import HeldClaims, renew, settle
from .tables import Tables
from .worker_lock import WorkerLock, other_lock

__all__ = ["SqlitePulse", "WriteApart"]

T = TypeVar("T")

log: logging.Logger = logging.getLogger("aiodelay.sqlite")

RETURNED_AT_ONCE = 60


class WriteApart(Protocol):
    """A function that runs another function in a transaction, as `Handle.write_apart` does."""

    def __call__(
        self,
        run: Callable[[Tables], T],
        *,
        size: int = 1,
        is_durable: bool = True,
        committed: Callable[[T], object] | None = None,
    ) -> T:
        """Run the function in a transaction, and return its answer. Block the thread meanwhile."""
        ...


class SqlitePulse:
    """The lock of one worker at one opening of the store, and its look at the locks of others.

    Nobody declares a process dead that holds its lock. So this process may always begin runs, and needs no new
    incarnation.

    Args:
        path: The path of the database.
        ns: The number of the namespace. A process only looks at the workers of its own namespace.
        write_apart: A function that runs a function in a transaction, for a caller in another thread.
        held: The claims of the worker.

    Attributes:
        holder: The number of the worker. Its claims name it.
    """

    def __init__(self, path: str, ns: int, write_apart: WriteApart, held: HeldClaims) -> None:
        self.holder: int = int.from_bytes(os.urandom(6), "big")
        database = os.path.realpath(path)  # SQLite names its own files after the same path
        self._directory, self._prefix = f"{database}-workers", f"{ns}-"
        self._name = f"{self._prefix}{self.holder:012x}"
        self._lock = WorkerLock(database, self._directory, self._name)
        self._write_apart, self._held = write_apart, held
        self._clock, self._wake = SystemClock(), threading.Event()
        self._has_changed = self._is_quiet = self._has_warned = False

    # --- for any thread -----------------------------------------------------------------------------------

    def take_lock(self) -> None:
        """Take the lock of this worker. Call this before the first claim. Without a lock, its leases decide."""
        why = self._lock.hold()
        if why and not self._has_warned:
            log.warning("if this process ends, its messages wait for the end of their leases: %s", why)
        self._has_warned = bool(why)

    def changed(self) -> None:
        """Note that a process has written to the database: there may be other workers, or claims."""
        self._has_changed = True  # First: the thread reads it after it has set `_is_quiet`.
        if self._is_quiet:
            self._wake.set()

    @property
    def is_calling(self) -> bool:
        """False: no call names an incarnation that may be over."""
        return False

    def may_begin(self) -> bool:
        """Return True: nobody can have declared this process dead."""
        return True

    def restart(self) -> None:
        """Do nothing: this process is never refused."""

    def wake(self) -> None:
        """End the current or the next `wait`."""
        self._wake.set()

    # --- on the thread ------------------------------------------------------------------------------------

    def step(self, tokens: Collection[int]) -> Step:
        """Hold the lock, and return the messages of workers whose processes have ended.

        If this process holds no claims, sees no other worker, and nobody writes, the next step waits for a write.
        """
        has_changed, self._has_changed = self._has_changed, False
        self.take_lock()
        has_others = self._look_at_others(self._clock.monotonic_ms() + PULSE_MS)
        self._is_quiet = not (tokens or has_others or has_changed)
        if self._is_quiet and self._has_changed:  # Race: a write since this step began must not wait for the next one.
            self._is_quiet = False
        return Step(QUIET_MS if self._is_quiet else PULSE_MS)

    def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        """Extend leases while the event loop is blocked."""
        return self._write_apart(
            lambda tables: renew(tables, renewals),
            size=len(renewals),
            is_durable=False,
            committed=lambda outcomes: self._held.renewed(renewals, outcomes),
        )

    def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        """End claims while the event loop is blocked."""
        return self._write_apart(
            lambda tables: settle(tables, settlements, self._held),
            size=len(settlements),
            committed=lambda _: self._held.drop(settlements),
        )

    def wait(self, ms: int) -> None:
        """Wait for the next step, at most `ms`. A write to the database ends a long wait."""
        self._wake.wait(ms / 1000)
        self._wake.clear()

    def leave(self) -> None:
        """Give up the lock. From then on, the claims of this worker end by their leases alone."""
        self._lock.leave()

    def _look_at_others(self, by_ms: int) -> bool:
        """Return the messages of workers whose processes have ended, until a time. Return whether others are left."""
        has_others = False
        for name in self._other_names():
            path = os.path.join(self._directory, name)
            with other_lock(path) as found:
                is_over = found.is_free and (not found.has_ended or self._return_claims(name, by_ms))
                if is_over:
                    self._remove(path)
                has_others |= not is_over
        return has_others

    def _other_names(self) -> Iterator[str]:
        try:
            names = os.listdir(self._directory)
        except OSError:
            return
        for name in names:
            if name.startswith(self._prefix) and name != self._name:
                yield name

    def _return_claims(self, name: str, by_ms: int) -> bool:
        """Return the messages of a worker. Return whether none is left."""
        try:
            holder = int(name.removeprefix(self._prefix), 16)
        except ValueError:
            return True
        total, count = 0, RETURNED_AT_ONCE
        try:
            while count == RETURNED_AT_ONCE and self._clock.monotonic_ms() < by_ms:
                count = self._write_apart(
                    lambda tables: return_claims(tables, holder, RETURNED_AT_ONCE),
                    size=RETURNED_AT_ONCE,
                    is_durable=False,
                )
                total += count
        except AiodelayError as error:
            log.debug("returning the messages of a process that has ended failed: %r", error)
            count = RETURNED_AT_ONCE
        if total:
            log.warning("a process has ended; %d of its messages were returned", total)
        return count < RETURNED_AT_ONCE

    def _remove(self, path: str) -> None:
        try:
            os.unlink(path)
        except OSError as error:
            log.debug("%r cannot be deleted: %r", path, error)

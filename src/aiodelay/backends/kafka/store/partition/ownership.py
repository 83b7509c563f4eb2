"""`Ownership`: knows whether this process serves a partition, and why not. All parts of a `Partition` ask it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from aiodelay.backends.kafka.client import FencedError, InDoubtError
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.topics.group import SESSION_MS
from aiodelay.core.wakeup import WakeUp
from aiodelay.errors import StoreMismatchError, StoreUnavailableError

from .read_progress import ReadProgress
from .session import Session

__all__ = ["Ownership"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")


class Ownership:
    """The state of an owner, from the assignment of the partition until this process gives it up.

    Args:
        name: The topic and the number of the partition, for logs.
        cluster: The cluster of the partition.
        progress: The partition's index.
        silence: Returns why the group may have given the partition away; "" while this process certainly owns it.
        to_write: Wakes the writer.
    """

    why: str
    is_given_up: bool
    session: Session

    def __init__(
        self, name: str, cluster: Cluster, progress: ReadProgress, silence: Callable[[], str], to_write: WakeUp
    ) -> None:
        self.name = name
        self._cluster, self._progress, self._silence, self._to_write = cluster, progress, silence, to_write
        self.session = Session()
        self.why = ""
        """The reason why the partition does not serve; "" if no reason is known."""
        self.problem: StoreMismatchError | None = None
        """The error that stops the partition until the process starts again."""
        self.is_given_up = False
        self._serves = False
        self._last_read_s = asyncio.get_running_loop().time()
        self._over: FencedError | InDoubtError | None = None
        self._became_ready = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        """Whether the partition's messages may be claimed and changed."""
        if self.problem is not None:
            return False
        far = self._progress.index.state.far
        return self._serves and not self.was_away() and not self._silence() and not far.problem

    # --- sessions -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a session: forget the error that ended the last session."""
        self._over = None

    def has_barrier(self, offset: int) -> None:
        """Note the offset of the session's barrier."""
        self.session = Session(self._progress.index.state.read_to).with_barrier(offset)

    def has_read(self) -> None:
        """Note how far the index has read."""
        self.session = self.session.with_read(self._progress.index.state.read_to)

    def serve(self) -> None:
        """Begin to serve claims and commands."""
        self._serves = True
        self._became_ready.set()

    def check_over(self) -> None:
        """Raise the error of a session that `end_at_once` has ended.

        Raises:
            FencedError, InDoubtError: The session has ended.
        """
        if self._over is not None:
            raise self._over

    def end_at_once(self, why: FencedError | InDoubtError) -> None:
        """End the running session, wherever it waits now."""
        self._over = why
        self._to_write.set()
        self._progress.was_read.set()

    def end(self) -> None:
        """Serve nothing until the next session is ready."""
        self.session, self._serves = Session(self._progress.index.state.read_to), False
        if self.problem is None:
            self._became_ready.clear()

    # --- the end of ownership -----------------------------------------------------------------------------

    def refuse(self, problem: StoreMismatchError) -> None:
        """Stop serving until the process starts again, and log why."""
        if self.problem is None:
            log.error("%s: nothing more is delivered or changed: %s", self.name, problem)
        self.stop(problem)

    def stop(self, problem: StoreMismatchError) -> None:
        """Stop serving until the process starts again. If there are several problems, the first one is kept."""
        if self.problem is None:
            self.problem, self.why = problem, str(problem)
        self._to_write.set()
        self._became_ready.set()

    def give_up(self) -> None:
        """Give the partition up."""
        self.is_given_up = True
        self._became_ready.set()
        self._progress.end()

    # --- a suspended process ------------------------------------------------------------------------------

    def note_reading(self, now_s: float) -> None:
        """Note that this process has read the partition now."""
        self._last_read_s = now_s

    def was_away(self) -> bool:
        """Say whether this process was suspended for so long that another owner may have taken over."""
        return asyncio.get_running_loop().time() - self._last_read_s > SESSION_MS / 1000

    # --- waiting ------------------------------------------------------------------------------------------

    async def until_ready(self) -> bool:
        """Wait until a session is ready, at most for the store's timeout. Return whether a session is ready."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._cluster.timeout_ms / 1000):
                while not (self.is_ready or self.is_given_up or self.problem is not None):
                    self._became_ready.clear()
                    await self._became_ready.wait()
        return self.is_ready

    async def until_known(self) -> None:
        """Wait until the index knows all messages. Do not wait for a partition with a problem: it serves no more.

        Raises:
            StoreUnavailableError: The partition was not read in time.
        """
        if not await self.until_ready() and self.problem is None:
            self.check_ready()

    def check_ready(self) -> None:
        """Refuse a call while the partition does not serve.

        Raises:
            StoreUnavailableError: Names the reason.
        """
        if not self.is_ready:
            raise self.unavailable("the partition is being read")

    def unavailable(self, reason: str) -> StoreUnavailableError:
        """Return the error for a call. Its text is why the partition does not serve, or `reason` if this is unknown."""
        return StoreUnavailableError(self._cluster.name, self.why or reason)

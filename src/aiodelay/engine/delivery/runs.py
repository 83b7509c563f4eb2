"""`Run` and `Runs`: the runs of one handler that have begun and now wait, and the handler's time limit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from aiodelay.errors import HandlerTimeoutError
from aiodelay.handlers.spec import HandlerSpec

from .lease_book import Held

__all__ = ["Run", "Runs"]

log: logging.Logger = logging.getLogger("aiodelay.handlers")


@dataclass(slots=True)
class Run:
    """A run of a handler that has begun and now waits.

    Attributes:
        held: The claim of the message.
        started_s: The start of the run, in the time of the event loop.
        rest: The rest of the run, to await.
        task: The runner that awaits the rest; None until a runner does.
        timed_out: Whether the run has exceeded the handler's time limit.
        cancels: How often this object has cancelled the run.
        others: The other messages of the run, if it is the run of a batch.
    """

    held: Held
    started_s: float
    rest: Awaitable[Any]
    task: asyncio.Task[None] | None = None
    timed_out: bool = False
    cancels: int = 0
    others: Sequence[Held] = ()

    @property
    def messages(self) -> list[Held]:
        """The claims of all messages of the run."""
        return [self.held, *self.others]

    def cancel(self) -> None:
        """Cancel the coroutine where it waits. If the handler runs in a thread, cancel only the wait for the thread."""
        assert self.task is not None
        self.cancels += 1
        self.task.cancel()

    def leave(self) -> None:
        """Close a coroutine that ignores cancellation. A thread or a task for which the coroutine waits may go on."""
        with contextlib.suppress(Exception):
            cast("Generator[Any, Any, Any]", self.rest).close()
        self.cancel()


class Runs:
    """The runs of one handler that wait, in the order of their starts. Ends runs that exceed the time limit.

    Args:
        spec: The handler.
    """

    __slots__ = ("_runs", "_spec", "_timer")

    def __init__(self, spec: HandlerSpec) -> None:
        self._spec = spec
        self._runs: dict[int, Run] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(list(self._runs.values()))

    def of(self, held: Held) -> Run | None:
        """Return the waiting run of a message, or None."""
        return self._runs.get(id(held))

    def add(self, run: Run, loop: asyncio.AbstractEventLoop) -> None:
        """Add a run that begins to wait."""
        self._runs[id(run.held)] = run
        if self._spec.timeout_ms is not None and self._timer is None:
            self._timer = loop.call_at(run.started_s + self._spec.timeout_ms / 1000, self._time_out)

    def remove(self, run: Run) -> None:
        """Remove a run that has ended."""
        del self._runs[id(run.held)]

    def failure_of(self, run: Run, error: asyncio.CancelledError) -> BaseException | None:
        """Return the failure of a cancelled run; None if the engine has stopped the run, which is no failure."""
        task = asyncio.current_task()
        if task is not None and task.cancelling() > run.cancels:
            raise error  # not a cancellation of the run: the scheduler itself ends
        if run.timed_out:
            assert self._spec.timeout_ms is not None
            timeout = HandlerTimeoutError(self._spec.name, self._spec.timeout_ms)
            timeout.__cause__ = error  # the traceback shows where the handler waited
            return timeout
        return None if run.cancels else error

    def _time_out(self) -> None:
        """End the runs whose time is up. All runs have the same limit."""
        self._timer = None
        assert self._spec.timeout_ms is not None
        loop = asyncio.get_running_loop()
        for run in self._runs.values():
            ends = run.started_s + self._spec.timeout_ms / 1000
            if ends > loop.time():
                self._timer = loop.call_at(ends, self._time_out)
                return
            if not run.timed_out:
                self._end_late(run)

    def _end_late(self, run: Run) -> None:
        run.timed_out = True
        if self._spec.is_coroutine:
            run.cancel()
        else:
            log.warning(
                "%s exceeded its timeout of %d ms in a thread, which cannot be stopped: "
                "message %s stays in flight until the handler returns",
                self._spec.name,
                self._spec.timeout_ms,
                run.held.claim.record.id,
            )

"""`supervise`: the parent process of `aiodelay run --workers` and `--reload`. It starts, restarts and drains workers.

A worker is a process that dispatches.
"""

from __future__ import annotations

import asyncio
import logging
import os
from asyncio.subprocess import Process
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .errors import CommandError
from .signals import SAME_S, end_by, handled_numbers, log_end

__all__ = ["follow", "supervise"]

log: logging.Logger = logging.getLogger("aiodelay.cli")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Seconds until an ended worker is started again: the first pause, and the longest pause after repeated ends."""
STEADY_S = 60.0
"""Seconds after which a running worker counts as healthy. If it ends later, the pause is `FIRST_PAUSE_S` again."""


async def supervise(commands: Sequence[Sequence[str]], *, reload: bool) -> None:
    """Keep workers running until a signal asks for the end, then drain the workers. A later signal kills them.

    Args:
        commands: The command line of each worker.
        reload: Restart the workers when a Python file below the working directory changes. With `reload`, a worker that
            ends by itself is started again only at the next change.

    Raises:
        CommandError: `reload` needs the package watchfiles, which is not installed.
    """
    changed, stop = asyncio.Event(), asyncio.Event()
    lifeline, ours = os.pipe()
    crew = _Crew(lifeline, restarts=not reload)

    def kill() -> None:
        crew.kill()

    with os.fdopen(lifeline), os.fdopen(ours, "w"), _signals(stop, kill) as later:
        async with asyncio.TaskGroup() as tasks:
            if reload:
                tasks.create_task(_watch(changed, stop))
            while not stop.is_set():
                changed.clear()
                crew = _Crew(lifeline, restarts=not reload)
                await crew.run(commands, stop, changed)
        if later:  # inside the block: its handlers catch further signals, so exactly `later[0]` ends this process
            end_by(later[0])


def follow(lifeline: int, stop: asyncio.Event) -> None:
    """Set an event when the parent process has ended for any reason.

    Args:
        lifeline: The reading end of a pipe. Only the parent process holds the other end, so the pipe closes when the
            parent process ends.
        stop: The event to set.
    """
    loop = asyncio.get_running_loop()

    def end() -> None:
        loop.remove_reader(lifeline)
        log.warning("the process that started this worker has ended; the worker drains")
        stop.set()

    loop.add_reader(lifeline, end)


class _Crew:
    """The workers between two restarts of the program."""

    def __init__(self, lifeline: int, *, restarts: bool) -> None:
        self._lifeline, self._restarts = lifeline, restarts
        self._processes: set[Process] = set()
        self._ending = asyncio.Event()

    def terminate(self) -> None:
        """Ask all running workers to drain and end."""
        self._ending.set()
        for process in self._processes:
            if process.returncode is None:
                process.terminate()

    def kill(self) -> None:
        """Kill all running workers."""
        for process in self._processes:
            if process.returncode is None:
                process.kill()

    async def run(self, commands: Sequence[Sequence[str]], *ends: asyncio.Event) -> None:
        """Keep the workers running until one of the events is set, then wait until they have drained."""
        async with asyncio.TaskGroup() as tasks:
            for command in commands:
                tasks.create_task(self._keep_one([*command, "--lifeline", f"{self._lifeline}"]))
            waiting = [tasks.create_task(_wait(end)) for end in ends]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            self.terminate()

    async def _keep_one(self, command: Sequence[str]) -> None:
        loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
        while not self._ending.is_set():
            began_s = loop.time()
            code = await self._run_one(command)
            if self._ending.is_set():
                return
            if not self._restarts:
                log.error("a worker ended with exit code %d; aiodelay starts it again when a file changes", code)
                await self._ending.wait()
                return
            if loop.time() - began_s >= STEADY_S:
                pause_s = FIRST_PAUSE_S
            log.error("a worker ended with exit code %d; aiodelay starts it again in %g s", code, pause_s)
            try:
                async with asyncio.timeout(pause_s):
                    await self._ending.wait()
            except TimeoutError:
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _run_one(self, command: Sequence[str]) -> int:
        """Run a worker to its end. It has its own process group, so that Ctrl-C reaches only this parent process."""
        process = await asyncio.create_subprocess_exec(*command, process_group=0, pass_fds=[self._lifeline])
        self._processes.add(process)
        try:
            if self._ending.is_set():
                process.terminate()
            return await process.wait()
        finally:
            self._processes.discard(process)
            if process.returncode is None:
                process.kill()


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def _watch(changed: asyncio.Event, stop: asyncio.Event) -> None:
    try:
        from watchfiles import PythonFilter, awatch  # noqa: PLC0415 - only `--reload` needs it
    except ModuleNotFoundError:
        raise CommandError("--reload needs watchfiles; install it with: pip install 'aiodelay[cli]'") from None
    async for changes in awatch(".", watch_filter=PythonFilter(), stop_event=stop):
        log.info("%s changed; restarting", ", ".join(sorted({Path(path).name for _, path in changes})))
        changed.set()


@contextmanager
def _signals(stop: asyncio.Event, on_later: Callable[[], object]) -> Iterator[list[int]]:
    """Set an event at the first signal, and yield the list of later signals.

    A later signal comes at least `SAME_S` after the first signal. At each later signal, call `on_later`. At the first
    later signal, also log that the process ends at once.
    """
    loop, later = asyncio.get_running_loop(), list[int]()
    first_s: float | None = None

    def on_signal(number: int) -> None:
        nonlocal first_s
        if first_s is None:
            first_s = loop.time()
            stop.set()
        elif loop.time() - first_s >= SAME_S:
            on_later()  # at each later signal: a worker may have started since the last signal
            if not later:
                log_end(number)
            later.append(number)

    numbers = handled_numbers()
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield later
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)

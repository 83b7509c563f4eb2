"""`aiodelay run MODULE:SCHEDULER`: a process that dispatches until a signal stops it."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import pkgutil
import sys
import threading
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from difflib import get_close_matches
from types import ModuleType
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from aiodelay import AiodelayError, Scheduler
from aiodelay.errors import kind_of
from aiodelay.operations.text_log import log_as_text

from .crew import follow, supervise
from .errors import NOT_UNDERSTOOD, CommandError, ungrouped
from .signals import stop_signals

__all__ = ["find_scheduler", "run"]

log: logging.Logger = logging.getLogger("aiodelay.cli")

LEAVE_S = 2.0
MOST_WORKERS = 1000
LAST_PORT = 65_535


def run(
    target: str,
    /,
    *,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative="")] = False,
    verbose: Annotated[bool, Parameter(name=["--verbose", "-v"], negative="")] = False,
    workers: Annotated[int, Parameter(validator=Number(gte=1, lte=MOST_WORKERS))] = 1,
    reload: Annotated[bool, Parameter(negative="")] = False,
    metrics_port: Annotated[int | None, Parameter(validator=Number(gte=0, lte=LAST_PORT))] = None,
    metrics_host: str = "127.0.0.1",
    lifeline: Annotated[int | None, Parameter(show=False)] = None,
) -> None:
    """Dispatch and handle until SIGTERM or Ctrl-C, then drain.

    A drain stops claiming, and lets messages in flight end within the scheduler's `drain` time. After this time, the
    remaining messages in flight go back to the store. A signal that comes more than 0.3 s after the first signal ends
    the process at once. In this case, messages in flight are delivered again when their leases have ended.

    Args:
        target: The scheduler, as MODULE:OBJECT, such as shop:scheduler. The working directory is searched first.
        quiet: Log only warnings and errors.
        verbose: Also log details of aiodelay's work.
        workers: The number of processes. A process that ends is started again.
        reload: Restart when a Python file in or below the working directory changes. For development.
        metrics_port: Serve metrics for Prometheus at this port, under /metrics. The second worker uses the next port,
            and so on. 0 = any free port for each worker.
        metrics_host: The address of the metrics port. The port needs no token.
        lifeline: For a worker: drain when the other end of this pipe is closed.
    """
    if metrics_port is not None and metrics_port + workers - 1 > LAST_PORT:
        text = (
            f"--metrics-port {metrics_port} leaves no port for the last of {workers} workers: ports end at {LAST_PORT}"
        )
        raise CommandError(text, exit_code=NOT_UNDERSTOOD)
    scheduler = None if reload else find_scheduler(target)
    # Set up logging after the import: if the application sets up its own logging, that setup must stay.
    log_as_text(logging.WARNING if quiet else logging.INFO)
    if verbose:
        logging.getLogger("aiodelay").setLevel(logging.DEBUG)
    if scheduler is not None and workers == 1:
        with _emitting(metrics_host, metrics_port):
            asyncio.run(_dispatch(scheduler, target, lifeline))
        return
    if scheduler is not None and not scheduler.store.traits.durable:
        raise CommandError(
            f"{scheduler.store.name} lives in one process; --workers needs a store that several processes can share"
        )
    flags = [flag for flag, is_set in (("--quiet", quiet), ("--verbose", verbose)) if is_set]
    command = [sys.executable, "-m", "aiodelay", "run", target, *flags]
    commands = [[*command, *_metrics_flags(metrics_host, metrics_port, number)] for number in range(workers)]
    with ungrouped(CommandError):
        asyncio.run(supervise(commands, reload=reload))


def _emitting(host: str, port: int | None) -> AbstractContextManager[None]:
    if port is None:
        return nullcontext()
    from aiodelay.telemetry.emitting import emitting  # noqa: PLC0415 - `--help` does not need it

    return emitting(host, port, "--metrics-host, --metrics-port")


def _metrics_flags(host: str, port: int | None, number: int) -> list[str]:
    """Return the metrics flags of one worker. Each worker gets its own port."""
    return [] if port is None else ["--metrics-host", host, "--metrics-port", f"{port + number if port else 0}"]


async def _dispatch(scheduler: Scheduler, target: str, lifeline: int | None) -> None:
    with stop_signals() as stop:
        if lifeline is not None:
            follow(lifeline, stop)
        async with AsyncExitStack() as stack:
            if await stop.opens(stack, scheduler):
                log.info("%s is dispatching; SIGTERM or Ctrl-C drains it", target)
                await stop.wait()
                log.info("the process is draining; a later signal ends it at once")
        log.info("%s has stopped", target)
    timer = threading.Timer(LEAVE_S, _leave_handlers, [asyncio.get_running_loop()])
    timer.daemon = True
    timer.start()


def _leave_handlers(loop: asyncio.AbstractEventLoop) -> None:
    """End the process if handlers still run after the drain. Python itself would wait for these handlers for ever."""
    running = [thread.name for thread in threading.enumerate()] + [task.get_name() for task in asyncio.all_tasks(loop)]
    left = [name for name in running if name.startswith("aiodelay ")]
    if left:
        log.warning("the process ends although these handlers still run: %s", ", ".join(left))
        sys.stdout.flush()
        os._exit(0)


def find_scheduler(target: str) -> Scheduler:
    """Import the scheduler that `MODULE:OBJECT` names. The working directory is searched first.

    Raises:
        CommandError: The text does not have this form, there is no such object, or the object is not a scheduler. The
            error lists the schedulers of the module, or names similar to the given name.
    """
    module_name, _, path = target.partition(":")
    if not module_name or not path or module_name.startswith("."):
        raise CommandError(
            f"{target!r} names no scheduler: write MODULE:OBJECT, such as shop:scheduler", exit_code=NOT_UNDERSTOOD
        )
    if sys.path[:1] != [os.getcwd()]:
        sys.path.insert(0, os.getcwd())
    module = _import(module_name)
    found: object = module
    for name in path.split("."):
        found = _attribute(found, name, target, module)
    if not isinstance(found, Scheduler):
        raise CommandError(f"{target} is {kind_of(found)}, not a Scheduler{_schedulers_in(module)}")
    return found


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists; a module that it imports is missing
        here = [module.name for module in pkgutil.iter_modules([os.getcwd()])]
        hint = _did_you_mean(name, here)
        raise CommandError(f"no module {error.name!r} in {os.getcwd()}, and none is installed{hint}") from None
    except AiodelayError as error:
        error.add_note(f"while importing {name}")
        raise


def _attribute(owner: object, name: str, target: str, module: ModuleType) -> object:
    try:
        found: object = getattr(owner, name)
    except AttributeError:
        near = _did_you_mean(name, [other for other in dir(owner) if not other.startswith("_")])
        raise CommandError(f"{target} does not exist: no {name!r}{near or _schedulers_in(module)}") from None
    return found


def _did_you_mean(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _schedulers_in(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if isinstance(value, Scheduler)]
    return f"; {module.__name__} has " + (", ".join(names) or "no Scheduler")

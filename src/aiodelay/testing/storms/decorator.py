"""`storm`: the decorator that runs a test in storms of faults."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from msgspec import Struct

from aiodelay.backends.memory import MemoryStore
from aiodelay.core.durations import Duration, parse_duration
from aiodelay.core.validation import check_count, check_flag, check_instance
from aiodelay.errors import ConfigurationError, kind_of
from aiodelay.scheduler import Scheduler
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.kit import kit_of, on_clock

from .outcome import Outcome, StormError
from .plan import ORDER, Fault, Place, Plan
from .seeded_loop import SeededLoop
from .shrinking import shortest
from .striker import Striker

__all__ = ["storm"]

MOST_SEEDS = 1_000_000
JUMPS, JUMPS_PER_DELAY_MS = 1_000, 0.005
"""A run with faults waits for ever if its time jumps more often than ten times the jumps of the calm run, plus `JUMPS`,
plus this number for each millisecond of the longest delay."""
_GIVEN = ("scheduler", "clock")
_FIXTURE = "aiodelay_scheduler"
_FORM = "async def test(scheduler: Scheduler, clock: VirtualClock)"


def storm(
    *,
    seeds: int = 200,
    seed: int | None = None,
    scheduler: Scheduler | None = None,
    lasting: Duration = "10m",
    strikes_test: bool = False,
) -> Callable[[Callable[..., Awaitable[object]]], Callable[..., None]]:
    """Decorate a test that must have the same outcome under all faults: is each handler idempotent?

    The test runs once without faults: the *calm run*. Then it runs once for each seed, with faults that the seed
    chooses. The outcome of each run is compared with that of the calm run. The outcome is: whether the test passes, the
    value that it returns, and the dead letters, except letters with the reason `late`.

    The faults, each at a message of a handler:

    - The delivery comes late, also after messages that were due later.
    - The clock is set back or forward.
    - The process ends while the handler waits, or after the handler and before the settlement is stored. The message is
      delivered again when its lease ends.
    - The delivery is repeated later.
    - A `schedule()`, `cancel()`, `reschedule()` or `fire()` of a handler raises `OutcomeUnknownError`: the request or
      the reply was lost.
    - The tasks that are ready run in another order.

    A process that ends loses no memory here: the objects of the test survive. The run that was cut ends as if it
    were cancelled.

    The decorated test is a plain function: pytest needs no plugin to run it, and `test()` runs it without pytest. Each
    run gets a loop, an empty store and recording sinks of its own. Everything else that the test changes, it must reset
    at its beginning. Of the arguments of the test, `scheduler` and `clock` are given by the storm. All others are
    fixtures or parameters, which all runs share.

    Args:
        seeds: The number of runs with faults, with the seeds 0, 1, 2 …
        seed: Only this seed, to repeat a run that failed.
        scheduler: Your program's scheduler, not open. None = the fixture `aiodelay_scheduler` of the pytest plugin
            says which, or an empty scheduler.
        lasting: The longest delay, and the largest step of the clock; at least 10 ms.
        strikes_test: Whether commands may raise `OutcomeUnknownError` also where the test itself calls them.

    Raises:
        ConfigurationError: An argument is wrong, the decorated object is not an async function, or the decorated test
            has neither a parameter `scheduler` nor the argument `scheduler=`.
        StormError: Raised by the decorated test. It has the seed, and the shortest list of faults that was found.
    """
    check_count(seeds, "seeds", 1, MOST_SEEDS)
    options = _Options(
        range(seeds) if seed is None else [check_count(seed, "seed", 0, MOST_SEEDS)],
        None if scheduler is None else check_instance(scheduler, Scheduler, "scheduler"),
        parse_duration(lasting, field="lasting", error=ConfigurationError, least_ms=10),
        check_flag(strikes_test, "strikes_test"),
    )

    def decorate(test: Callable[..., Awaitable[object]]) -> Callable[..., None]:
        if not inspect.iscoroutinefunction(test):
            raise ConfigurationError("the test", kind_of(test), _FORM)
        signature = inspect.signature(test)
        if scheduler is None and "scheduler" not in signature.parameters:
            raise ConfigurationError(
                "scheduler", "neither a parameter nor an argument", f"{_FORM}, or storm(scheduler=)"
            )

        @functools.wraps(test)
        def stormy(*args: object, **kwargs: object) -> None:
            __tracebackhide__ = True
            fixture = kwargs.pop(_FIXTURE, None)
            yours = options.scheduler or (None if fixture is None else check_instance(fixture, Scheduler, _FIXTURE))
            given = [name for name in _GIVEN if name in signature.parameters]
            _Storm(partial(test, *args, **kwargs), given, yours, options).rage()

        stormy.__signature__ = _visible(signature, asks_for_scheduler=scheduler is None)  # type: ignore[attr-defined]
        return stormy

    return decorate


def _visible(signature: inspect.Signature, *, asks_for_scheduler: bool) -> inspect.Signature:
    """Return the signature that pytest sees: without the storm's arguments, with the fixture that it needs."""
    kept = [each for name, each in signature.parameters.items() if name not in _GIVEN]
    if asks_for_scheduler:
        kept.append(inspect.Parameter(_FIXTURE, inspect.Parameter.KEYWORD_ONLY))
    return signature.replace(parameters=sorted(kept, key=lambda each: each.kind), return_annotation=None)


class _Options(Struct, frozen=True):
    seeds: Sequence[int]
    scheduler: Scheduler | None
    lasting_ms: int
    strikes_test: bool


class _Storm:
    """All runs of one test.

    Args:
        test: The test, with all arguments except those in `given`.
        given: The names of the arguments that each run makes for itself.
        scheduler: The scheduler under test; None = each run makes an empty one.
        options: The options.
    """

    def __init__(
        self,
        test: Callable[..., Awaitable[object]],
        given: Sequence[str],
        scheduler: Scheduler | None,
        options: _Options,
    ) -> None:
        self._test, self._given, self._scheduler, self._options = test, given, scheduler, options
        self._jump_limit = SeededLoop.jump_limit

    def rage(self) -> None:
        """Run the test without faults, then with the faults of each seed.

        Raises:
            StormError: An outcome differs.
            BaseException: The error of the calm run.
        """
        __tracebackhide__ = True
        calm = self._run(0, only=())
        if calm.error is not None:
            raise calm.error
        self._jump_limit = 10 * calm.jumps + JUMPS + round(JUMPS_PER_DELAY_MS * self._options.lasting_ms)
        with _quiet():
            if (again := self._run(0, only=())).differs_from(calm):
                raise ConfigurationError(
                    "the test",
                    f"different in its second run without faults: {again.text()} after {calm.text()}",
                    "a test that resets at its beginning all that it changes",
                )
            found = next(filter(None, map(partial(self._search, calm), self._options.seeds)), None)
        if found is not None:
            seed, places = found
            outcome = self._run(seed, only=places)  # once more, for its log and its traceback
            faults = [str(ORDER)] * (ORDER in places) + [str(fault) for fault in outcome.faults]
            raise StormError(seed, tuple(faults), calm.text(), outcome.text()) from outcome.error

    def _search(self, calm: Outcome, seed: int) -> tuple[int, Sequence[Place]] | None:
        """Return a seed and the fewest places whose faults change the outcome; None if the outcome is the same."""
        outcome = self._run(seed)
        if not outcome.differs_from(calm):
            return None
        places = [ORDER, *(fault.place for fault in outcome.faults)]
        return seed, shortest(places, lambda only: self._run(seed, only=only).differs_from(calm))

    def _run(self, seed: int, *, only: Collection[Place] | None = None) -> Outcome:
        """Run the test once.

        Args:
            seed: Chooses the faults.
            only: The places at which faults may strike; None = all places.
        """
        plan, faults = Plan(seed, self._options.lasting_ms, only), list[Fault]()
        loop = SeededLoop(plan.order_seed)
        loop.jump_limit = self._jump_limit
        with _seeded(seed), asyncio.Runner(loop_factory=lambda: loop) as runner:
            try:
                returned, dead_letters = runner.run(self._test_once(loop, plan, faults))
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # noqa: BLE001 - the exception of pytest.fail() is no Exception
                return Outcome(None, (), error, faults, loop.jumps)
        return Outcome(returned, dead_letters, None, faults, loop.jumps)

    async def _test_once(self, loop: SeededLoop, plan: Plan, faults: list[Fault]) -> tuple[object, Sequence[str]]:
        clock = VirtualClock(loop)
        scheduler = self._scheduler or Scheduler(MemoryStore(clock=clock), clock=clock)
        striker = Striker(plan, scheduler, clock, faults, strikes_test=self._options.strikes_test)
        with on_clock(scheduler, clock, around_store=striker.store):
            scheduler.middleware("handle")(striker.around_run)
            scheduler.middleware("schedule")(striker.around_schedule)
            striker.strike_changes(scheduler)
            clock.add_idle_hook(striker.calm_down)
            given = {"scheduler": scheduler, "clock": clock}
            returned = await self._test(**{name: given[name] for name in self._given})
            letters = kit_of(scheduler).dead_letters()
        dead = sorted(f"{each.record.envelope.lane} ({each.reason})" for each in letters if each.reason != "late")
        return copy.deepcopy(returned), dead


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the module `random` inside a block: aiodelay's pauses have a random part."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


@contextmanager
def _quiet() -> Iterator[None]:
    """Log nothing of aiodelay inside a block."""
    logger = logging.getLogger("aiodelay")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)

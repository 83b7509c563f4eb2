from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import get_args

import pytest

from aiodelay import ConfigurationError, Context, Every, OutcomeUnknownError, Retry, Scheduler
from aiodelay.testing import StormError, VirtualClock, sink_of, storm
from aiodelay.testing.storms.plan import ORDER, Kind, Place, Plan, Step
from aiodelay.testing.storms.shrinking import shortest
from tests.support.storm_programs import (
    PROGRAMS,
    Mail,
    Order,
    Program,
    deliver,
    deliver_orders,
)

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.slow

SEEDS = 200
STRIKES_TEST = {"hides_an_unknown_outcome_from_its_caller"}


def storm_over(program: Program, *, mended: bool, seeds: int) -> None:
    strikes_test = program.__name__ in STRIKES_TEST
    storm(seeds=seeds, strikes_test=strikes_test)(partial(program, mended=mended))()


each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)


@each_program
def test_a_planted_fault_is_found(program: Program) -> None:
    with pytest.raises(StormError) as raised:
        storm_over(program, mended=False, seeds=SEEDS)
    assert 1 <= len(raised.value.faults) <= 2


@each_program
def test_a_correct_program_has_one_outcome(program: Program) -> None:
    storm_over(program, mended=True, seeds=15)


@pytest.mark.storm
@each_program
def test_a_correct_program_has_one_outcome_in_ten_thousand_storms(program: Program) -> None:
    storm_over(program, mended=True, seeds=10_000)


# --- the report -------------------------------------------------------------------------------------------


async def counts_mails(scheduler: Scheduler) -> int:
    mails: list[int] = []

    @scheduler.handler
    async def mail(event: Order) -> None:
        mails.append(event.n)

    await deliver(scheduler)
    return len(mails)


def error_of(*, seeds: int = 200, seed: int | None = None) -> StormError:
    with pytest.raises(StormError) as raised:
        storm(seeds=seeds, seed=seed)(counts_mails)()
    return raised.value


def test_the_seed_repeats_the_run_exactly() -> None:
    found = error_of(seeds=SEEDS)
    again = error_of(seed=found.seed)
    assert str(again) == str(found)
    assert f"@storm(seed={found.seed})" in str(found)


REPEAT = """
from functools import partial
from aiodelay.testing import StormError, storm
from tests.support.storm_programs import reads_and_writes_across_an_await, reports_at_the_last_event
for program in (reads_and_writes_across_an_await, reports_at_the_last_event):
    try:
        storm()(partial(program, mended=False))()
    except StormError as error:
        print(error)
"""


def test_another_process_repeats_the_run_exactly(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    texts = {
        subprocess.run(
            [sys.executable, "-c", REPEAT],
            env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(texts) == 1
    assert texts.pop().count("to repeat it: @storm(seed=") == 2


def test_the_error_has_the_exception_of_the_test_as_its_cause() -> None:
    @storm(seeds=SEEDS)
    async def one_mail_each(scheduler: Scheduler) -> None:
        assert await counts_mails(scheduler) == 5, "one mail for each order"

    with pytest.raises(StormError, match="AssertionError: one mail for each order") as raised:
        one_mail_each()
    assert isinstance(raised.value.__cause__, AssertionError)


def test_a_failure_of_pytest_counts_too() -> None:
    @storm(seeds=SEEDS)
    async def one_mail_each(scheduler: Scheduler) -> None:
        if await counts_mails(scheduler) != 5:
            pytest.fail("a second mail")

    with pytest.raises(StormError, match="Failed: a second mail"):
        one_mail_each()


def test_an_error_of_the_calm_run_is_raised_as_it_is() -> None:
    @storm()
    async def fails(scheduler: Scheduler) -> None:
        raise KeyError("always")

    with pytest.raises(KeyError, match="always"):
        fails()


def test_a_test_that_keeps_its_state_is_told_to_reset_it() -> None:
    mails: list[int] = []

    @storm()
    async def keeps(scheduler: Scheduler) -> list[int]:
        mails.append(1)
        return mails

    with pytest.raises(ConfigurationError, match=r"different in its second run without faults: \[1, 1\] after \[1\]"):
        keeps()


def test_a_run_that_waits_for_ever_fails_soon() -> None:
    @storm(seeds=SEEDS, lasting="10s")
    async def waits_for_all(scheduler: Scheduler) -> None:
        first_runs: set[int] = set()
        all_came = asyncio.Event()

        @scheduler.handler
        async def handle(event: Order, context: Context) -> None:
            if context.lateness < timedelta(seconds=1):
                first_runs.add(event.n)
            if len(first_runs) == 2:
                all_came.set()

        async with scheduler:
            for n in range(2):
                await scheduler.schedule(Order(n), delay="1s")
            await all_came.wait()

    with pytest.raises(StormError, match="WaitingForeverError"):
        waits_for_all()


# --- the faults -------------------------------------------------------------------------------------------


def test_every_kind_of_fault_strikes() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(SEEDS):
        plan = Plan(seed, 600_000)
        kinds[f"order {plan.order_seed is not None}"] += 1
        for step in get_args(Step)[:-1]:
            fault = plan.fault(Place(step, "Order 'a'", 1))
            kinds[fault.kind if fault else ""] += 1
            assert fault is None or 10 <= fault.ms <= 600_000
    assert {*get_args(Kind), "", "order True", "order False"} == set(kinds)


async def handled(scheduler: Scheduler) -> None:
    @scheduler.handler
    async def handle(event: Order, context: Context) -> None:
        if context.attempt == 1:
            raise ValueError("once")

    await deliver(scheduler, 2)


async def handled_in_batches(scheduler: Scheduler) -> None:
    @scheduler.handler(batch=3, batch_wait="2s", on_failure="retry_all")
    async def handle(events: list[Order], context: Context) -> None:
        if context.attempt == 1:
            raise ValueError("once")

    await deliver(scheduler, 2)


async def pulled(scheduler: Scheduler) -> None:
    async def pull() -> None:
        async for message in scheduler.messages(Order):
            with suppress(ValueError), message:
                if message.context.attempt == 1:
                    raise ValueError("once")

    async with scheduler, asyncio.TaskGroup() as group:
        pulling = group.create_task(pull())
        await asyncio.sleep(0.1)
        await deliver_orders(scheduler, 2)
        pulling.cancel()


@pytest.mark.parametrize("program", [handled, handled_in_batches, pulled])
def test_each_run_of_a_message_has_a_place_of_its_own(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Place] = []
    monkeypatch.setattr(Plan, "fault", lambda plan, place: places.append(place))
    storm(seeds=1)(program)()
    ends = Counter(place for place in places if place.step == "settle")
    runs = 3  # two calm runs, and that of the seed
    assert ends == {Place("settle", f"Order 'order-{i}'", n): runs for i in range(2) for n in (1, 2)}


@pytest.mark.parametrize(
    ("command", "action"), [("cancel", "cancelled"), ("reschedule", "rescheduled"), ("fire", "fired")]
)
def test_a_command_loses_its_request_or_its_reply_and_can_be_repeated(command: str, action: str) -> None:
    lost: set[str] = set()

    async def answer_of(call: Awaitable[object]) -> object:
        try:
            return await call
        except OutcomeUnknownError as error:
            lost.add(f"{error.reason}: {error.message_id} {error.action}")
            return await error.retry()

    @storm(seeds=SEEDS, strikes_test=True)
    async def one_answer(scheduler: Scheduler) -> object:
        async with scheduler:
            await answer_of(scheduler.schedule(b"", to="handler:work", delay="1h", id="a"))
            options = {"delay": "2h"} if command == "reschedule" else {}
            return await answer_of(getattr(scheduler, command)("a", **options))

    one_answer()
    assert lost >= {f"the storm: {what} lost: a {action}" for what in ("request", "reply")}


def test_a_clock_that_was_set_back_delays_no_assertion() -> None:
    @storm(seeds=60)
    async def delivered_after_an_hour(scheduler: Scheduler, clock: VirtualClock) -> None:
        seen: set[int] = set()

        @scheduler.handler
        async def handle(event: Order) -> None:
            seen.add(event.n)

        async with scheduler:
            for n in range(5):
                await scheduler.schedule(Order(n), delay=f"{n}m")
            await clock.advance("5m")
            assert seen == set(range(5))

    delivered_after_an_hour()


def test_sinks_get_each_message_once() -> None:
    shop = Scheduler("memory://", sinks=["stdout:"])

    @storm(seeds=20, scheduler=shop)
    async def to_a_sink(scheduler: Scheduler) -> int:
        async with scheduler:
            await scheduler.schedule(b"hello", to="stdout:audit", delay="1s")
            await scheduler.run_until_idle()
        return len(sink_of(scheduler, "stdout").deliveries)

    to_a_sink()


def test_series_batches_and_plain_handlers_are_struck_too() -> None:
    @storm(seeds=60, lasting="30s")
    async def all_kinds(scheduler: Scheduler, clock: VirtualClock) -> None:
        seen: set[str] = set()

        @scheduler.handler(batch=3, batch_wait="1s")
        async def batch(events: list[Order]) -> None:
            await asyncio.sleep(0.1)
            seen.update(f"order {event.n}" for event in events)

        @scheduler.handler
        def plain(event: Mail) -> None:
            seen.add(f"mail {event.n}")

        @scheduler.handler(name="tick", retry=Retry.never())
        async def tick(payload: bytes) -> None:
            seen.add("tick")

        async with scheduler:
            await scheduler.schedule(b"", to="handler:tick", every=Every("20s"), id="tick")
            for n in range(5):
                await scheduler.schedule(Order(n), delay="1s")
                await scheduler.schedule(Mail(n), delay="1s")
            await clock.advance("3m")
            await scheduler.cancel("tick")
            await scheduler.run_until_idle()
        assert seen == {"tick", *(f"{what} {n}" for what in ("order", "mail") for n in range(5))}

    all_kinds()


# --- the decorator ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seeds": 0}, "seeds is 0; allowed"),
        ({"seed": -1}, "seed is -1; allowed"),
        ({"scheduler": "shop"}, "scheduler is"),
        ({"lasting": "1ms"}, "lasting is"),
        ({"strikes_test": 1}, "strikes_test is"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        storm(**options)  # type: ignore[arg-type]


def test_only_a_test_that_has_a_scheduler_can_be_decorated() -> None:
    def plain(scheduler: Scheduler) -> None: ...

    async def without() -> None: ...

    with pytest.raises(ConfigurationError, match="the test is a function; allowed: async def test"):
        storm()(plain)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="scheduler is neither a parameter nor an argument"):
        storm()(without)
    storm(scheduler=Scheduler("memory://"), seeds=1)(without)()


def test_the_scheduler_gets_no_middleware_and_no_handler_for_good() -> None:
    shop = Scheduler("memory://")
    storm(seeds=2, scheduler=shop)(partial(PROGRAMS[0], mended=True))()
    storm(seeds=2, scheduler=shop)(partial(PROGRAMS[0], mended=True))()


SUITE = """
import pytest
from dataclasses import dataclass
from aiodelay import Context, Scheduler
from aiodelay.testing import storm

shop = Scheduler("sqlite:///shop.db")
mails = []

@dataclass
class Order:
    n: int

@shop.handler
async def mail(event: Order) -> None:
    mails.append(event.n)

@pytest.fixture
def aiodelay_scheduler():
    return shop

@pytest.fixture
def number():
    return 7

@pytest.mark.parametrize("is_set", [True, False])
@storm(seeds=20)
async def test_parameters(scheduler, clock, number, is_set):
    assert scheduler is shop
    mails.clear()
    async with scheduler:
        await scheduler.schedule(Order(number), delay="1s")
        await clock.advance("1s")
    assert (set(mails) if is_set else mails) == ({7} if is_set else [7])

class TestOrders:
    @storm(seeds=2)
    async def test_method(self, scheduler):
        assert scheduler is shop
"""


@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_pytest_gives_fixtures_and_parameters(pytester: pytest.Pytester, mode: str) -> None:
    pytester.makepyfile(test_inner=SUITE)
    options = ["-p", "no:randomly", "-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function"]
    if not any(point.value == "aiodelay.testing.plugin" for point in entry_points(group="pytest11")):
        options += ["-p", "aiodelay.testing.plugin"]
    result = pytester.runpytest_inprocess("-W", "error", f"--asyncio-mode={mode}", *options)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*StormError: the outcome of the test differs*", "*to repeat it: @storm(seed=*"])


# --- shrinking --------------------------------------------------------------------------------------------


def places(*names: str) -> list[Place]:
    return [Place("run", name, 1) for name in names]


def test_faults_that_are_not_needed_are_taken_away() -> None:
    every = [ORDER, *places(*"abcdef")]
    needed = set(places("b", "e"))
    assert set(shortest(every, lambda only: needed <= set(only))) == needed


def test_a_shorter_list_that_does_it_in_another_way_is_found() -> None:
    """Removal alone ends at the pair `b` `c`, but `d` alone does it too."""
    every = places(*"abcd")
    pair, alone = set(places("b", "c")), places("d")
    assert shortest(every, lambda only: pair <= set(only) or list(only) == alone) == tuple(alone)

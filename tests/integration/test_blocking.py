"""`BlockingScheduler`: in a script, in many threads, across a fork, interrupted, and at the end of a process."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from aiodelay import (
    BlockingCallError,
    CancelOutcome,
    ClosedError,
    ConfigurationError,
    FireOutcome,
    InputError,
    Message,
    PartlyScheduledError,
    RescheduleOutcome,
    Scheduler,
    ScheduleTimeError,
    StoreUnavailableError,
)
from aiodelay.backends.registry import open_store
from aiodelay.blocking import BlockingScheduler
from aiodelay.core.ids import new_op
from aiodelay.core.values import Dead, Demand, Fire, Stored
from aiodelay.engine.control import Control
from aiodelay.memory import MemoryStore
from tests.support.command import DEADLINE_S, Program
from tests.support.servers import Found, redis_servers, serving


@dataclass
class Remind:
    order: int


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/shop.db"


def pending(url: str) -> list[str]:
    """The ids that are stored, read by a scheduler of its own."""

    async def read() -> list[str]:
        async with Scheduler(url, dispatch=False) as scheduler:
            return sorted([snapshot.record.id async for snapshot in scheduler.pending()])

    return asyncio.run(read())


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("aiodelay")]


# --- what it does -----------------------------------------------------------------------------------------


def test_each_command(url: str) -> None:
    with BlockingScheduler(url, sinks=["stdout:"]) as scheduler:
        scheduled = scheduler.schedule(Remind(1), delay="1h", id="a")
        assert (scheduled.id, scheduled.outcome) == ("a", "stored")
        scheduler.schedule(b"x", to="stdout:x", delay="1h", id="b")
        found = scheduler.get("a")
        assert found is not None
        assert found.record.due_ms == scheduled.due_ms
        assert scheduler.get("c") is None
        assert scheduler.reschedule("a", delay="2h") is RescheduleOutcome.RESCHEDULED
        assert scheduler.fire("a") is FireOutcome.FIRED
        assert scheduler.cancel("a") is CancelOutcome.CANCELLED
        assert scheduler.cancel("a") is CancelOutcome.NOT_FOUND
        assert set(scheduler.call(lambda each: each.counts())) == {"stdout"}
        with pytest.raises(ScheduleTimeError):
            scheduler.schedule(Remind(1))
    assert pending(url) == ["b"]


def test_what_it_schedules_is_what_a_scheduler_delivers(url: str) -> None:
    with BlockingScheduler(url, namespace="shop", encoding="msgpack") as scheduler:
        scheduler.schedule_many(Message(Remind(order), delay="1ms") for order in range(3))
    got: list[int] = []
    delivering = Scheduler(url, namespace="shop")

    @delivering.handler
    async def remind(event: Remind) -> None:
        got.append(event.order)

    async def deliver() -> None:
        async with delivering:
            await delivering.run_until_idle()

    asyncio.run(deliver())
    assert sorted(got) == [0, 1, 2]


LISTED = ("pending", "dead_letters")
OPERATIONS = [name for name in vars(Control) if not name.startswith("_") and name != "opened_store"]
ALIKE = ("schedule", "cancel", "reschedule", "fire", *OPERATIONS)


@pytest.mark.parametrize("name", ALIKE)
def test_signatures_are_the_schedulers(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(each, name)) for each in (BlockingScheduler, Scheduler))
    if name in LISTED:
        theirs = theirs.replace(return_annotation=theirs.return_annotation.removeprefix("Async"))
    assert ours == theirs


def test_each_verb_of_an_operator(url: str) -> None:
    with BlockingScheduler(f"{url}?journal=100", sinks=["stdout:"]) as scheduler:
        messages = (Message(b"x", delay="1h", to=f"stdout:{n % 2}", id=f"m{n:04}") for n in range(1_200))
        assert scheduler.schedule_many(messages) == 1_200
        assert len({each.record.id for each in scheduler.pending()}) == 1_200
        assert [each.record.id for each in scheduler.pending("stdout", limit=1)] == ["m0000"]
        assert scheduler.counts()["stdout"].scheduled == 1_200
        assert sum(each.messages for each in scheduler.load(bucket="2h", buckets=1)) == 1_200
        assert (scheduler.pause("stdout:1"), scheduler.paused(), scheduler.blocked()) == (True, ["stdout:1"], ())
        assert (scheduler.resume("stdout:1"), scheduler.paused()) == (True, [])
        assert [each.event for each in scheduler.journal("m1199")] == ["stored"]
    asyncio.run(give_up(url, "m0000"))
    asyncio.run(give_up(url, "m0001"))
    with BlockingScheduler(url, sinks=["stdout:"]) as scheduler:
        first, second = scheduler.dead_letters()
        (outcome,) = scheduler.redrive(first)
        assert isinstance(outcome, Stored)
        assert scheduler.get("m0000") is not None
        assert scheduler.purge(second) == 1
        assert (list(scheduler.dead_letters()), scheduler.get("m0001")) == ([], None)
        assert scheduler.purge(second) == 0, "it is gone"


async def give_up(url: str, message_id: str) -> None:
    """Make a dead letter of a message."""
    async with open_store(url, namespace="default", clock=None) as store, store.work("tests", ["stdout"]) as work:
        await store.apply([Fire(new_op(), message_id)])
        (claim,) = (await work.claim({"stdout": Demand(1)}, request="1", lease_ms=15_000)).claims
        record = claim.record
        await work.settle([Dead(record.id, record.revision, claim.token, "rejected", 1, "no")])


def test_settings_are_the_schedulers_and_refused_where_they_are_given() -> None:
    ours = inspect.signature(BlockingScheduler).parameters
    theirs = inspect.signature(Scheduler).parameters
    assert {name: each.default for name, each in ours.items()} == {name: theirs[name].default for name in ours}
    with pytest.raises(ConfigurationError, match="encoding is 'xml'"):
        BlockingScheduler("memory://", encoding="xml")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="store is a MemoryStore; allowed: a URL"):
        BlockingScheduler(MemoryStore())  # type: ignore[arg-type]


# --- many -------------------------------------------------------------------------------------------------


def test_many_are_read_and_told_of_in_the_callers_thread(url: str) -> None:
    threads: set[threading.Thread] = set()
    told: list[int] = []

    def read() -> Iterator[Message]:
        for order in range(4_001):
            threads.add(threading.current_thread())
            yield Message(Remind(order), delay="1h" if order not in (7, 2_005) else None, id=str(order))

    with BlockingScheduler(url) as scheduler:
        with pytest.raises(PartlyScheduledError) as partly:
            scheduler.schedule_many(read(), progress=told.append)
        assert [each.position for each in partly.value.rejected] == [7, 2_005]
        assert partly.value.stored == told[-1] == 3_999
        assert told == [1_999, 3_998, 3_999]
        assert threads == {threading.current_thread()}
        with pytest.raises(InputError, match="messages is an int; allowed: an iterable of Message"):
            scheduler.schedule_many(7)  # type: ignore[arg-type]
    assert len(pending(url)) == 3_999


def test_what_was_read_before_reading_failed_is_stored(url: str) -> None:
    def read() -> Iterator[Message]:
        yield Message(Remind(1), delay="1h", id="1")
        yield Message(Remind(2))
        raise OSError("the file ends here")

    with BlockingScheduler(url) as scheduler, pytest.raises(OSError, match="the file ends here") as failed:
        scheduler.schedule_many(read())
    (note,) = failed.value.__notes__
    assert note.startswith("schedule_many: 1 messages stored, 1 refused: message 1: at, delay, every is missing")
    assert pending(url) == ["1"]


# --- threads and loops ------------------------------------------------------------------------------------


def test_many_threads_share_one_connection(url: str) -> None:
    scheduler = BlockingScheduler(url)
    assert our_threads() == []

    def schedule(number: int) -> str:
        return scheduler.schedule(Remind(number), delay="1h", id=f"{number:03}").id

    with closing(scheduler), ThreadPoolExecutor(16) as pool:
        ids = list(pool.map(schedule, range(400)))
        assert our_threads().count("aiodelay blocking") == 1
    assert our_threads() == []
    assert pending(url) == ids


def test_it_connects_at_the_first_call_and_again_after_it_was_closed(url: str) -> None:
    scheduler = BlockingScheduler(url)
    assert repr(scheduler) == f"<BlockingScheduler {url} closed>"
    for number in ("1", "2"):
        scheduler.schedule(Remind(7), delay="1h", id=number)
        assert repr(scheduler).endswith(" open>")
        scheduler.close()
        scheduler.close()
        assert our_threads() == []
    assert pending(url) == ["1", "2"]


def test_a_store_that_cannot_be_opened_is_tried_again_by_the_next_call(tmp_path: Path) -> None:
    scheduler = BlockingScheduler(f"sqlite:///{tmp_path}/later/shop.db")
    with pytest.raises(StoreUnavailableError, match="there is no directory"), scheduler:
        pass
    with pytest.raises(StoreUnavailableError, match="there is no directory"):
        scheduler.schedule(Remind(7), delay="1h")
    assert our_threads() == []
    (tmp_path / "later").mkdir()
    with scheduler:
        scheduler.schedule(Remind(7), delay="1h")


def test_it_waits_for_a_store_as_long_as_it_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = f"sqlite:///{tmp_path}/later/shop.db"
    with closing(BlockingScheduler(url, open_timeout="1h")) as scheduler, ThreadPoolExecutor(1) as pool:
        call = pool.submit(scheduler.schedule, Remind(7), delay="1h", id="1")
        ends = time.monotonic() + DEADLINE_S
        while "trying again for up to 1h" not in caplog.text:
            assert time.monotonic() < ends
            time.sleep(0.02)
        (tmp_path / "later").mkdir()
        assert call.result(DEADLINE_S).id == "1"
    assert our_threads() == []
    assert pending(url) == ["1"]


def test_calls_of_other_threads_are_answered_before_it_closes_or_connect_again(url: str) -> None:
    scheduler = BlockingScheduler(url)
    ends = threading.Event()
    ids: list[str] = []

    def schedule() -> None:
        while not ends.is_set():
            ids.append(scheduler.schedule(Remind(7), delay="1h").id)

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(schedule) for _ in range(4)]
        for _ in range(20):
            scheduler.close()
        ends.set()
        for call in calls:
            call.result()
    scheduler.close()
    assert our_threads() == []
    assert pending(url) == sorted(ids)


def test_a_connection_that_failed_is_made_anew(url: str) -> None:
    """Whatever ends the loop's thread, the next call is served."""
    with BlockingScheduler(url) as scheduler:
        scheduler.schedule(Remind(7), delay="1h", id="1")
        scheduler._shared.get().close()
        scheduler.schedule(Remind(7), delay="1h", id="2")
    assert pending(url) == ["1", "2"]


def test_in_a_running_loop_it_refuses_and_in_a_thread_beside_it_works(url: str) -> None:
    scheduler = BlockingScheduler(url)

    async def schedule() -> None:
        with pytest.raises(BlockingCallError, match=r"use a Scheduler instead, or call it with asyncio.to_thread"):
            scheduler.schedule(Remind(7), delay="1h")
        with pytest.raises(BlockingCallError):
            scheduler.__enter__()
        await asyncio.to_thread(scheduler.schedule, Remind(7), delay="1h", id="1")

    asyncio.run(schedule())
    with pytest.raises(BlockingCallError):  # on its own loop it would wait for itself
        scheduler.call(lambda _: scheduler.get("1"))  # type: ignore[arg-type, return-value]
    scheduler.close()
    assert pending(url) == ["1"]


# --- processes --------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys, threading, traceback
from dataclasses import dataclass

from aiodelay.blocking import BlockingScheduler

scheduler = BlockingScheduler(sys.argv[1])


@dataclass
class Remind:
    order: int


def in_child(function):
    # As gunicorn does: the child runs, and ends as a program of its own does, its modules torn down.
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        return
    function()
    sys.exit()


"""


def run(program: str, url: str, cwd: Path) -> list[str]:
    path = cwd / "program.py"
    path.write_text(PROGRAM + program)
    with Program("-W", "ignore:This process:DeprecationWarning", str(path), url, cwd=cwd) as running:
        assert running.exit_code() == 0, running.err.seen
        assert running.complaints() == []
        return running.out.seen


def test_a_process_ends_without_closing_and_what_was_stored_is_stored(url: str, tmp_path: Path) -> None:
    run("scheduler.schedule(Remind(7), delay='1h', id='1')", url, tmp_path)
    assert pending(url) == ["1"]


FORKING = """
scheduler.schedule(Remind(7), delay='1h', id='parent before')
in_child(lambda: [scheduler.schedule(Remind(7), delay='1h', id=f'child {n}') for n in range(50)])
for n in range(50):
    scheduler.schedule(Remind(7), delay='1h', id=f'parent {n}')
scheduler.close()
"""
FORKED = sorted(["parent before", *(f"{who} {n}" for who in ("child", "parent") for n in range(50))])


def test_a_forked_process_connects_anew(url: str, tmp_path: Path) -> None:
    run(FORKING, url, tmp_path)
    assert pending(url) == FORKED


DAEMON = """
started, looked = os.pipe(), os.pipe()
program = os.fork()
if not program:
    scheduler.schedule(Remind(7), delay='1h', id='at start')
    if os.fork():
        os._exit(0)  # it becomes a daemon
    scheduler.schedule(Remind(7), delay='1h', id='before')
    os.write(started[1], b'x')
    os.read(looked[0], 1)
    scheduler.schedule(Remind(7), delay='1h', id='after')
    os.write(started[1], b'x')
    os.read(looked[0], 1)
    os._exit(0)
os.waitpid(program, 0)
for _ in range(2):
    os.read(started[0], 1)
    other = BlockingScheduler(sys.argv[1])
    print(sorted(each.record.id for each in other.pending()))
    other.close()  # the last connection of others: they believe that nobody uses the file
    os.write(looked[1], b'x')
"""


def test_what_a_daemon_stores_is_stored_although_its_parent_had_the_store_open(url: str, tmp_path: Path) -> None:
    said = run(DAEMON, url, tmp_path)
    assert said == ["['at start', 'before']", "['after', 'at start', 'before']"]
    assert pending(url) == ["after", "at start", "before"]


def test_a_fork_during_a_call_leaves_the_parent_alone_and_refuses_the_childs_calls(url: str, tmp_path: Path) -> None:
    program = """
held, released = threading.Event(), threading.Event()

async def hold(scheduler):
    held.set()
    while not released.is_set():
        await asyncio.sleep(0.01)

import asyncio
thread = threading.Thread(target=scheduler.call, args=[hold])
thread.start()
held.wait()

def child():
    try:
        scheduler.schedule(Remind(7), delay='1h', id='child')
    except WrongLoopError as error:
        print(str(error).partition(": ")[2].rpartition("; ")[0].replace(os.getcwd(), ""))

in_child(child)
released.set()
thread.join()
scheduler.schedule(Remind(7), delay='1h', id='parent')
"""
    said = run("from aiodelay import WrongLoopError\n" + program, url, tmp_path)
    assert len(said) == 1
    assert "was open when this process was forked. Close it before a fork" in said[0]
    assert pending(url) == ["parent"]


FORKING_AMID = """
from aiodelay import ClosedError, Message

def read_on():
    try:
        print(sum(1 for _ in found))
    except ClosedError as error:
        print(error)

scheduler.schedule_many(Message(Remind(n), delay='1h') for n in range(1_100))
found = scheduler.pending()
next(found)
in_child(read_on)
read_on()
"""


def test_an_iteration_says_that_a_fork_has_ended_it(url: str, tmp_path: Path) -> None:
    said = run(FORKING_AMID, url, tmp_path)
    assert said == ["the connection of this iteration is closed; begin the iteration again"] * 2


@pytest.mark.parametrize("found", redis_servers(), ids=lambda found: found.name)
def test_an_iteration_on_redis_goes_on_in_the_parent_alone(found: Found, tmp_path: Path) -> None:
    with serving(found) as url:
        said = run(FORKING_AMID, url, tmp_path)
    assert said == ["the connection of this iteration is closed; begin the iteration again", "1099"]


def test_an_iteration_says_that_the_connection_was_closed(url: str) -> None:
    scheduler = BlockingScheduler(url)
    scheduler.schedule_many(Message(Remind(n), delay="1h") for n in range(1_100))
    read = 0

    def close_amid() -> None:
        nonlocal read
        for _ in scheduler.pending():
            read += 1
            scheduler.close()

    with pytest.raises(ClosedError, match="begin the iteration again"):
        close_amid()
    scheduler.close()
    assert read == 500


@pytest.mark.parametrize("found", redis_servers(), ids=lambda found: found.name)
def test_a_forked_process_connects_anew_to_redis(found: Found, tmp_path: Path) -> None:
    with serving(found) as url:
        run(FORKING, url, tmp_path)
        assert pending(url) == FORKED


def test_a_process_forked_while_another_thread_connects_is_not_stuck(url: str, tmp_path: Path) -> None:
    held = """
held, released = threading.Event(), threading.Event()

def connect():
    with scheduler._shared._lock:
        held.set()
        released.wait()

thread = threading.Thread(target=connect)
thread.start()
held.wait()
in_child(lambda: scheduler.schedule(Remind(7), delay='1h', id='child'))
released.set()
thread.join()
scheduler.schedule(Remind(7), delay='1h', id='parent')
"""
    run(held, url, tmp_path)
    assert pending(url) == ["child", "parent"]


WAITING = """
import asyncio


def innermost(n):
    frame = sys._current_frames()[threading.main_thread().ident]
    names = []
    while frame is not None and len(names) < n:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


async def waits():
    while innermost(3) != ['wait', 'result', 'call']:  # until the main thread waits for the answer
        await asyncio.sleep(0.01)
    os.write(1, b'waiting\\n')
    try:
        await asyncio.Event().wait()
    finally:
        os.write(1, b'cancelled\\n')


scheduler.schedule(Remind(7), delay='1h', id='1')
try:
    scheduler.call(lambda _: waits())
except KeyboardInterrupt:
    os.write(1, b'interrupted\\n')
scheduler.schedule(Remind(7), delay='1h', id='2')
scheduler.close()
"""


def test_ctrl_c_ends_a_call_that_waits(url: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM + WAITING)
    with Program(str(path), url, cwd=tmp_path) as program:
        program.out.wait_for("waiting")
        program.send(signal.SIGINT)
        assert program.exit_code() == 0, program.err.seen
        assert sorted(program.out.seen) == ["cancelled", "interrupted", "waiting"]
    assert pending(url) == ["1", "2"]


IN_VAIN = """
import logging

logging.basicConfig()
try:
    BlockingScheduler('sqlite:///none/shop.db', open_timeout='1h').schedule(Remind(7), delay='1h')
except KeyboardInterrupt:
    for thread in threading.enumerate():
        if thread.name.startswith('aiodelay'):
            thread.join()
    os.write(1, b'interrupted\\n')
"""


SLOW_TO_START = """
def start_and_stay(thread, start=threading.Thread.start):
    start(thread)
    if thread.name == 'aiodelay blocking':
        threading.Event().wait()


threading.Thread.start = start_and_stay
"""


@pytest.mark.parametrize("slow", ["", SLOW_TO_START], ids=["connecting", "starting its thread"])
def test_ctrl_c_ends_a_wait_for_a_store_and_its_thread(url: str, tmp_path: Path, slow: str) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM + slow + IN_VAIN)
    with Program(str(path), url, cwd=tmp_path) as program:
        program.err.wait_for("trying again for up to 1h")
        program.send(signal.SIGINT)
        assert program.exit_code() == 0, program.err.seen
        assert program.out.seen == ["interrupted"]
        assert "Traceback" not in "\n".join(program.err.seen)


def test_ctrl_c_while_it_connects(url: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM + "print('started', flush=True)\nscheduler.schedule(Remind(7), delay='1h', id='1')")
    with closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with Program(str(path), url, cwd=tmp_path) as program:
            program.out.wait_for("started")
            program.send(signal.SIGINT)
            program.err.wait_for("KeyboardInterrupt")
            program.exit_code()

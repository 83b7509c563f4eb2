from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodelay.testing.loop import VirtualLoop, WaitingForeverError

_T = TypeVar("_T")
HOUR_S = 3600.0


@pytest.fixture(params=[False, True], ids=["plain", "debug"])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    with asyncio.Runner(loop_factory=VirtualLoop, debug=request.param) as runner:
        yield runner.run


Run = Callable[[Coroutine[Any, Any, _T]], _T]


def virtual_loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


@contextlib.contextmanager
def limits(monkeypatch: pytest.MonkeyPatch, **values: float) -> Iterator[None]:
    with monkeypatch.context() as patch:
        for name, value in values.items():
            patch.setattr(VirtualLoop, name, value)
        yield


class TestTime:
    def test_a_year_costs_nothing(self, run: Run[None]) -> None:
        async def sleep() -> None:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(365 * 24 * HOUR_S)
            assert loop.time() == pytest.approx(365 * 24 * HOUR_S)

        real = time.monotonic()
        run(sleep())
        assert time.monotonic() - real < 5

    def test_time_stands_still_while_something_is_ready(self, run: Run[None]) -> None:
        async def spin() -> None:
            loop = asyncio.get_running_loop()
            loop.call_later(1, lambda: None)
            for _ in range(100):
                await asyncio.sleep(0)
            assert loop.time() == 0

        run(spin())

    @given(delays=st.lists(st.floats(0, 1e5) | st.integers(0, 100).map(float), max_size=20))
    def test_timers_fire_in_order_at_their_own_instants(self, delays: list[float]) -> None:
        fired: list[tuple[float, float]] = []

        async def wait() -> None:
            loop = asyncio.get_running_loop()
            async with asyncio.TaskGroup() as tasks:

                async def sleep(delay: float) -> None:
                    await asyncio.sleep(delay)
                    fired.append((delay, loop.time()))

                for delay in delays:
                    tasks.create_task(sleep(delay))

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(wait())
        assert sorted(delays) == pytest.approx([delay for delay, _ in fired], abs=1e-6)
        assert all(0 <= at - delay + 1e-9 <= 1.1e-6 for delay, at in fired)

    @given(elapsed_us=st.integers(0, 10**15))
    def test_time_moves_on_however_coarse_its_floats_are(self, elapsed_us: int) -> None:
        async def sleep(loop: VirtualLoop) -> None:
            for i in range(5):
                await asyncio.sleep(1e-6)
                assert loop.elapsed_us == elapsed_us + i + 1

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, VirtualLoop)
            loop._now_us = elapsed_us
            runner.run(sleep(loop))

    @given(begins=st.floats(0, 1e6), lasts=st.floats(1e-6, 1e3))
    def test_waiting_for_what_is_left_of_a_time_ends(self, begins: float, lasts: float) -> None:
        async def wait() -> None:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(begins)
            started = loop.time()
            waits = 0
            while (left := started + lasts - loop.time()) > 0 or (left := lasts - (loop.time() - started)) > 0:
                await asyncio.sleep(left)
                waits += 1
                assert waits <= 3
            assert loop.time() - started == pytest.approx(lasts, abs=3e-6)

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(wait())

    def test_a_timer_of_the_past_fires_now(self, run: Run[None]) -> None:
        async def wait() -> None:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(10)
            for when in (5.0, -5.0, -math.inf):
                woken = asyncio.Event()
                loop.call_at(when, woken.set)
                await woken.wait()
            assert loop.time() == 10

        run(wait())

    def test_timeouts_run_in_virtual_time(self, run: Run[None]) -> None:
        async def wait() -> None:
            loop = asyncio.get_running_loop()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(HOUR_S):
                    await asyncio.sleep(math.inf)
            assert loop.time() == HOUR_S
            with anyio.move_on_after(HOUR_S):
                await anyio.sleep_forever()
            assert loop.time() == 2 * HOUR_S

        run(wait())

    def test_a_timer_at_infinity_can_be_cancelled(self, run: Run[None]) -> None:
        async def wait() -> None:
            timer = asyncio.get_running_loop().call_later(math.inf, pytest.fail)
            await asyncio.sleep(HOUR_S)
            timer.cancel()
            assert timer.cancelled()

        run(wait())

    def test_quiet_returns_when_only_time_is_waited_for(self, run: Run[None]) -> None:
        async def wait() -> None:
            loop, seen = virtual_loop(), list[str]()

            async def work() -> None:
                for _ in range(10):
                    await asyncio.sleep(0)
                await asyncio.to_thread(time.sleep, 0.01)
                seen.append("worked")
                await asyncio.sleep(1)
                seen.append("late")

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(work())
                await asyncio.gather(loop.quiet(), loop.quiet())
                assert (loop.elapsed_us, seen) == (0, ["worked"])
                await loop.pass_time(1000)
                assert (loop.elapsed_us, seen) == (1_000_000, ["worked", "late"])

        run(wait())


async def forever() -> None:
    await asyncio.Event().wait()


class TestWaitingForever:
    def test_it_is_an_error_that_names_every_task_and_where_it_waits(self, run: Run[None]) -> None:
        async def wait() -> None:
            other = asyncio.create_task(forever(), name="the other one")
            await asyncio.shield(other)

        with pytest.raises(WaitingForeverError) as caught:
            run(wait())
        assert caught.value.reason == "nothing is ready, no timer is set and no outside work is under way"
        mine, other = sorted(caught.value.waiting, key=lambda line: line.startswith("the other one"))
        assert ".wait (" in mine
        assert f"{__file__}:" in mine
        assert other.startswith("the other one: forever (")
        assert "> Event.wait (" in other
        assert "outside_work()" in str(caught.value)
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)

    def test_the_traceback_shows_the_line_that_waits(self, run: Run[None]) -> None:
        with pytest.raises(WaitingForeverError) as caught:
            run(forever())
        cause = caught.value.__cause__
        assert cause is not None
        names = []
        traceback = cause.__traceback__
        while traceback is not None:
            names.append(traceback.tb_frame.f_code.co_name)
            traceback = traceback.tb_next
        assert "forever" in names

    def test_cleanup_runs_and_the_loop_remains_usable(self, run: Run[None]) -> None:
        cleaned: list[float] = []

        async def wait() -> None:
            try:
                await forever()
            finally:
                await asyncio.sleep(5)
                cleaned.append(asyncio.get_running_loop().time())

        with pytest.raises(WaitingForeverError):
            run(wait())
        assert cleaned == [5]
        run(asyncio.sleep(1))

    def test_an_infinite_sleep_is_waiting_for_ever(self, run: Run[None]) -> None:
        with pytest.raises(WaitingForeverError):
            run(asyncio.sleep(math.inf))

    def test_a_failing_cleanup_is_its_cause(self, run: Run[None]) -> None:
        async def wait() -> None:
            try:
                await forever()
            finally:
                raise ZeroDivisionError

        with pytest.raises(WaitingForeverError) as caught:
            run(wait())
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def test_a_swallowed_cancellation_hides_nothing(self, run: Run[None]) -> None:
        async def wait() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await forever()

        with pytest.raises(WaitingForeverError):
            run(wait())

    def test_one_that_waits_on_regardless_is_left_behind(self) -> None:
        async def wait() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await forever()
            await forever()

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            with pytest.raises(WaitingForeverError) as caught:
                runner.run(wait())
            assert isinstance(caught.value.__cause__, WaitingForeverError)
            runner.run(asyncio.sleep(1))

    def test_run_forever_raises_it_too(self) -> None:
        loop = VirtualLoop()
        try:
            with pytest.raises(WaitingForeverError):
                loop.run_forever()
        finally:
            loop.close()

    def test_waking_up_now_and_then_is_no_end(self, run: Run[None], monkeypatch: pytest.MonkeyPatch) -> None:
        async def wait() -> None:
            def tick() -> None:
                virtual_loop().call_later(1, tick)

            tick()
            await virtual_loop().pass_time(2_000_000)
            await forever()

        with limits(monkeypatch, jump_limit=1000), pytest.raises(WaitingForeverError, match="time has jumped 1000"):
            run(wait())

    def test_many_tasks_are_cut_short_in_its_text(self) -> None:
        error = WaitingForeverError("why", "what", tuple(f"Task-{i}" for i in range(25)))
        assert str(error).splitlines() == [
            "why; these tasks are pending:",
            *(f"  Task-{i}" for i in range(20)),
            "  and 5 more",
            "what",
        ]
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def wait_for_real(released: threading.Event) -> str:
    assert released.wait(10)
    return "answer"


class TestOutsideWork:
    def test_time_stands_still_while_a_thread_works(self, run: Run[None]) -> None:
        async def wait() -> None:
            loop, released = asyncio.get_running_loop(), threading.Event()
            timer = loop.call_later(1, pytest.fail)
            threading.Timer(0.05, released.set).start()
            assert await asyncio.to_thread(wait_for_real, released) == "answer"
            assert loop.time() == 0
            timer.cancel()

        run(wait())

    def test_a_thread_pool_of_ones_own_counts(self, run: Run[None]) -> None:
        async def wait() -> None:
            loop = asyncio.get_running_loop()
            with ThreadPoolExecutor(1) as pool:
                async with asyncio.timeout(1):
                    await loop.run_in_executor(pool, time.sleep, 0.05)
            assert loop.time() == 0

        run(wait())

    def test_a_process_pool_counts(self, run: Run[None]) -> None:
        async def wait() -> None:
            loop = asyncio.get_running_loop()
            with ProcessPoolExecutor(1) as pool:
                async with asyncio.timeout(1):
                    assert await loop.run_in_executor(pool, math.factorial, 5) == 120
            assert loop.time() == 0

        run(wait())

    def test_a_replaced_default_executor_counts(self, run: Run[None]) -> None:
        async def wait() -> None:
            loop = asyncio.get_running_loop()
            loop.set_default_executor(ThreadPoolExecutor(1, thread_name_prefix="mine"))
            async with asyncio.timeout(1):
                name = await asyncio.to_thread(lambda: threading.current_thread().name)
            assert name.startswith("mine")

        run(wait())

    def test_a_cancelled_call_counts_until_its_thread_has_ended(self, run: Run[None]) -> None:
        async def wait() -> None:
            loop, released, ended = asyncio.get_running_loop(), threading.Event(), threading.Event()

            def work() -> None:
                wait_for_real(released)
                ended.set()

            call = asyncio.create_task(asyncio.to_thread(work))
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            threading.Timer(0.05, released.set).start()
            await asyncio.sleep(1)
            assert ended.is_set()
            assert loop.time() == 1

        run(wait())

    def test_a_call_cancelled_before_it_began_does_not_count(self, run: Run[None]) -> None:
        async def wait() -> None:
            loop, released = asyncio.get_running_loop(), threading.Event()
            with ThreadPoolExecutor(1) as pool:
                first = loop.run_in_executor(pool, wait_for_real, released)
                second = loop.run_in_executor(pool, pytest.fail)
                second.cancel()
                released.set()
                await first
                await asyncio.sleep(1)

        run(wait())

    def test_a_failing_call_ends_too(self, run: Run[None]) -> None:
        async def wait() -> None:
            with pytest.raises(ZeroDivisionError):
                await asyncio.to_thread(divmod, 1, 0)
            await asyncio.sleep(1)

        run(wait())

    def test_a_refused_call_does_not_count(self, run: Run[None]) -> None:
        async def wait() -> None:
            pool = ThreadPoolExecutor(1)
            pool.shutdown()
            with pytest.raises(RuntimeError):
                asyncio.get_running_loop().run_in_executor(pool, int)
            await asyncio.sleep(1)

        run(wait())

    def test_a_loop_that_needed_no_thread_ends_without_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        started: list[str] = []
        start = threading.Thread.start

        def noted(thread: threading.Thread) -> None:
            started.append(thread.name)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", noted)
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(asyncio.sleep(1))
        assert started == []

    @pytest.mark.parametrize("calls", [0, 1])
    def test_a_call_after_the_end_of_the_threads_is_refused(self, calls: int, run: Run[None]) -> None:
        async def end() -> None:
            loop = asyncio.get_running_loop()
            for _ in range(calls):
                await asyncio.to_thread(int)
            await loop.shutdown_default_executor()
            with pytest.raises(RuntimeError, match="shutdown"):
                await asyncio.to_thread(int)

        run(end())

    def test_no_answer_is_lost_between_many_threads_and_timers(self) -> None:
        async def wait() -> None:
            loop = asyncio.get_running_loop()

            async def call(i: int) -> None:
                for _ in range(50):
                    at = loop.time()
                    await asyncio.to_thread(int)
                    assert loop.time() == at
                    await asyncio.sleep(i + 1)

            async with asyncio.TaskGroup() as tasks:
                for i in range(8):
                    tasks.create_task(call(i))

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(wait())

    def test_anyio_worker_threads_count(self, run: Run[None]) -> None:
        async def wait() -> None:
            loop = asyncio.get_running_loop()
            for _ in range(20):
                async with asyncio.timeout(1):
                    await anyio.to_thread.run_sync(time.sleep, 0.002)
            assert loop.time() == 0
            await asyncio.sleep(1)

        run(wait())

    def test_a_block_counts(self, run: Run[None]) -> None:
        async def wait() -> None:
            loop, answer = virtual_loop(), Future[str]()
            with loop.outside_work():
                threading.Timer(0.05, answer.set_result, ("answer",)).start()
                async with asyncio.timeout(1):
                    assert await asyncio.wrap_future(answer) == "answer"
            assert loop.time() == 0
            await asyncio.sleep(1)

        run(wait())

    def test_waiting_for_virtual_time_meanwhile_is_an_error(
        self, run: Run[None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def wait_inside() -> None:
            with virtual_loop().outside_work():
                await asyncio.sleep(1)

        async def wait_in_thread() -> None:
            await anyio.to_thread.run_sync(anyio.from_thread.run, asyncio.sleep, 1)

        with limits(monkeypatch, outside_limit_s=0.05):
            for wait in (wait_inside, wait_in_thread):
                with pytest.raises(WaitingForeverError, match=r"no sign for 0\.05 real seconds"):
                    run(wait())

    def test_a_foreign_thread_gets_a_last_chance(self, run: Run[None], monkeypatch: pytest.MonkeyPatch) -> None:
        async def wait() -> None:
            loop, woken = asyncio.get_running_loop(), asyncio.Event()
            threading.Timer(0.05, loop.call_soon_threadsafe, (woken.set,)).start()
            await woken.wait()

        with limits(monkeypatch, forever_grace_s=5):
            run(wait())

    def test_a_thread_that_outlives_the_loop_breaks_nothing(self) -> None:
        released = threading.Event()
        loop = VirtualLoop()
        with ThreadPoolExecutor(1) as pool:
            loop.run_in_executor(pool, wait_for_real, released)
            loop.close()
            released.set()


class TestSocketsProcessesSignals:
    def test_a_socket_gets_real_time_before_a_jump(self, run: Run[None], monkeypatch: pytest.MonkeyPatch) -> None:
        async def talk() -> None:
            async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(await reader.readline())
                await writer.drain()
                writer.close()

            async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
                async with asyncio.timeout(HOUR_S):
                    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
                    writer.write(b"hello\n")
                    assert await reader.readline() == b"hello\n"
                    writer.close()
                    await writer.wait_closed()
            assert asyncio.get_running_loop().time() == 0

        with limits(monkeypatch, socket_grace_s=5):
            run(talk())

    def test_a_silent_socket_does_not_stop_time(self, run: Run[None]) -> None:
        async def wait() -> None:
            loop = asyncio.get_running_loop()
            ours, theirs = socket.socketpair()
            with ours, theirs:
                ours.setblocking(False)
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(HOUR_S):
                        await loop.sock_recv(ours, 1)
            assert loop.time() == HOUR_S

        run(wait())

    def test_a_silent_socket_alone_is_waiting_for_ever(self, run: Run[None], monkeypatch: pytest.MonkeyPatch) -> None:
        async def wait() -> None:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                ours.setblocking(False)
                await asyncio.get_running_loop().sock_recv(ours, 1)

        with limits(monkeypatch, forever_grace_s=0.02), pytest.raises(WaitingForeverError):
            run(wait())

    def test_a_process_is_awaited_as_outside_work(self, run: Run[None]) -> None:
        async def wait() -> None:
            loop = virtual_loop()
            with loop.outside_work():
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", "print(6 * 7)", stdout=subprocess.PIPE
                )
                async with asyncio.timeout(1):
                    out, _ = await process.communicate()
            assert (out.strip(), process.returncode, loop.time()) == (b"42", 0, 0)

        run(wait())

    def test_a_signal_interrupts_real_waiting(self, run: Run[None]) -> None:
        async def wait() -> None:
            released = threading.Event()
            main = threading.get_ident()
            threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT)).start()
            try:
                await asyncio.to_thread(wait_for_real, released)
            finally:
                released.set()

        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
        try:
            with pytest.raises(KeyboardInterrupt):
                run(wait())
        finally:
            signal.signal(signal.SIGINT, before)


class TestAsAnAsyncioLoop:
    def test_runner_closes_generators_and_threads(self) -> None:
        closed: list[str] = []

        async def numbers() -> AsyncIterator[int]:
            try:
                while True:
                    yield 1
            finally:
                await asyncio.sleep(HOUR_S)
                closed.append("generator")

        async def begin() -> None:
            generator = numbers()
            await anext(generator)
            closed_later.append(generator)
            await asyncio.to_thread(int)

        closed_later: list[object] = []
        before = threading.active_count()
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(begin())
        assert closed == ["generator"]
        assert threading.active_count() == before

    def test_exceptions_of_callbacks_reach_the_handler(self, run: Run[None], caplog: pytest.LogCaptureFixture) -> None:
        async def wait() -> None:
            asyncio.get_running_loop().call_later(1, divmod, 1, 0)
            await asyncio.sleep(2)

        with caplog.at_level(logging.ERROR, "asyncio"):
            run(wait())
        assert "ZeroDivisionError" in caplog.text

    def test_it_cannot_be_run_twice_at_a_time(self, run: Run[None]) -> None:
        async def nest() -> None:
            loop = asyncio.get_running_loop()
            with pytest.raises(RuntimeError, match="already running"):
                loop.run_until_complete(loop.create_future())
            await asyncio.sleep(1)

        run(nest())

    def test_a_plain_awaitable_can_be_run(self) -> None:
        class Answer:
            def __await__(self) -> Generator[Any, None, int]:
                yield from asyncio.sleep(1).__await__()
                return 42

        loop = VirtualLoop()
        assert loop.run_until_complete(Answer()) == 42
        loop.close()

"""`VirtualLoop`: an event loop with virtual time, for tests. An hour costs no real time and every timer is punctual.

Virtual time is a whole number of microseconds, as in `datetime`. When the loop has nothing to do, virtual time jumps to
the next timer. So every timer fires at its own instant, in order, and a test takes only the time that its code needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import selectors
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import Context
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, TypeVarTuple, Unpack

from aiodelay.errors import AiodelayError

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

__all__ = ["VirtualLoop", "WaitingForeverError"]

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_Events = list[tuple[selectors.SelectorKey, int]]

_SECOND_US = 1_000_000
# asyncio adds a nanosecond to "now" when it searches for due timers. Above this time, a float cannot show a nanosecond.
_COARSE_S = 2.0**23
_ANYIO_POLL_S = 0.01
_TASKS_SHOWN = 20


class WaitingForeverError(AiodelayError):
    """Every task of a `VirtualLoop` waits, and no timer or outside work is left that could end a wait.

    Args:
        reason: The reason why the wait cannot end.
        advice: The change of the test that would let the wait end.
        waiting: One line per pending task: its name, and the place in the code where it waits.
    """

    reason: str
    advice: str
    waiting: tuple[str, ...]

    def __init__(self, reason: str, advice: str, waiting: tuple[str, ...]) -> None:
        super().__init__(reason, advice, waiting)
        self.reason, self.advice, self.waiting = reason, advice, waiting

    def __str__(self) -> str:
        hidden = len(self.waiting) - _TASKS_SHOWN
        lines = [
            f"{self.reason}; these tasks are pending:",
            *(f"  {line}" for line in self.waiting[:_TASKS_SHOWN]),
            *([f"  and {hidden} more"] if hidden > 0 else []),
            self.advice,
        ]
        return "\n".join(lines)


class _Follower(Protocol):
    def follow(self, loop: VirtualLoop) -> None: ...


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, for tests: `asyncio.Runner(loop_factory=VirtualLoop)`.

    When nothing is ready, time jumps to the next timer. If there is no timer either, the test would wait for ever.
    Then the loop cancels the future given to `run_until_complete` and raises `WaitingForeverError`.

    While outside work is under way, virtual time stands still and the loop waits in real time. Outside work is:

    - a call of `run_in_executor`, also by `asyncio.to_thread` and `getaddrinfo`,
    - a call of `anyio.to_thread.run_sync`,
    - a block of `outside_work()`.

    Before each jump, open sockets and pipes get `socket_grace_s` real seconds to become ready. The loop does not see
    other threads and processes: without `outside_work()`, time may jump while they work.

    Timers are never early. A timer set for `loop.time() + ms / 1000` fires when at least `ms` milliseconds have passed
    on the virtual clock, and exactly then if the loop is idle. This holds for the first 34 years of virtual time.
    """

    socket_grace_s: float = 0.005
    """Real seconds that open sockets get before each jump."""

    forever_grace_s: float = 0.5
    """Real seconds that other threads and open sockets get before the loop raises `WaitingForeverError`."""

    outside_limit_s: float = 60.0
    """If outside work gives no sign for this number of real seconds, the loop raises `WaitingForeverError`."""

    jump_limit = 500_000
    """The most jumps of time in one `run_until_complete`. After more jumps, the loop raises `WaitingForeverError`.

    Jumps inside `pass_time` do not count. The limit ends a test that waits for ever while another task wakes up
    again and again."""

    next_followers: ClassVar[weakref.WeakSet[_Follower]] = weakref.WeakSet()
    """Clocks that will follow the virtual loop that runs next."""

    def __init__(self) -> None:
        self._now_us = 0
        self._promised_us = 0
        self._jumps = 0
        self._outside = 0
        self._stalled_s = 0.0
        self._quiet: list[asyncio.Future[None]] = []
        self._main: asyncio.Future[Any] | None = None
        self._error: WaitingForeverError | None = None
        self._selecting = _VirtualSelector(self._on_idle)
        self._threads: ThreadPoolExecutor | None = None
        super().__init__(self._selecting)

    @property
    def elapsed_us(self) -> int:
        """Microseconds of virtual time since the loop was created."""
        return self._now_us

    @property
    def jumps(self) -> int:
        """The jumps of time in the last `run_until_complete`, as `jump_limit` counts them."""
        return self._jumps

    def time(self) -> float:
        """Return `elapsed_us` in seconds, as asyncio expects it."""
        seconds = self._now_us / _SECOND_US
        return seconds if seconds < _COARSE_S else math.nextafter(seconds, math.inf)

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call `callback` after `delay` seconds; see `call_at`."""
        now = self.time()
        when = now + delay if delay <= 0 else max(now + delay, math.nextafter(now, math.inf))
        return self.call_at(when, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call `callback` at the time `when` of `time()`, rounded up to a microsecond. `math.inf` means never.

        An excess over a microsecond that is as small as a rounding error of floats is ignored.

        A timer later than now never fires at the current instant, even if its time rounds to this instant. Otherwise
        code that waits again for the remainder lost by rounding would spin for ever.
        """
        if when == math.inf:
            return asyncio.TimerHandle(when, callback, args, self, context)
        at_us = _to_us(max(when, 0.0))
        if when > self.time():
            at_us = max(at_us, self._now_us + 1)
        return super().call_at(at_us / _SECOND_US, callback, *args, context=context)

    def run_until_complete(self, future: Generator[Any, None, _T] | Awaitable[_T]) -> _T:
        """Run until `future` is done, as asyncio does.

        Raises:
            WaitingForeverError: `future` could never become done. The loop cancelled it at the place where it waited.
                If the cancelled `future` raised an exception, that exception is the cause of this error. If `future`
                ignores the cancellation and waits on, it stays pending.
        """
        if self.is_running():
            return super().run_until_complete(future)
        while self.next_followers:
            self.next_followers.pop().follow(self)
        main: asyncio.Future[_T] = asyncio.ensure_future(future, loop=self)  # type: ignore[arg-type]
        self._main, self._error, self._jumps = main, None, 0
        try:
            result = super().run_until_complete(main)
        except (Exception, asyncio.CancelledError) as problem:
            if (error := self._taken_error()) is None or error is problem:
                raise
            raise error from problem
        finally:
            self._main = None
        if (error := self._taken_error()) is not None:
            raise error
        return result

    async def watch(self, awaitable: Awaitable[_T]) -> _T:
        """Await `awaitable`. If it waits for ever, cancel it instead of the future of `run_until_complete`.

        This is for a test runner whose task must survive the test, such as anyio's plugin.

        Raises:
            WaitingForeverError: `awaitable` could never become done. The loop cancelled it at the place where it
                waited.
        """
        main, task = self._main, asyncio.current_task()
        self._main = task
        try:
            return await awaitable
        except asyncio.CancelledError as problem:
            if task is None or (error := self._taken_error()) is None:
                raise
            task.uncancel()
            raise error from problem
        finally:
            self._main = main

    def set_default_executor(self, executor: ThreadPoolExecutor) -> None:  # type: ignore[override]
        """Use `executor` for `run_in_executor(None, ...)`, as asyncio does."""
        self._threads = executor
        super().set_default_executor(executor)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[_Ts]], _T], *args: *_Ts
    ) -> asyncio.Future[_T]:
        """Call `func` in another thread or process. Time stands still until the call has ended, cancelled or not."""
        submitting = _Submitting(executor or self._default_threads())
        answer = super().run_in_executor(submitting, func, *args)
        self._count_outside(submitting.future, answer)
        return answer

    def _default_threads(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self.set_default_executor(ThreadPoolExecutor(thread_name_prefix="asyncio"))
        assert self._threads is not None
        return self._threads

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Wait in real time until the threads of the default executor have ended. `timeout` never expires."""
        if self._threads is None:  # No call needed a thread. asyncio would start one to wait for the others.
            self._default_threads().shutdown()
            return
        with self.outside_work():
            if sys.version_info >= (3, 12):
                await super().shutdown_default_executor(timeout)
            else:
                await super().shutdown_default_executor()

    @contextlib.contextmanager
    def outside_work(self) -> Iterator[None]:
        """Stop virtual time during the block, to wait for an answer from a thread, socket or process.

        Blocks may be nested, and several tasks may use them at a time. Enter and leave a block in the loop's thread.
        Do not wait for virtual time inside a block: virtual time does not pass there.
        """
        self._outside += 1
        try:
            yield
        finally:
            self._outside -= 1

    async def quiet(self) -> None:
        """Return when nothing more can happen at this instant: every other task waits for a later time."""
        waiter = self.create_future()
        self._quiet.append(waiter)
        await waiter

    async def pass_time(self, ms: int) -> None:
        """Let `ms` milliseconds pass. Return when everything that could happen until then has happened."""
        self._promised_us = max(self._promised_us, self._now_us + ms * 1000)
        await asyncio.sleep(ms / 1000)
        await self.quiet()

    def _on_idle(self, timeout: float | None) -> _Events:
        """Decide the next step when nothing is ready: wait for outside work, let time jump, or end the test."""
        if self._outside:
            return self._stand_still(self.outside_limit_s)
        if self._anyio_works():
            return self._stand_still(_ANYIO_POLL_S)
        self._stalled_s = 0.0
        # Poll even if the grace is 0. An anyio thread may have answered between the last select and _anyio_works().
        if events := self._selecting.wait(self._grace_s(last_chance=timeout is None and not self._quiet)):
            return events
        if self._wake_quiet():
            return []
        if timeout is None:
            self._end_wait(
                "nothing is ready, no timer is set and no outside work is under way",
                "if a thread, socket or process should answer, await it inside 'with loop.outside_work():'",
            )
        else:
            self._jump(timeout)
        return []

    def _stand_still(self, seconds: float) -> _Events:
        events = self._selecting.wait(seconds)
        self._stalled_s = 0.0 if events else self._stalled_s + seconds
        if self._stalled_s >= self.outside_limit_s:
            self._stalled_s = 0.0
            self._end_wait(
                f"outside work has given no sign for {self.outside_limit_s:g} real seconds",
                "outside work must not wait for a timer, because virtual time stands still meanwhile;"
                " if the work is slow, raise loop.outside_limit_s",
            )
        return events

    def _grace_s(self, *, last_chance: bool) -> float:
        sockets = len(self._selecting.get_map()) > 1  # one socket is the loop's own, by which threads wake it
        if last_chance:
            return self.forever_grace_s if sockets or threading.active_count() > 1 else 0.0
        return self.socket_grace_s if sockets else 0.0

    def _wake_quiet(self) -> bool:
        waiters = [waiter for waiter in self._quiet if not waiter.done()]
        self._quiet.clear()
        for waiter in waiters:
            waiter.set_result(None)
        return bool(waiters)

    def _jump(self, timeout: float) -> None:
        self._now_us = max(_to_us(self.time() + timeout), self._now_us + 1)
        if self._now_us > self._promised_us:
            self._jumps += 1
        if self._jumps > self.jump_limit:
            self._jumps = 0
            self._end_wait(
                f"time has jumped {self.jump_limit} times, to {self.time():.0f} s, without an end",
                "let long times pass with 'await clock.advance(...)', or raise loop.jump_limit",
            )

    def _end_wait(self, reason: str, advice: str) -> None:
        error = WaitingForeverError(reason, advice, tuple(sorted(map(_described, asyncio.all_tasks(self)))))
        # Cancel the test first: its cleanup runs, and the traceback shows where it waits. If it cannot be cancelled,
        # raise the error here.
        if self._error is not None or self._main is None or not self._main.cancel(reason):
            raise error
        self._error = error

    def _taken_error(self) -> WaitingForeverError | None:
        error, self._error = self._error, None
        return error

    def _count_outside(self, call: Future[Any], answer: asyncio.Future[Any]) -> None:
        # Outside work ends when both futures are done. The call ends before its answer arrives in the loop, and a
        # cancelled answer ends before its call.
        self._outside += 1
        open_ends = 2

        def end() -> None:
            nonlocal open_ends
            open_ends -= 1
            self._outside -= not open_ends

        def end_from_thread(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # race: the loop was closed before the call ended
                self.call_soon_threadsafe(end)

        answer.add_done_callback(lambda _: end())
        call.add_done_callback(end_from_thread)

    def _anyio_works(self) -> bool:
        # anyio's worker threads bypass run_in_executor. A call counts as unfinished in the queue of its thread until
        # the thread has handed over the answer.
        return any(
            thread.name == "AnyIO worker thread"
            and getattr(thread, "loop", None) is self
            and getattr(getattr(thread, "queue", None), "unfinished_tasks", 0)
            for thread in threading.enumerate()
        )


class _VirtualSelector(selectors.BaseSelector):
    """A real selector that calls `on_idle` instead of blocking."""

    def __init__(self, on_idle: Callable[[float | None], _Events]) -> None:
        self._real = selectors.DefaultSelector()
        self._on_idle = on_idle

    def select(self, timeout: float | None = None) -> _Events:
        events = self._real.select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        return self._on_idle(timeout)

    def wait(self, seconds: float) -> _Events:
        return self._real.select(seconds)

    def register(self, fileobj: FileDescriptorLike, events: int, data: object = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: FileDescriptorLike, events: int, data: object = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[FileDescriptorLike, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class _Submitting(Executor):
    """An executor that submits one call to another executor and keeps its future."""

    future: Future[Any]

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def submit(self, fn: Callable[..., Any], /, *args: object, **kwargs: object) -> Future[Any]:
        self.future = self._executor.submit(fn, *args, **kwargs)
        return self.future


def _to_us(seconds: float) -> int:
    """Round up to a microsecond, but ignore the small rounding errors of the float sum `loop.time() + delay`."""
    return math.ceil(seconds * 1e6 - 4e6 * math.ulp(seconds))


def _described(task: asyncio.Task[Any]) -> str:
    return f"{task.get_name()}: {' > '.join(_steps(task.get_coro())) or task.get_coro()}"


def _steps(awaited: object) -> Iterator[str]:
    """Yield each coroutine from the task inwards: its name, and the line where it waits."""
    while awaited is not None:
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(awaited, f"{kind}_frame")), None)
        frame = getattr(awaited, f"{kind}_frame", None)
        if frame is None:
            return
        yield f"{getattr(awaited, '__qualname__', awaited)} ({frame.f_code.co_filename}:{frame.f_lineno})"
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")

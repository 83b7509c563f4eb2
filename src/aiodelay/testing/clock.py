"""The clocks of the test kit: `VirtualClock` and `LoopClock`.

A `VirtualClock` shows the time of a `VirtualLoop`, lets that time pass and can step the wall clock. A `LoopClock` shows
virtual time on a `VirtualLoop` and real time on any other loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from aiodelay.core.durations import Duration, parse_duration
from aiodelay.errors import ConfigurationError, InputError, WrongLoopError
from aiodelay.ports.clock import Clock, SystemClock

from .loop import VirtualLoop, WaitingForeverError

__all__ = ["START", "IdleHook", "LoopClock", "VirtualClock", "VirtualLoop", "WaitingForeverError"]

START = datetime(2030, 1, 1, tzinfo=UTC)
"""The default wall-clock time at which a `VirtualClock` begins."""

IdleHook: TypeAlias = Callable[[], Awaitable[bool]]
"""A coroutine function that waits until its work is done, and returns whether it had to wait."""

_HOW_TO_GET_ONE = (
    "aiodelay.testing.clock.VirtualLoop. Tests get this loop if they name the fixture 'clock' as an argument."
    " pytest-asyncio >= 1.4: mark the tests @pytest.mark.asyncio(loop_scope='function')."
    " anyio: the tests must not use async fixtures of module or session scope; or give their module a fixture"
    " anyio_backend that returns ('asyncio', {'loop_factory': VirtualLoop})."
    " Neither plugin: use asyncio.Runner(loop_factory=VirtualLoop)."
    " A web framework's TestClient has a real loop: do not use 'clock' with it, or use an asynchronous client"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class VirtualClock:
    """A `Clock` that shows virtual time. By default it starts at 2030-01-01T00:00:00Z.

    With a loop, the clock follows the time of that loop. Without a loop, the test moves the clock with `move()` and
    `advance()`, as a Hypothesis state machine needs it. The clock is not thread-safe.

    Args:
        loop: The loop whose time the clock shows, counted from now on; None for a clock that the test moves.
        start: The first value of `now()`, an aware datetime.
    """

    def __init__(self, loop: VirtualLoop | None = None, *, start: datetime = START) -> None:
        if start.tzinfo is None:
            raise InputError("start", repr(start), "an aware datetime")
        self._wall_us = (start - _EPOCH) // _MICROSECOND
        self._moved_us = 0
        self._refuses_real_loops = False
        self._hooks: list[IdleHook] = []
        self._loop: VirtualLoop | None = None
        if loop is not None:
            self.follow(loop)

    @classmethod
    def of_next_loop(cls, *, start: datetime = START) -> VirtualClock:
        """Return a clock that follows the running virtual loop, or else the virtual loop that runs next.

        Until that loop runs, the test moves the clock. Reading the clock on a loop that is not a `VirtualLoop` raises
        `ConfigurationError`.
        """
        clock = cls(start=start)
        if (loop := _running_loop()) is not None and isinstance(loop, VirtualLoop):
            clock.follow(loop)
        else:
            clock._refuses_real_loops = True
            VirtualLoop.next_followers.add(clock)
        return clock

    def follow(self, loop: VirtualLoop) -> None:
        """Follow the time of `loop` from now on. The time that the clock shows at this moment does not change."""
        self._moved_us = self._elapsed_us()
        self._loop, self._origin_us = loop, loop.elapsed_us

    def now_ms(self) -> int:
        """Return the wall clock as epoch ms, rounded down."""
        return (self._wall_us + self._elapsed_us()) // 1000

    def monotonic_ms(self) -> int:
        """Return the milliseconds since this clock began, rounded down. `step()` does not change them."""
        return self._elapsed_us() // 1000

    def seconds_until(self, at_ms: int) -> float:
        """Return the seconds from now until a wall clock instant; negative if the instant has passed."""
        return (at_ms * 1000 - self._wall_us - self._elapsed_us()) / 1_000_000

    def now(self) -> datetime:
        """Return the wall clock, to the microsecond, in UTC."""
        return _EPOCH + timedelta(microseconds=self._wall_us + self._elapsed_us())

    def step(self, delta: timedelta) -> None:
        """Set the wall clock forwards or backwards by `delta`, as NTP or an operator does. No time passes."""
        self._wall_us += delta // _MICROSECOND

    def move(self, ms: int) -> None:
        """Let `ms` milliseconds pass on a clock that follows no loop.

        Raises:
            InputError: `ms` is negative. Use `step()` to set the wall clock back.
            ConfigurationError: The clock follows a loop. Use `advance()`, which fires the timers of the loop on time.
        """
        if self._followed() is not None:
            raise ConfigurationError("clock.move()", "called on a clock that follows a loop", "await clock.advance()")
        if ms < 0:
            raise InputError("ms", str(ms), "0 or more; clock.step() sets the wall clock back")
        self._moved_us += ms * 1000

    async def advance(
        self,
        delta: Duration | None = None,
        *,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
    ) -> None:
        """Let time pass. Every timer fires at its own instant, in order.

        The call lets time pass until nothing more can happen at the last instant. Then it awaits all idle hooks
        (`add_idle_hook`), again and again, until none of them had to wait for its work. A hook may let more time pass
        to finish its work. Without arguments the duration is 0: the call runs everything that is due now.

        Args:
            delta: The duration, as `timedelta` or as text such as "90m", rounded up to milliseconds.
            hours: Hours to add to `delta`.
            minutes: Minutes to add to `delta`.
            seconds: Seconds to add to `delta`.

        Raises:
            InputError: The duration is negative or unreadable. No time has passed.
            WrongLoopError: The running loop is not the loop that the clock follows. No time has passed.
        """
        ms = parse_duration(timedelta() if delta is None else delta, field="delta")
        ms += parse_duration(timedelta(hours=hours, minutes=minutes, seconds=seconds), field="hours, minutes, seconds")
        loop = self._followed()
        if loop is None and self._refuses_real_loops:
            raise _not_virtual("not a loop of asyncio")
        if loop is None:
            self._moved_us += ms * 1000
        elif loop is not asyncio.get_running_loop():
            raise WrongLoopError("clock", "event loop")
        else:
            await loop.pass_time(ms)
        while any([await hook() for hook in self._hooks]):
            pass

    def add_idle_hook(self, hook: IdleHook) -> None:
        """Make `advance()` await `hook` before it returns.

        Args:
            hook: A coroutine function that waits until its work is done, and returns whether it had to wait. If a hook
                had to wait, `advance()` awaits all hooks again, because the work of one hook may have made work for
                another hook.
        """
        self._hooks.append(hook)

    def _elapsed_us(self) -> int:
        loop = self._followed()
        return self._moved_us if loop is None else self._moved_us + loop.elapsed_us - self._origin_us

    def _followed(self) -> VirtualLoop | None:
        if self._loop is None and self._refuses_real_loops and (real := _running_loop()) is not None:
            raise _not_virtual(type(real).__name__)
        return self._loop


class LoopClock:
    """A `Clock` that shows virtual time on a `VirtualLoop` and real time on any other loop.

    The loop on which the clock is first read decides which time the clock shows. Until then it stands still at `START`.
    """

    def __init__(self) -> None:
        self._virtual = VirtualClock()
        VirtualLoop.next_followers.add(self._virtual)
        self._chosen: Clock | None = None

    def now_ms(self) -> int:
        """Return the wall clock as epoch ms, rounded down."""
        return self._clock().now_ms()

    def monotonic_ms(self) -> int:
        """Return the milliseconds since a fixed instant, rounded down."""
        return self._clock().monotonic_ms()

    def seconds_until(self, at_ms: int) -> float:
        """Return the seconds from now until a wall clock instant; negative if the instant has passed."""
        return self._clock().seconds_until(at_ms)

    def _clock(self) -> Clock:
        if self._chosen is None and (loop := _running_loop()) is not None:
            self._chosen = self._virtual if isinstance(loop, VirtualLoop) else SystemClock()
        return self._chosen or self._virtual


def _not_virtual(loop: str) -> ConfigurationError:
    return ConfigurationError("the event loop under the clock", loop, _HOW_TO_GET_ONE)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None

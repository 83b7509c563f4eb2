"""`VirtualClock`: tells the time of a `VirtualLoop`, lets it pass, steps the wall clock. `LoopClock`: any loop's."""

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
"""The wall-clock time at which every `VirtualClock` begins unless told otherwise."""

IdleHook: TypeAlias = Callable[[], Awaitable[bool]]
"""Returns when some work is done; True if there was any to wait for."""

_HOW_TO_GET_ONE = (
    "aiodelay.testing.clock.VirtualLoop, which tests get that name the fixture 'clock' as an argument"
    " (pytest-asyncio >= 1.4: mark them @pytest.mark.asyncio(loop_scope='function');"
    " anyio: keep them apart from async fixtures of module or session scope, or give their module a fixture"
    " anyio_backend that returns ('asyncio', {'loop_factory': VirtualLoop});"
    " neither: asyncio.Runner(loop_factory=VirtualLoop);"
    " a web framework's TestClient has a real loop: leave 'clock' out, or use an asynchronous client)"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class VirtualClock:
    """A `Clock` that tells virtual time; starts at 2030-01-01T00:00:00Z unless told otherwise.

    Given a loop, it follows that loop's time. Without one it is moved by hand, by `move()` and `advance()`; that is
    what a Hypothesis state machine wants. Not for use by several threads.

    Args:
        loop: The loop whose time it tells, counted from now on; None for a clock moved by hand.
        start: What `now()` tells at first; aware.
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
        """Return a clock that will follow the virtual loop that runs next, or the one that is running.

        Until then it is moved by hand. Reading it on a loop that is not a `VirtualLoop` raises `ConfigurationError`.
        """
        clock = cls(start=start)
        if (loop := _running_loop()) is not None and isinstance(loop, VirtualLoop):
            clock.follow(loop)
        else:
            clock._refuses_real_loops = True
            VirtualLoop.next_followers.add(clock)
        return clock

    def follow(self, loop: VirtualLoop) -> None:
        """Tell the time of `loop` from now on; what it tells at this moment stays the same."""
        self._moved_us = self._elapsed_us()
        self._loop, self._origin_us = loop, loop.elapsed_us

    def now_ms(self) -> int:
        """Return the wall clock as epoch ms, rounded down."""
        return (self._wall_us + self._elapsed_us()) // 1000

    def monotonic_ms(self) -> int:
        """Return ms since this clock began, rounded down; `step()` does not touch it."""
        return self._elapsed_us() // 1000

    def seconds_until(self, at_ms: int) -> float:
        """Return the seconds from now until a wall clock instant; negative if it has passed."""
        return (at_ms * 1000 - self._wall_us - self._elapsed_us()) / 1_000_000

    def now(self) -> datetime:
        """Return the wall clock, to the microsecond, in UTC."""
        return _EPOCH + timedelta(microseconds=self._wall_us + self._elapsed_us())

    def step(self, delta: timedelta) -> None:
        """Set the wall clock forwards or backwards by `delta`, as NTP or an operator does; no time passes."""
        self._wall_us += delta // _MICROSECOND

    def move(self, ms: int) -> None:
        """Let `ms` milliseconds pass on a clock moved by hand.

        Raises:
            InputError: `ms` is negative; the wall clock alone goes back, by `step()`.
            ConfigurationError: The clock follows a loop; only `advance()` lets its timers fire on the way.
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
        """Let time pass, with everything that becomes due on the way happening at its own instant and in order.

        Returns when nothing more can happen at the last instant and every idle hook has answered that its work is
        done; a hook may let more time pass for that. Without arguments no time is asked for: what is due now happens.

        Args:
            delta: How long, as `timedelta` or text such as "90m", rounded up to ms; the keywords are added to it.
            hours: Hours to add.
            minutes: Minutes to add.
            seconds: Seconds to add.

        Raises:
            InputError: The duration is negative or unreadable; no time has passed.
            WrongLoopError: Another loop than the one it follows is running; no time has passed.
        """
        ms = parse_duration(timedelta() if delta is None else delta, field="delta")
        ms += parse_duration(timedelta(hours=hours, minutes=minutes, seconds=seconds), field="hours, minutes, seconds")
        loop = self._followed()
        if loop is None and self._refuses_real_loops:
            raise _not_virtual("not one of asyncio")
        if loop is None:
            self._moved_us += ms * 1000
        elif loop is not asyncio.get_running_loop():
            raise WrongLoopError("the clock", "event loop")
        else:
            await loop.pass_time(ms)
        while any([await hook() for hook in self._hooks]):
            pass

    def add_idle_hook(self, hook: IdleHook) -> None:
        """Have `advance()` await `hook` at its end.

        Args:
            hook: Returns when its work is done: True if there was any to wait for, whereupon all hooks are asked
                again, since it may have made work for another; False if there was none.
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
    """A `Clock` that tells virtual time on a `VirtualLoop` and real time on any other loop.

    The first loop on which it is read decides. Until then it stands still at `START`.
    """

    def __init__(self) -> None:
        self._virtual = VirtualClock()
        VirtualLoop.next_followers.add(self._virtual)
        self._chosen: Clock | None = None

    def now_ms(self) -> int:
        """Return the wall clock as epoch ms, rounded down."""
        return self._clock().now_ms()

    def monotonic_ms(self) -> int:
        """Return ms since some fixed instant, rounded down."""
        return self._clock().monotonic_ms()

    def seconds_until(self, at_ms: int) -> float:
        """Return the seconds from now until a wall clock instant; negative if it has passed."""
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

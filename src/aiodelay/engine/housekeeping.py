"""`Housekeeping`: tidies all lanes about every 10 s, and raises alarms that need no monitoring system."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection

from aiodelay.core.values import Alarm, Lane, Tidied
from aiodelay.core.wakeup import WakeUp
from aiodelay.errors import StoreError, StoreTooNewError
from aiodelay.ports import Work
from aiodelay.ports.clock import Clock

from .backoff import is_stray

__all__ = ["Housekeeping", "LoopLag", "tell"]

log: logging.Logger = logging.getLogger("aiodelay.housekeeping")

STEP_S = 10.0
STEP_LIMIT = 500


class Housekeeping:
    """Tidies the store, and watches the age of the oldest overdue message.

    Args:
        work: The store's dispatching side.
        clock: Measures intervals.
        lanes: A function that returns the lanes that this process serves now.
        alarm_ms: The age of the oldest overdue message, or the silence of the store, at which an alarm is raised.
        on_alarm: Called with each alarm, and again when it is over. Its exceptions are logged.
    """

    def __init__(
        self,
        work: Work,
        clock: Clock,
        lanes: Callable[[], Collection[Lane]],
        alarm_ms: int,
        on_alarm: Callable[[Alarm], object] | None,
    ) -> None:
        self._work, self._clock, self._lanes = work, clock, lanes
        self._alarm_ms, self._on_alarm = alarm_ms, on_alarm
        self._raised: dict[tuple[str, Lane], Alarm] = {}
        self._unserved: set[Lane] = set()
        self._reached_ms = clock.monotonic_ms()
        self._stop = WakeUp()
        self.overdue_age_ms: int = 0
        """Age in ms of the oldest overdue message over all lanes at the last step; 0 = no message is overdue."""

    def stop(self) -> None:
        """Let `run` return."""
        self._stop.set()

    async def run(self) -> None:
        """Take a step at once, and then about every 10 s, until stopped."""
        while not await self._stop.wait(0):
            await self._step()
            await self._stop.wait(STEP_S * random.uniform(0.9, 1.1))

    async def _step(self) -> None:
        self._judge_status()
        try:
            async with asyncio.timeout(max(self._alarm_ms / 1000, STEP_S)):  # a hanging store must raise an alarm too
                tidied = await self._work.tidy(self._lanes(), limit=STEP_LIMIT)
            self._judge(tidied)
            self._reached()
        except StoreTooNewError:  # the store has answered, and its status says why it serves no claims
            self._reached()
            self._judge_status()
        except (StoreError, TimeoutError) as error:
            log.debug("housekeeping step failed: %r", error)
            self._judge_silence()
        except (Exception, asyncio.CancelledError) as error:
            if not isinstance(error, Exception) and not is_stray(error):
                raise
            log.exception("a housekeeping step failed unexpectedly; the next step follows")
            self._judge_silence()

    def _reached(self) -> None:
        self._reached_ms = self._clock.monotonic_ms()
        self._end("store", "")

    def _judge_status(self) -> None:
        status = self._work.status()
        if status.phase == "ended":
            self._raise(Alarm("ended", "", 0, reason=status.why))
        else:
            self._end("ended", "")

    def _judge_silence(self) -> None:
        silence = self._clock.monotonic_ms() - self._reached_ms
        if silence >= self._alarm_ms:
            self._raise(Alarm("store", "", silence))

    def _judge(self, tidied: Tidied) -> None:
        ages = {
            state.lane: tidied.now_ms - state.oldest_due_ms for state in tidied.lanes if state.oldest_due_ms is not None
        }
        self.overdue_age_ms = max(ages.values(), default=0)
        unserved = {state.lane for state in tidied.lanes if not state.served}
        for lane, age in ages.items():
            if age >= self._alarm_ms:
                self._raise(Alarm("overdue", lane, age))
        for lane in unserved & self._unserved:
            self._raise(Alarm("unserved", lane, ages.get(lane, 0)))
        self._unserved = unserved
        for kind, lane in list(self._raised):
            if (kind == "overdue" and ages.get(lane, 0) < self._alarm_ms) or (
                kind == "unserved" and lane not in unserved
            ):
                self._end(kind, lane)

    def _raise(self, alarm: Alarm) -> None:
        if (alarm.kind, alarm.lane) not in self._raised:
            self._raised[alarm.kind, alarm.lane] = alarm
            level = logging.WARNING if alarm.kind == "unserved" else logging.ERROR
            log.log(level, "%s", alarm)
            self._tell(alarm)

    def _end(self, kind: str, lane: Lane) -> None:
        alarm = self._raised.pop((kind, lane), None)
        if alarm is not None:
            over = Alarm(alarm.kind, lane, 0, is_over=True)
            log.warning("%s", over)
            self._tell(over)

    def _tell(self, alarm: Alarm) -> None:
        tell(alarm, self._on_alarm)


def tell(alarm: Alarm, on_alarm: Callable[[Alarm], object] | None) -> None:
    """Call the scheduler's `on_alarm`, if it has one. Log an exception that it raises."""
    if on_alarm is None:
        return
    try:
        on_alarm(alarm)
    except Exception:
        log.exception("on_alarm failed")


class LoopLag:
    """Notices when the event loop was blocked. After that, no message is claimed until the loop runs freely again.

    The loop is probed only while messages are in flight, because only then can a handler block it. An idle loop costs
    nothing.

    Args:
        limit_s: If a timed callback runs late by more than this, the loop counts as blocked.
        is_needed: A function that returns whether to go on probing.
        on_clear: Called when the loop runs freely again.
    """

    PROBE_S = 0.5

    def __init__(self, limit_s: float, is_needed: Callable[[], bool], on_clear: Callable[[], None]) -> None:
        self._limit_s, self._is_needed, self._on_clear = limit_s, is_needed, on_clear
        self._loop = asyncio.get_running_loop()
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._was_lagging = False

    def may_claim(self) -> bool:
        """Return whether the loop runs freely. If the probe is needed and does not run, start it."""
        if self._timer is None:
            if self._is_needed():
                self._arm()
            return True
        return not self._was_lagging and self._loop.time() - self._due <= self._limit_s

    def stop(self) -> None:
        """End the probe."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        self._due = self._loop.time() + self.PROBE_S
        self._timer = self._loop.call_at(self._due, self._probe)

    def _probe(self) -> None:
        self._timer = None
        lag = self._loop.time() - self._due
        if lag > self._limit_s:
            log.warning("the event loop ran %.1f s late: a handler blocked it, or the machine is overloaded", lag)
            self._was_lagging = True
        elif self._was_lagging:
            self._was_lagging = False
            self._on_clear()
        if self._was_lagging or self._is_needed():
            self._arm()

"""The subscriber suite for handlers and sinks: each requests the demand that it has not requested yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from aiodelay import Context, Retry, Scheduler
from aiodelay.backends.stdout import StdoutSink
from aiodelay.core.values import Demand
from aiodelay.engine.delivery.dispatcher import Subscription as Place
from aiodelay.engine.delivery.runners import Runners
from aiodelay.engine.delivery.subscription import HandlerSubscription
from aiodelay.handlers.registration import EventTypes, Handler, spec_of
from aiodelay.memory import MemoryStore
from aiodelay.ports import Sink
from aiodelay.ports.clock import SystemClock
from aiodelay.testing import RecordingSink
from tests.support.subscribing import LANE, PlaceConformance, SinkConformance


class HandlerConformance(PlaceConformance):
    function: Handler

    def make_place(self, runners: Runners, on_free: Callable[[], None]) -> Place:
        spec = spec_of(
            type(self).function, types=EventTypes(), name=LANE, concurrency=3, timeout=None, retry=Retry(attempts=1)
        )
        scheduler = Scheduler(MemoryStore())
        now_ms = SystemClock().now_ms
        return HandlerSubscription(
            spec=spec,
            runners=runners,
            context=lambda claim, late, retry: Context(claim, late, retry, scheduler),
            now_ms=now_ms,
            on_free=on_free,
        )


async def at_once(payload: bytes) -> None: ...


async def after_a_while(payload: bytes) -> None:
    await asyncio.sleep(0.001)  # a run that takes real time


async def fails(payload: bytes) -> None:
    raise RuntimeError("no answer")


def in_a_thread(payload: bytes) -> None:
    time.sleep(0.001)  # a run that takes real time


class TestHandler(HandlerConformance):
    function = staticmethod(at_once)


class TestHandlerThatWaits(HandlerConformance):
    function = staticmethod(after_a_while)


class TestHandlerThatFails(HandlerConformance):
    function = staticmethod(fails)


class TestPlainHandler(HandlerConformance):
    function = staticmethod(in_a_thread)


class TestRecordingSink(SinkConformance):
    def make_sink(self) -> Sink:
        return RecordingSink(LANE, limits=Demand(3))


class TestStdoutSink(SinkConformance):
    def make_sink(self) -> Sink:
        return StdoutSink()

"""Objects that several threads use at once: another thread runs before each step of a call."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from itertools import count
from threading import Event
from typing import cast

import pytest

from aiodelay.backends.redis.records.shards import ShardLayout
from aiodelay.backends.redis.sharded import following_pulse
from aiodelay.backends.redis.sharded.following_pulse import FollowingPulse
from aiodelay.backends.redis.store.pulse import RedisPulse
from aiodelay.ports.pulse import Step
from aiodelay.telemetry import instruments
from aiodelay.telemetry.instruments import Attributes, Count, Instruments
from aiodelay.telemetry.names import SERVED
from tests.support.interleaving import interleaved
from tests.support.telemetry import Emitted


def test_no_addition_to_a_counter_is_lost() -> None:
    """Schedulers of several event loops share the counters of a provider."""
    for step in count(-1):
        counter = Count()
        add = partial(counter.add, 1)
        if not interleaved(add, add, before_step=step, inside=instruments):
            break
        assert counter.n == 2
    assert step > 0


class Shown:
    """An object with one metric, whose label is the object's name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def observe(self, metric: str) -> Iterable[tuple[float, Attributes]]:
        return [(1.0, {"name": self._name})] if metric == SERVED.name else []


@pytest.mark.parametrize("call", ["watch", "forget"])
def test_schedulers_that_open_and_close_at_the_same_time_are_observed_while_they_are_open(call: str) -> None:
    here, there = Shown("here"), Shown("there")
    for step in count(-1):
        emitted = Emitted()
        made = Instruments(emitted.meters.get_meter("aiodelay"))
        if call == "forget":
            made.watch(here)
        function, other = partial(getattr(made, call), here), partial(made.watch, there)
        if not interleaved(function, other, before_step=step, inside=instruments):
            break
        observed = {labels["name"] for labels, _ in emitted.points().get(SERVED.name, ())}
        assert observed == ({"there"} if call == "forget" else {"here", "there"})
    assert step > 0


class StillPulse:
    """A pulse of one shard that is not calling, and that nobody has refused."""

    is_calling, is_refused, found_layout = False, False, None
    woken: Event

    def may_begin(self) -> bool:
        return True

    def follow(self, *, is_refused: bool) -> None: ...

    def step(self, tokens: Collection[int]) -> Step:
        return Step(0)

    def leave(self) -> None: ...


def test_the_pulse_tells_whether_it_is_calling_while_its_thread_goes_on_with_another_layout() -> None:
    for step in count(-1):
        pulse = FollowingPulse(lambda layout: [cast("RedisPulse", StillPulse())], ShardLayout())
        pulse.shards_of(ShardLayout(epoch=2))
        read, go_on = partial(getattr, pulse, "is_calling"), partial(pulse.step, ())
        if not interleaved(read, go_on, before_step=step, inside=following_pulse):
            break
        assert not pulse.is_calling
    assert step > 0

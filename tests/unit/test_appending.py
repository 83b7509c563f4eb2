"""Messages that gather items, seen by a program: `Conflict.append()` and handlers with `gathered=True`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from aiodelay import (
    ConfigurationError,
    Conflict,
    Context,
    DuplicateIdError,
    Every,
    Later,
    Message,
    PartlyScheduledError,
    PayloadTooLargeError,
    PayloadTypeError,
    Retry,
    Scheduler,
    UnsupportedByStoreError,
)
from aiodelay.backends.kafka.store.store import open_store
from aiodelay.memory import MemoryStore
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.sinks import RecordingSink

pytestmark = pytest.mark.asyncio

APPEND = Conflict.append()


@dataclass
class Added:
    number: int


@dataclass
class Other:
    number: int


class Stage:
    """A scheduler whose handler notes the items of its runs, and then does what its test says."""

    def __init__(self, clock: VirtualClock) -> None:
        self.store = MemoryStore(clock=clock)
        retry = Retry(attempts=3, first="1s", cap="1s", jitter=0)
        self.scheduler = Scheduler(self.store, clock=clock, retry=retry, max_payload=100)
        self.runs: list[list[int]] = []

    def serve(self, do: Callable[[], Any] = lambda: None) -> None:
        @self.scheduler.handler(gathered=True)
        async def take(items: list[Added], context: Context) -> Any:  # noqa: ANN401 - what a test says
            assert context.messages == (context,)
            self.runs.append([item.number for item in items])
            result = do()
            return await result if asyncio.iscoroutine(result) else result

    async def add(self, *numbers: int, delay: str = "10s", conflict: Conflict = APPEND) -> None:
        for number in numbers:
            await self.scheduler.schedule(Added(number), delay=delay, id="m", conflict=conflict)


@pytest.fixture
def stage(clock: VirtualClock) -> Stage:
    return Stage(clock)


async def test_a_handler_gets_all_items_in_one_run(stage: Stage) -> None:
    stage.serve()
    async with stage.scheduler:
        await stage.add(1, 2, 3)
        await asyncio.sleep(9)
        assert stage.runs == []
        await stage.scheduler.run_until_idle()
    assert stage.runs == [[1, 2, 3]]


async def test_a_single_message_is_a_list_of_one(stage: Stage) -> None:
    stage.serve()
    async with stage.scheduler:
        await stage.scheduler.schedule(Added(1), delay="1s")
        await stage.scheduler.run_until_idle()
    assert stage.runs == [[1]]


async def test_a_full_message_does_not_wait(stage: Stage) -> None:
    stage.serve()
    async with stage.scheduler:
        await stage.add(1, 2, delay="1h", conflict=Conflict.append(2))
        await asyncio.sleep(1)
        assert stage.runs == [[1, 2]]


async def test_items_of_a_run_under_way_come_with_the_next_run(stage: Stage) -> None:
    stage.serve(lambda: asyncio.sleep(5))
    async with stage.scheduler:
        await stage.add(1, delay="0s")
        await asyncio.sleep(1)
        await stage.add(2, 3, delay="1s")
        await stage.scheduler.run_until_idle()
    assert stage.runs == [[1], [2, 3]]


async def test_a_retry_has_the_items_that_came_meanwhile(stage: Stage) -> None:
    outcomes = iter([Later("2s"), None])

    async def do() -> Later | None:
        await asyncio.sleep(1)
        return next(outcomes)

    stage.serve(do)
    async with stage.scheduler:
        await stage.add(1, delay="0s")
        await asyncio.sleep(0.5)
        await stage.add(2, delay="1h")
        await stage.scheduler.run_until_idle()
    assert stage.runs == [[1], [1, 2]]


async def test_many_items_join_in_one_call(stage: Stage) -> None:
    stage.serve()
    async with stage.scheduler:
        messages = [Message(Added(n), delay="1s", id="m", conflict=APPEND) for n in range(5)]
        assert await stage.scheduler.schedule_many(messages) == 5
        await stage.scheduler.run_until_idle()
    assert stage.runs == [[0, 1, 2, 3, 4]]


async def test_bytes_gather_as_lines(stage: Stage) -> None:
    lines: list[bytes] = []

    @stage.scheduler.handler(name="lines", gathered=True)
    async def take(items: list[bytes]) -> None:
        lines.extend(items)

    async with stage.scheduler:
        for line in (b"a", b"b"):
            await stage.scheduler.schedule(line, delay="1s", id="m", to="handler:lines", conflict=APPEND)
        await stage.scheduler.run_until_idle()
    assert lines == [b"a", b"b"]


async def test_a_sink_gets_one_payload_of_lines(clock: VirtualClock) -> None:
    sink = RecordingSink("sink")
    async with Scheduler(MemoryStore(clock=clock), clock=clock, sinks=[sink]) as scheduler:
        for number in (1, 2):
            to = f"{sink.name}:a"
            await scheduler.schedule(Added(number), delay="1s", id="m", to=to, conflict=APPEND)
        await scheduler.run_until_idle()
    (delivery,) = sink.deliveries
    assert delivery.envelope.payload == b'{"number":1}\n{"number":2}'


async def test_a_handler_of_single_events_says_what_it_lacks(stage: Stage) -> None:
    @stage.scheduler.handler
    async def take(item: Added) -> None:
        raise AssertionError

    async with stage.scheduler:
        await stage.add(1, 2, 3, delay="1s")
        await stage.scheduler.run_until_idle()
    (letter,) = await stage.store.dead_letters()
    assert letter.reason == "undecodable"
    assert letter.record.last_error == (
        "RecordFormatError: stored record cannot be read: it has 3 items (Conflict.append),"
        " which only a handler with gathered=True can take"
    )


async def test_json_of_several_lines_is_one_event(stage: Stage) -> None:
    seen: list[int] = []

    @stage.scheduler.handler
    async def take(item: Added) -> None:
        seen.append(item.number)

    async with stage.scheduler:
        await stage.scheduler.schedule(b'{\n"number": 1\n}', delay="0s", to="handler:Added")
        await stage.scheduler.schedule(b'{\n"number": 1,\n', delay="0s", to="handler:Added")
        await stage.scheduler.run_until_idle()
    assert seen == [1]
    (letter,) = await stage.store.dead_letters()
    assert "gathered" not in (letter.record.last_error or "")


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "options", "problem"),
    [
        (b"1\n2", {"to": "handler:lines"}, "payload of message 'm' is 2 lines; allowed: one line that is not empty"),
        (b"", {"to": "handler:lines"}, "payload of message 'm' is empty; allowed: one line that is not empty"),
        (None, {"to": "sink:a", "key": b"k"}, "payload of message 'm' is of the encoding null; allowed: JSON or bytes"),
    ],
    ids=["two lines", "empty", "nothing"],
)
async def test_a_payload_that_is_not_one_line_is_refused(
    clock: VirtualClock, event: object, options: dict[str, Any], problem: str
) -> None:
    async with Scheduler(MemoryStore(clock=clock), clock=clock, sinks=[RecordingSink("sink")]) as scheduler:
        with pytest.raises(PayloadTypeError) as raised:
            await scheduler.schedule(event, delay="1s", id="m", conflict=APPEND, **options)
    assert str(raised.value) == f"{problem}, for Conflict.append()"


async def test_another_codec_than_json_is_refused(clock: VirtualClock) -> None:
    async with Scheduler(MemoryStore(clock=clock), clock=clock, encoding="msgpack") as scheduler:
        with pytest.raises(PayloadTypeError, match="payload of message 'm' is of the encoding msgpack"):
            await scheduler.schedule(Added(1), delay="1s", id="m", conflict=APPEND)


async def test_a_joined_payload_that_is_too_large_is_refused(stage: Stage) -> None:
    async with stage.scheduler:
        await stage.add(*range(7))
        with pytest.raises(PayloadTooLargeError) as raised:
            await stage.add(7)
        assert str(raised.value) == (
            "payload of message 'm' is too large to join the items that wait under this id;"
            " allowed: at most 100 bytes together (setting max_payload)"
        )
        with pytest.raises(PartlyScheduledError):
            await stage.scheduler.schedule_many([Message(Added(8), delay="1s", id="m", conflict=APPEND)])
        stored = await stage.scheduler.store.get("m")
    assert stored is not None
    assert [msgspec.json.decode(line)["number"] for line in stored.record.envelope.payload.split(b"\n")] == [*range(7)]


async def test_a_message_of_another_kind_is_refused(stage: Stage) -> None:
    async with stage.scheduler:
        await stage.add(1)
        with pytest.raises(DuplicateIdError) as raised:
            await stage.scheduler.schedule(Other(1), delay="1s", id="m", conflict=APPEND)
    assert str(raised.value) == (
        "message 'm' cannot join the stored message, which is of another kind; items that gather under one id need the"
        " same destination, event type and encoding, and no recurrence"
    )


async def test_a_message_that_recurs_cannot_be_appended(stage: Stage) -> None:
    async with stage.scheduler:
        with pytest.raises(ConfigurationError, match="conflict of message 'm' is append; allowed: for a message that"):
            await stage.scheduler.schedule(Added(1), every=Every("1m"), id="m", conflict=APPEND)


async def test_kafka_refuses_the_rule(clock: VirtualClock) -> None:
    class LikeKafka(MemoryStore):
        traits = open_store("kafka://host/schedules", namespace="default", clock=clock).traits

    async with Scheduler(LikeKafka(clock=clock), clock=clock) as scheduler:
        with pytest.raises(UnsupportedByStoreError, match="conflict of message 'm' is append; allowed: "):
            await scheduler.schedule(Added(1), delay="1s", id="m", conflict=APPEND)


@pytest.mark.parametrize("most", [0, -1, 1.5, True, "5", 1_000_001])
async def test_a_wrong_number_of_items_is_refused(most: Any) -> None:  # noqa: ANN401 - wrong on purpose
    with pytest.raises(ConfigurationError, match=r"conflict.max_items is .*; allowed: an integer from 1 to 1000000"):
        Conflict.append(most)


@pytest.mark.parametrize("options", [{"batch": 5}, {"batch_wait": "1s"}, {"on_failure": "halve"}], ids=str)
async def test_gathered_excludes_the_options_of_batches(options: dict[str, Any]) -> None:
    scheduler = Scheduler("memory://")

    async def take(items: list[Added]) -> None: ...

    with pytest.raises(ConfigurationError, match="for a handler with gathered=True; allowed"):
        scheduler.add_handler(take, gathered=True, **options)


async def test_gathered_needs_a_list() -> None:
    scheduler = Scheduler("memory://")

    async def take(item: Added) -> None: ...

    with pytest.raises(ConfigurationError, match="gathered is given to a handler of single events"):
        scheduler.add_handler(take, gathered=True)

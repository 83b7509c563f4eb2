"""`UserChanges` of a Kafka partition asks the broker again, at most three times, if an answer took too long (B3)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka import TopicPartition

from aiodelay.backends.kafka.store.partition.user_changes import MOST_OVERTAKEN, UserChanges
from aiodelay.testing import VirtualClock

pytestmark = pytest.mark.asyncio

PLACE = TopicPartition("schedules", 0)
KEY = b"m"


class SlowBroker:
    """Answers each question after the next of these delays, the last one again and again."""

    def __init__(self, *delays_ms: int, found: dict[bytes, int] | None = None) -> None:
        self.delays_ms, self.found, self.n_asked = delays_ms, found or {}, 0

    async def keys_since(self, place: TopicPartition, offset: int) -> dict[bytes, int]:
        assert (place, offset) == (PLACE, 7)
        delay_ms = self.delays_ms[min(self.n_asked, len(self.delays_ms) - 1)]
        self.n_asked += 1
        await asyncio.sleep(delay_ms / 1000)
        return self.found


def changes() -> UserChanges:
    unread = SimpleNamespace(others_from=lambda own: 7)
    return UserChanges(PLACE, cast("Any", SimpleNamespace()), cast("Any", unread))


async def last_offset(broker: SlowBroker, asking: UserChanges) -> int | None:
    batch = SimpleNamespace(changes=[SimpleNamespace(key=KEY, targets=("out",), is_stale=False)], outgoing=[])
    return await asking.last_offset(cast("Any", broker), cast("Any", batch), [])


@pytest.mark.parametrize(
    ("delays_ms", "n_asked"),
    [((19,), 1), ((21, 19), 2), ((21, 21, 19), 3), ((21,), 3)],
    ids=["in time", "the second in time", "the third in time", "never in time"],
)
async def test_a_late_answer_is_asked_for_again(clock: VirtualClock, delays_ms: tuple[int, ...], n_asked: int) -> None:
    broker = SlowBroker(*delays_ms)
    assert await last_offset(broker, changes()) is None
    assert broker.n_asked == n_asked


async def test_a_found_change_ends_the_questions(clock: VirtualClock) -> None:
    broker = SlowBroker(50, found={KEY: 9, b"another": 12})
    assert await last_offset(broker, changes()) == 9
    assert broker.n_asked == 1


async def test_after_three_aborts_in_a_row_nothing_is_asked(clock: VirtualClock) -> None:
    broker, asking = SlowBroker(0, found={KEY: 9}), changes()
    for _ in range(MOST_OVERTAKEN):
        assert await last_offset(broker, asking) == 9
        asking.note_aborted()
    assert await last_offset(broker, asking) is None
    asking.note_committed()
    assert await last_offset(broker, asking) == 9

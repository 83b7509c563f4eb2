"""Old data of Kafka: what an old version left in a schedules topic is read, and goes on as it did then."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.old_data.answers import CHAPTERS, FIXTURES, answered, answers, told_of
from tests.support.old_data.kafka import OldKafka, records_of

KAFKA = FIXTURES / "kafka"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_topics_are_read_and_go_on_as_before(kafka: str, chapter: str) -> None:
    assert asyncio.run(answers(OldKafka(KAFKA, kafka), told_of(KAFKA), chapter)) == answered(KAFKA, chapter)


def test_topics_are_written_as_before(kafka: str) -> None:
    """The same story leaves the same records; transactions make the offsets differ."""
    new = OldKafka(KAFKA, kafka)
    asyncio.run(new.tell())
    for file, old in new.old_topics().items():
        for partition, before in zip(asyncio.run(new.topics())[file], old, strict=True):
            assert records_of(partition) == records_of(before), f"{file}, partition {before.number}"

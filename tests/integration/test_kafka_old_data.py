"""Old data of Kafka: what an old version left in a schedules topic is read, and goes on as it did then."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.old_data.answers import CHAPTERS, FIXTURES, answered, answers, told_of
from tests.support.old_data.kafka import OldKafka

KAFKA = FIXTURES / "kafka"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_topics_are_read_and_go_on_as_before(kafka: str, chapter: str) -> None:
    assert asyncio.run(answers(OldKafka(KAFKA, kafka), told_of(KAFKA), chapter)) == answered(KAFKA, chapter)

"""Old data of Kafka: this version reads a schedules topic of an old version and continues as the old one did."""

from __future__ import annotations

import asyncio

import pytest

from aiodelay.backends.kafka.store.partition import commands
from aiodelay.core.record_format import FIELDS
from tests.support.old_data.answers import CHAPTERS, FIXTURES, LATER_FIELDS, answered, answers, told_of
from tests.support.old_data.kafka import OldKafka, records_of

KAFKA = FIXTURES / "kafka"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a settlement wait for a machine that stands still. An engine would repeat it, and a story does not."""
    monkeypatch.setattr(commands, "STALL_S", 60.0)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_topics_are_read_and_go_on_as_before(kafka: str, chapter: str) -> None:
    assert asyncio.run(answers(OldKafka(KAFKA, kafka), told_of(KAFKA), chapter)) == answered(KAFKA, chapter)


def test_every_header_is_in_the_data() -> None:
    records = [each for part in OldKafka(KAFKA, "no broker").old_topics()["schedules.jsonl"] for each in part.records]
    found = {name for record in records for name, _ in record.headers}
    assert {field.name for field in FIELDS if field.header and field.header not in found} == LATER_FIELDS


def test_topics_are_written_as_before(kafka: str) -> None:
    """The same story leaves the same records; transactions make the offsets differ."""
    new = OldKafka(KAFKA, kafka)
    asyncio.run(new.tell())
    for file, old in new.old_topics().items():
        for partition, before in zip(asyncio.run(new.topics())[file], old, strict=True):
            assert records_of(partition) == records_of(before), f"{file}, partition {before.number}"

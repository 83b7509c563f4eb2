"""Requests to the owners of partitions to cancel messages, and the owners' answers.

A process that does not own all partitions uses this module. The process writes each request into the partition as a
record. The owner reads the request, decides, and writes the answer into the same partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from aiokafka import TopicPartition
from msgspec import Struct

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.client import UNAVAILABLE, Consumer, Outgoing, reason_of
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.topics.observing import MOST_RECORDS, WAIT_MS, answering, observer
from aiodelay.backends.kafka.topics.writer import Writer
from aiodelay.core.values import Cancel, Outcome, Refused, Stored, Unknown

__all__ = ["ask_to_cancel"]

ANSWER_S = 30.0


class _Question(Struct, gc=False):
    """One request to cancel, in one partition.

    Attributes:
        cancel: The cancel.
        place: The partition.
        offset: The offset of the request, once it was read back.
        answer: The answer of the owner; "" = no answer yet.
    """

    cancel: Cancel
    place: TopicPartition
    offset: int | None = None
    answer: str = ""


async def ask_to_cancel(
    cluster: Cluster, writer: Writer, cancels: Mapping[Cancel, Collection[TopicPartition]]
) -> list[Outcome]:
    """Have the owners of partitions cancel messages, and return the outcomes, in order.

    The outcome is `Unknown` if an owner does not answer in time, or runs an earlier version. The owner may still cancel
    the message later.

    Args:
        cluster: The cluster of the partitions.
        writer: An open writer.
        cancels: The partitions that may have the message of each cancel. Each cancel has `only`, and an op of its own.

    Raises:
        StoreUnavailableError: The cluster does not answer. Some cancels may be carried out.
    """
    if not cancels:
        return []
    questions = [_Question(cancel, place) for cancel, places in cancels.items() for place in places]
    outgoing = [
        Outgoing(each.place.topic, *records.encode_ask_to_cancel(each.cancel), each.place.partition)
        for each in questions
    ]
    async with observer(cluster) as consumer:
        places = sorted({each.place for each in questions})
        with answering(cluster):
            ends = await consumer.end_offsets(places)
        consumer.assign(places)
        for place in places:
            consumer.seek(place, ends[place])
        try:
            written = await writer.write(outgoing)
        except UNAVAILABLE as error:
            return [Unknown(reason_of(error)) for _ in cancels]
        asked = [each for each, sent in zip(questions, written, strict=True) if sent.error is None or sent.in_doubt]
        with answering(cluster):
            await _until_answered(consumer, asked)
    found: dict[bytes, list[str]] = {cancel.op: [] for cancel in cancels}
    for each in questions:
        found[each.cancel.op].append(each.answer)
    return [_verdict(cancel, found[cancel.op], cluster) for cancel in cancels]


async def _until_answered(consumer: Consumer, questions: Sequence[_Question]) -> None:
    """Read until all requests are answered, or until no answer has come for `ANSWER_S`."""
    left = {(each.place, records.key_of(each.cancel.id)): each for each in questions}
    now_s = asyncio.get_running_loop().time
    end_s = now_s() + ANSWER_S
    while left and now_s() < end_s:
        found = await consumer.getmany(timeout_ms=WAIT_MS, max_records=MOST_RECORDS)
        before = len(left)
        for place, batch in found.items():
            for record in batch:
                _read(left, place, record)
        if len(left) < before:
            end_s = now_s() + ANSWER_S


def _read(left: dict[tuple[TopicPartition, bytes], _Question], place: TopicPartition, record: Any) -> None:  # noqa: ANN401 - aiokafka's
    asked = records.asked_op(record.key, record.value, record.headers)
    if asked is not None:
        key, op = asked
        question = left.get((place, key))
        if question is not None and question.cancel.op == op:
            question.offset = record.offset
        return
    answer = records.answer_of(record.key, record.value, record.headers)
    if answer is not None:
        key, outcome, read_to = answer
        question = left.get((place, key))
        if question is not None and question.offset is not None and question.offset < read_to:
            question.answer = outcome
            del left[place, key]


def _verdict(cancel: Cancel, answers: Sequence[str], cluster: Cluster) -> Outcome:
    """Return the outcome of a cancel from the answers of several partitions. At most one partition has the message."""
    assert cancel.only is not None
    revision, due_ms = cancel.only
    assert due_ms is not None
    for answer in answers:
        if answer in ("cancelled", "in_flight"):
            return Stored(cast("Any", answer), revision, due_ms)
    if "" in answers:
        what = f"no process of this version that dispatches from {cluster.name} has answered within {ANSWER_S:g} s"
        return Unknown(what)
    return Refused("not_found" if all(each == "not_found" for each in answers) else "outdated")

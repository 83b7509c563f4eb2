"""Tasks that write to topics: all is acknowledged, refused records go to the dead topic, or there is an error."""

from __future__ import annotations

import asyncio

import pytest

from aiodelay.backends.kafka.client import Outgoing
from aiodelay.backends.kafka.client.options import read_url
from aiodelay.backends.kafka.records import DEAD_REASON
from aiodelay.errors import StoreUnavailableError
from aiodelay.spark.producing import AT_ONCE, dead_reason, produce
from tests.support.kafka import create_topic, new_name, read


def test_what_a_topic_never_takes_goes_to_the_dead_topic_and_all_else_where_it_belongs(kafka: str) -> None:
    async def run() -> None:
        small, dead = [await create_topic(kafka, new_name(), max_message_bytes=limit) for limit in (2_000, 20_000)]
        n = AT_ONCE + 1
        given = [Outgoing(small, b"k", b"%d" % number, [("h", b"x")]) for number in range(n)]
        given[7:7] = [Outgoing(small, b"large", bytes(9_000), [("h", b"x")])]
        given[9:9] = [Outgoing("no-such-topic", b"lost", b"v", [])]
        given += [Outgoing(dead, b"huge", bytes(30_000), [("h", b"x"), dead_reason("a reason")])]
        await produce(read_url(kafka, "test"), iter(given), dead=dead, timeout_ms=30_000)
        assert sorted(int(each.value) for each in await read(kafka, small)) == [*range(n)]
        letters = {each.key: each for each in await read(kafka, dead)}
        assert letters.keys() == {b"large", b"lost", None}
        reasons = {key: dict(each.headers)[DEAD_REASON].decode() for key, each in letters.items()}
        assert reasons[b"large"].startswith(f"{small}: ")
        assert reasons[b"lost"] == "no-such-topic: there is no such topic"
        assert letters[b"large"].headers[0] == ("h", b"x")
        assert len(letters[b"large"].value) == 9_000
        assert (letters[None].value, [*letters[None].headers]) == (None, [dead_reason("a reason")])

    asyncio.run(run())


def test_a_record_that_is_refused_takes_no_other_with_it(kafka: str) -> None:
    async def run() -> None:
        keyed = await create_topic(kafka, new_name(), cleanup_policy="compact")
        dead = await create_topic(kafka, new_name())
        given = [Outgoing(keyed, b"%d" % number, b"v", []) for number in range(9)]
        given[4:4] = [Outgoing(keyed, None, b"without key", [("h", b"x")])]
        await produce(read_url(kafka, "test"), iter(given), dead=dead, timeout_ms=30_000)
        assert sorted(int(each.key) for each in await read(kafka, keyed)) == [*range(9)]
        (letter,) = await read(kafka, dead)
        assert (letter.key, letter.value, letter.headers[0]) == (None, b"without key", ("h", b"x"))
        assert dict(letter.headers)[DEAD_REASON].decode().startswith(f"{keyed}: ")

    asyncio.run(run())


def test_what_cannot_be_written_anywhere_is_an_error_in_time(kafka: str) -> None:
    lost = [Outgoing("no-such-topic", b"lost", b"v", [])]
    with pytest.raises(StoreUnavailableError, match=f"{kafka} is unavailable"):
        asyncio.run(produce(read_url(kafka, "test"), iter(lost), dead="no-such-topic-either", timeout_ms=500))
    away = read_url("kafka://127.0.0.1:1?timeout_ms=300", "test")
    with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1:1"):
        asyncio.run(produce(away, iter(lost), dead="dead", timeout_ms=500))

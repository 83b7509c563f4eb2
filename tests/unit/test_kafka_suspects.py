"""Kafka suspects are tried in turn with other messages, and their groups are halved."""

from __future__ import annotations

from collections import deque

from aiodelay.backends.kafka.pending.changes import Change
from aiodelay.backends.kafka.pending.suspects import Suspects


def changes(n: int) -> list[Change]:
    return [Change(b"%d" % i, 0, None) for i in range(n)]


def test_suspects_and_others_take_turns() -> None:
    suspects, others, found = Suspects(), deque(changes(2)), changes(5)
    assert suspects.take_turn(others) is others
    suspects.halve(found)
    assert list(suspects) == found
    first = suspects.take_turn(others)
    assert list(first) == found[:2]
    assert suspects.take_turn(others) is others
    assert list(suspects.take_turn(others)) == found[2:]
    assert suspects.take_turn(others) is others
    assert not suspects


def test_suspects_go_on_while_nothing_else_waits() -> None:
    suspects, found = Suspects(), changes(4)
    suspects.halve(found)
    assert [list(suspects.take_turn(deque())) for _ in range(2)] == [found[:2], found[2:]]


def test_who_is_suspected_no_longer_leaves_no_empty_group() -> None:
    suspects, found = Suspects(), changes(3)
    suspects.halve(found)
    suspects.discard({found[0], found[1]})
    assert list(suspects.take_turn(deque())) == found[2:]
    assert not suspects
    suspects.add([])
    assert not suspects

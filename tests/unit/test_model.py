"""The checks and computations of the model's values."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from aiodelay.core.values import AWAY_AFTER_MS, Conflict, DeadLetter, Envelope, JournalEntry, Record, Registered
from aiodelay.errors import ConfigurationError

NOW = 1_900_000_000_000


@pytest.mark.parametrize("version", [-1, 1 << 63, True, 1.0, "1"])
def test_a_version_is_an_integer_that_fits(version: object) -> None:
    with pytest.raises(ConfigurationError, match=r"conflict\.version is .*an integer from 0 to 2\*\*63-1"):
        Conflict.newer(version)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", [0, (1 << 63) - 1])
def test_a_version_is_kept(version: int) -> None:
    assert Conflict.newer(version).version == version


@pytest.mark.parametrize("revision", [-1, 1 << 48, True, 1.0, "1"])
def test_a_revision_is_an_integer_that_fits(revision: object) -> None:
    with pytest.raises(ConfigurationError, match=r"conflict\.revision is .*an integer from 0 to 2\*\*48-1"):
        Conflict.if_revision(revision)  # type: ignore[arg-type]


@pytest.mark.parametrize("revision", [0, (1 << 48) - 1])
def test_a_revision_is_kept(revision: int) -> None:
    assert Conflict.if_revision(revision).revision == revision


@pytest.mark.parametrize(
    ("seen_ms", "in_flight", "is_away"),
    [
        (NOW, 0, False),
        (NOW - AWAY_AFTER_MS + 1, 0, False),
        (NOW - AWAY_AFTER_MS, 0, True),
        (NOW - AWAY_AFTER_MS, 1, False),
        (None, 0, True),
    ],
)
def test_a_consumer_that_has_asked_for_nothing_for_a_minute_is_away(
    seen_ms: int | None, in_flight: int, is_away: bool
) -> None:
    consumer = Registered("topic", "log", "name", False, NOW, seen_ms, 3, in_flight, 0, 0, 1)
    assert consumer.is_away(NOW) is is_away


def test_a_dead_letter_tells_its_errors_and_its_traceback() -> None:
    record = Record(Envelope("m", "lane"), 1, 2, bytes(8))
    assert (DeadLetter(record, "late", 3).errors, DeadLetter(record, "late", 3).traceback) == ((), None)
    failed = replace(record, earlier_errors=("a", "b"), last_error="c", traceback="lines")
    assert (DeadLetter(failed, "late", 3).errors, DeadLetter(failed, "late", 3).traceback) == (("a", "b", "c"), "lines")


@pytest.mark.parametrize(
    ("event", "detail", "is_put_off"), [("again", "", True), ("again", "KeyError", False), ("done", "", False)]
)
def test_an_attempt_is_put_off_if_it_is_made_again_without_an_error(event: str, detail: str, is_put_off: bool) -> None:
    assert JournalEntry(1, NOW, event, "m", 1, "lane", NOW, 1, detail).is_put_off is is_put_off

"""Features that this version does not know: the error, and the behaviour of a scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from itertools import count

import pytest

from aiodelay import Alarm, Scheduler, StoreTooNewError, __version__
from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.pending.checkpoint import Witness, checkpoint_of
from aiodelay.backends.kafka.pending.pending_index import PendingIndex
from aiodelay.backends.kafka.pending.placement import Placement
from aiodelay.core import features
from aiodelay.core.values import WorkStatus
from aiodelay.kafka.records import Kind, Read
from aiodelay.testing import VirtualClock
from tests.support.versions import VersionedStore

NOW = VirtualClock().now_ms()
HERE = f"aiodelay {__version__} does not know; upgrade this process, which claims nothing until then"


# --- the error --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        ({"quotas": "1.3.0"}, f"quotas (switched on by aiodelay 1.3.0), which {HERE}"),
        (
            {"quotas": "1.3.0", "limits": "1.4.0", "known": "1.2.0"},
            (f"limits (switched on by aiodelay 1.4.0), quotas (switched on by aiodelay 1.3.0), features that {HERE}"),
        ),
    ],
)
def test_the_error_names_features_versions_and_remedy(
    recorded: Mapping[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "KNOWN", frozenset({"known"}))
    with pytest.raises(StoreTooNewError) as refused:
        features.check_known("sqlite:///a.db", recorded)
    assert str(refused.value) == f"sqlite:///a.db uses {said}"


def test_what_is_known_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "KNOWN", frozenset({"known"}))
    features.check_known("sqlite:///a.db", {})
    features.check_known("sqlite:///a.db", {"known": "1.2.0"})


# --- a scheduler ------------------------------------------------------------------------------------------


class Store(VersionedStore):
    """A store whose open claims are renewed, also by a process that does not know the features."""

    def check(self, step: str) -> None:
        if step in ("claim", "tidy"):
            super().check(step)


@pytest.mark.asyncio
async def test_a_scheduler_says_that_the_data_are_newer_and_goes_on_once_they_are_not(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    store, alarms, handled = Store(clock=clock), list[Alarm](), list[bytes]()

    def said(level: int) -> list[str]:
        return [
            each.getMessage() for each in caplog.records if each.name == "aiodelay.dispatcher" and each.levelno == level
        ]

    async def handle(payload: bytes) -> None:
        handled.append(payload)

    async with Scheduler(store, clock=clock, on_alarm=alarms.append) as scheduler:
        scheduler.add_handler(handle, name="work")
        await asyncio.sleep(1)
        store.recorded["quotas"] = "1.3.0"
        await scheduler.schedule(b"m", delay="1s", to="handler:work")
        await asyncio.sleep(20)
        (error,) = said(logging.ERROR)
        assert error == f"claiming failed: memory:// uses quotas (switched on by aiodelay 1.3.0), which {HERE}"
        await asyncio.sleep(120)
        assert len(said(logging.ERROR)) == 3, "once a minute"
        assert handled == []
        assert [(each.kind, each.is_over) for each in alarms] == [("ended", False)]
        assert "quotas" in alarms[0].reason
        assert scheduler.status() == WorkStatus("ended", why=alarms[0].reason)
        store.recorded.clear()
        await asyncio.sleep(20)
        assert handled == [b"m"]
        ended = [each.is_over for each in alarms if each.kind == "ended"]  # the late message may cause another alarm
        assert ended == [False, True]
        assert scheduler.status().phase == "ready"
    assert len(said(logging.ERROR)) == 3


# --- what stands in a schedules topic ---------------------------------------------------------------------


def test_golden_record_of_a_feature() -> None:
    key, value, headers = records.encode_feature("quotas", "1.3.0")
    assert key is not None
    assert (key, value, headers) == (b"\x00aiodelay/feature/quotas", b"1.3.0", [])
    assert records.glance(key, value, headers).kind is Kind.FEATURE
    assert records.feature_in(key, value) == ("quotas", "1.3.0")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"\x00aiodelay/feature/quotas", None),
        (b"\x00aiodelay/feature/", b"1"),
        (b"\x00aiodelay/feature/Quotas", b"1"),
        (b"\x00aiodelay/mark", b"{}"),
        (b"m", b"1"),
    ],
)
def test_what_names_no_feature(key: bytes, value: bytes | None) -> None:
    assert records.feature_in(key, value) is None


def test_an_index_reads_features_and_a_checkpoint_keeps_their_records() -> None:
    index = PendingIndex(clock=VirtualClock(), placement=Placement("t/0"), claims=count(1))
    for offset, name in enumerate(("quotas", "limits")):
        index.reader.read(Read(offset, NOW, *records.encode_feature(name, "1.3.0")))
    index.reader.read(Read(2, NOW, b"\x00aiodelay/feature/Bad Name", b"1", []))
    assert index.state.features == {"quotas": "1.3.0", "limits": "1.3.0"}
    assert checkpoint_of(
        index.state, index.table, index.placement, witness=Witness(-1, 0, 0), now=NOW, whole_ms=0
    ).offsets[:2] == [0, 1]

"""The ports as third parties import them, and custom stores that implement some of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest

from aiodelay import ConfigurationError, Scheduler, UnknownSinkError, ports
from aiodelay.core.values import Blocked, Promise, Reach
from aiodelay.memory import MemoryStore
from aiodelay.ports import Store
from aiodelay.testing import RecordingSink
from aiodelay.testing.conformance import StoreConformance
from aiodelay.testing.faults import FaultyStore

PUBLIC = [
    "Bounded",
    "BulkLoad",
    "DeadLetters",
    "Feed",
    "Followed",
    "Guarded",
    "Identified",
    "Inspectable",
    "Instances",
    "Journal",
    "JournalReader",
    "Lists",
    "Loads",
    "LocalFeed",
    "PartialAnswerError",
    "Pauses",
    "PutsBack",
    "Recurring",
    "Registry",
    "Scannable",
    "Sink",
    "Source",
    "Store",
    "StoreTraits",
    "Transfer",
    "Transferring",
    "Upgradable",
    "Work",
]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_is_imported_from_the_package(name: str) -> None:
    assert name in ports.__all__
    assert isinstance(getattr(ports, name), type)


# --- a store with a part missing ---------------------------------------------------------------------------


class OldStore:
    """A store as the ports once allowed it: without inspection, control and journal."""

    name, traits = "old://", MemoryStore.traits
    now_ms, apply, work = MemoryStore.now_ms, MemoryStore.apply, MemoryStore.work
    __aenter__, __aexit__ = MemoryStore.__aenter__, MemoryStore.__aexit__


class InheritingStore(OldStore, Store):
    """The same, with the Protocols' own methods, which do nothing."""


class StoreWithoutJournal(MemoryStore):
    journal = None  # type: ignore[assignment]


PARTS = (
    "counts, dead_letters, get, instances, journal, journal_reader, load, pause, paused, position, purge, put_back, "
    "redrive, resume, search, series"
)


@pytest.mark.parametrize(
    ("store", "without"),
    [
        (OldStore, f"an OldStore without {PARTS}"),
        (InheritingStore, f"an InheritingStore without {PARTS}"),
        (StoreWithoutJournal, "a StoreWithoutJournal without journal"),
    ],
)
def test_a_scheduler_refuses_a_store_that_lacks_methods_and_names_them(store: Any, without: str) -> None:  # noqa: ANN401
    with pytest.raises(ConfigurationError) as caught:
        Scheduler(store())
    assert str(caught.value) == f"store is {without}; allowed: a class with every method of aiodelay.ports.Store"


def test_the_suite_refuses_it_too() -> None:
    class Suite(StoreConformance):
        def make_store(self, clock: object, *, journal: int = 0) -> Any:  # noqa: ANN401
            return OldStore()

    with pytest.raises(ConfigurationError, match="an OldStore without counts, "):
        Suite().test_s5_cancelled_is_never_delivered()


def test_a_store_that_forwards_all_calls_is_taken() -> None:
    store = FaultyStore(MemoryStore())
    assert Scheduler(store).store is store


# --- the sinks and sources that a store brings along ------------------------------------------------------


class BringingStore(MemoryStore):
    """A store with endpoints, and without transfer."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks, self.sources = [RecordingSink("own")], list[ports.Source]()


class MovingStore(MemoryStore):
    """A store with transfer, and without endpoints."""

    def reaches(self, sink: ports.Sink) -> Reach:
        return Reach(Promise.EXACTLY_ONCE, f"{sink.name} is here")

    def transferring(self, sink: ports.Sink) -> AbstractContextManager[ports.Transferring]:
        raise NotImplementedError

    async def blocked(self) -> Sequence[Blocked]:
        return ()


def test_a_store_brings_sinks_along_without_moving_messages() -> None:
    scheduler = Scheduler(BringingStore())
    assert scheduler.reaches("own").promise is Promise.AT_LEAST_ONCE


def test_a_store_moves_messages_to_a_sink_that_it_was_given() -> None:
    scheduler = Scheduler(MovingStore(), sinks=[RecordingSink("given")])
    assert scheduler.reaches("given") == Reach(Promise.EXACTLY_ONCE, "given is here")
    with pytest.raises(UnknownSinkError):
        scheduler.reaches("own")


# --- traits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["order_per_group", "wakes_other_processes", "leases_survive", "counted_journal"])
def test_traits_refuse_a_flag_that_is_the_suites(flag: str) -> None:
    traits: dict[str, Any] = {name: getattr(MemoryStore.traits, name) for name in MemoryStore.traits.__struct_fields__}
    assert ports.StoreTraits(**traits) == MemoryStore.traits
    with pytest.raises(TypeError, match=flag):
        ports.StoreTraits(**(traits | {flag: True}))
    assert isinstance(getattr(StoreConformance, flag), bool)

"""The ports as third parties import them, and the stores that are refused because they lack a part of `Store`."""

from __future__ import annotations

from typing import Any

import pytest

from aiodelay import ConfigurationError, Scheduler, ports
from aiodelay.memory import MemoryStore
from aiodelay.ports import Store
from aiodelay.testing.conformance import StoreConformance
from aiodelay.testing.faults import FaultyStore

PUBLIC = [
    "Bounded",
    "BulkLoad",
    "DeadLetters",
    "Feed",
    "Followed",
    "Guarded",
    "Holds",
    "Identified",
    "Inspectable",
    "Instances",
    "Journal",
    "Lists",
    "Loads",
    "PutsBack",
    "Recurring",
    "Registry",
    "Scannable",
    "Sink",
    "Source",
    "Store",
    "StoreTraits",
    "Trail",
    "Transfer",
    "Transferring",
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
    "counts, dead_letters, get, hold, holds, instances, journal, load, position, purge, put_back, redrive, release, "
    "search, series, trail"
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

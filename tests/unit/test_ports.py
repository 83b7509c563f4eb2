"""The ports as third parties import them."""

from __future__ import annotations

import pytest

from aiodelay import ports

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

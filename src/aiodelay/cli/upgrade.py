"""`aiodelay upgrade`: lists the features that a store uses, and switches on all features that this version knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, NamedTuple

from cyclopts import Parameter

from aiodelay.core import features
from aiodelay.ports import Upgradable

from .errors import CommandError
from .output import confirm, print_json, print_table
from .place import Place

__all__ = ["upgrade"]


class _Feature(NamedTuple):
    """A feature that is in use or that this version knows. `version` is the version that switched it on; None = off."""

    name: str
    version: str | None
    is_known: bool

    @property
    def state(self) -> str:
        if self.version is None:
            return "off"
        return f"on, by aiodelay {self.version}" if self.is_known else f"on, by aiodelay {self.version}; unknown here"


async def upgrade(
    url: str | None = None,
    /,
    *,
    list_: Annotated[bool, Parameter(name="--list", negative="")] = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="")] = False,
    place: Place = Place(),
) -> int:
    """Switch on the features that this version knows, once all processes run it.

    After that, processes of older versions claim no messages, and log the reason. A feature cannot be switched off
    again.

    Args:
        url: The URL of the store. Default: --store.
        list_: Only list the features in use, and the features that this version can switch on.
        yes: Do not ask for confirmation.
    """
    if url is not None:
        place = replace(place, store=url)
    async with place.opened() as scheduler:
        store = scheduler.opened_store()
        if not isinstance(store, Upgradable):
            raise CommandError(f"{store.name} records no features: no process of another version can share its data")
        recorded = await store.features()
        if not list_:
            features.check_known(store.name, recorded)
            if off := sorted(features.KNOWN - features.ON_DEMAND - recorded.keys()):
                question = f"switch on {', '.join(off)}, after which older versions claim nothing from {store.name}"
                await confirm(question, yes=yes)
                await store.switch_on(off)
                recorded = await store.features()
    _print(recorded, place)
    return 0


def _print(recorded: Mapping[str, str], place: Place) -> None:
    names = sorted({*recorded, *features.KNOWN})
    found = [_Feature(name, recorded.get(name), name in features.KNOWN) for name in names]
    if place.json:
        print_json(*({"feature": each.name, "switched_on_by": each.version, "known": each.is_known} for each in found))
    elif found:
        print_table(["feature", "state"], [(each.name, each.state) for each in found])
    else:
        print("no features are in use, and this version knows none")

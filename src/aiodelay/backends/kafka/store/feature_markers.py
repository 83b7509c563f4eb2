"""`FeatureMarkers`: the features in use, recorded in every partition."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from aiodelay.backends.kafka import records
from aiodelay.core.version import __version__

from .broadcast import all_places, write_everywhere
from .features import recorded_features
from .store_parts import StorePort

__all__ = ["FeatureMarkers"]


class FeatureMarkers(StorePort):
    """`Upgradable` over the partitions of a store: its owner reads there which features are in use."""

    async def features(self) -> Mapping[str, str]:
        """Return the features in use; each topic's first partition is read through for them."""
        self._parts.tasks.check_open()
        return await recorded_features(self._parts.cluster, self._parts.options.topics)

    async def switch_on(self, names: Collection[str]) -> None:
        """Record features in every partition; in the first partitions last, so that all others have the record then."""
        recorded = await self.features()
        places = sorted(all_places(self._parts), key=lambda place: place.partition == 0)
        others = sum(place.partition > 0 for place in places)
        for name in sorted(set(names) - recorded.keys()):
            wire = records.encode_feature(name, __version__)
            await write_everywhere(self._parts, wire, places[:others], "switched on")
            await write_everywhere(self._parts, wire, places[others:], "switched on")

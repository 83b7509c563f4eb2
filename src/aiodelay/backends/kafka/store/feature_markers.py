"""`FeatureMarkers`: reads and records the features in use. Every partition has a record for each feature."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import aclosing

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.topics.observing import observer
from aiodelay.core.version import __version__

from .broadcast import all_places, write_everywhere
from .journal_reader import KafkaJournalReader
from .store_parts import StorePort

__all__ = ["FeatureMarkers"]

ALL_OFFSETS = range(1 << 62)


class FeatureMarkers(StorePort):
    """The port `Upgradable` over the partitions of a store. Each owner reads the features in use from its partition."""

    async def features(self) -> Mapping[str, str]:
        """Return the features in use. This reads the first partition of each topic from its beginning."""
        self._parts.tasks.check_open()
        found: dict[str, str] = {}
        cluster = self._parts.cluster
        async with observer(cluster) as consumer:
            for topic in self._parts.options.topics:
                found |= await _features_in(KafkaJournalReader(cluster, topic, consumer))
        return found

    async def switch_on(self, names: Collection[str]) -> None:
        """Record features in every partition.

        The record is written to the first partition of each topic last. `features` reads only first partitions, so it
        finds a feature only if all other partitions have it too.
        """
        recorded = await self.features()
        places = sorted(all_places(self._parts), key=lambda place: place.partition == 0)
        others = sum(place.partition > 0 for place in places)
        for name in sorted(set(names) - recorded.keys()):
            wire = records.encode_feature(name, __version__)
            await write_everywhere(self._parts, wire, places[:others], f"the feature {name}")
            await write_everywhere(self._parts, wire, places[others:], f"the feature {name}")


async def _features_in(topic: KafkaJournalReader) -> dict[str, str]:
    found: dict[str, str] = {}
    async with aclosing(topic.records(0, ALL_OFFSETS, lambda _: None)) as batches:
        async for batch in batches:
            named = (records.feature_in(each.key, each.value) for each in batch if each.key)
            found |= dict(filter(None, named))
    return found

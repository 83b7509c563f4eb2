"""Compare the state of aiokafka's modules, classes and loggers before and after aiodelay uses a cluster.

As a program, this module opens a store, a sink and a source, and prints the name of each part that has changed.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import pkgutil
import sys
from collections.abc import Mapping

import aiokafka

NOT_OURS = {
    "__warningregistry__",  # Python records shown warnings there
    "_PRODUCER_CLIENT_ID_SEQUENCE",  # aiokafka numbers the producers of a process
    "_cache",  # a logger records enabled levels there
}
_PLAIN = (str, bytes, int, float, tuple, frozenset)


def state() -> dict[str, object]:
    """Return each part of the state by its name. Containers are copies."""
    modules = [importlib.import_module(each.name) for each in pkgutil.walk_packages(aiokafka.__path__, "aiokafka.")]
    found: dict[str, object] = {}
    for module in (aiokafka, *modules):
        found |= _parts(module.__name__, vars(module))
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__:
                found |= _parts(f"{module.__name__}.{name}", vars(value))
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "aiokafka" and isinstance(logger, logging.Logger):
            found |= _parts(f"logger {name}", vars(logger))
    return found


def _parts(owner: str, parts: Mapping[str, object]) -> dict[str, object]:
    return {
        f"{owner}.{name}": value.copy() if isinstance(value, dict | list | set) else value
        for name, value in parts.items()
        if name not in NOT_OURS
    }


def differences(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the names of the parts that were added, removed or changed."""
    return sorted(
        name
        for name in before.keys() | after.keys()
        if name not in before or name not in after or not _is_same(before[name], after[name])
    )


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)


async def use(bootstrap: str, schedules: str, topic: str) -> None:
    """Open a store that delivers to a topic, and a sink and a source of the same topic."""
    from aiodelay import Scheduler  # noqa: PLC0415 - import it after the state was read
    from aiodelay.kafka import KafkaSink, KafkaSource  # noqa: PLC0415

    arrived = set[bytes]()
    has_both = asyncio.Event()
    async with (
        Scheduler(f"kafka://{bootstrap}/{schedules}?create_topic=true&partitions=1") as of_store,
        Scheduler("memory://", sinks=[KafkaSink(bootstrap)], sources=[KafkaSource(bootstrap)]) as of_sink,
    ):

        @of_sink.handler(name="note", source=f"kafka:{topic}?group={topic}")
        async def note(event: bytes) -> None:
            arrived.add(event)
            if len(arrived) == 2:
                has_both.set()

        await of_store.schedule(b"store", to=f"kafka:{topic}", delay="0s")
        await of_sink.schedule(b"sink", to=f"kafka:{topic}", delay="0s")
        async with asyncio.timeout(60):
            await has_both.wait()


if __name__ == "__main__":
    before = state()
    asyncio.run(use(*sys.argv[1:]))
    for difference in differences(before, state()):
        print(difference)

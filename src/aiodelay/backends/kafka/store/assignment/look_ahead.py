"""`look_ahead`: reads the records of far messages into memory when the messages come within the horizon.

A far message is due beyond the store's horizon, and its record is not in memory (`partition/horizon.py`). This loop
also logs an error once a minute while too many messages are pending.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from itertools import count

from aiodelay.backends.kafka.client import log_failure, reason_of
from aiodelay.backends.kafka.store.partition import Partition
from aiodelay.errors import StoreUnavailableError

__all__ = ["look_ahead"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

LOOK_AHEAD_S, LOOKS_A_MINUTE = 1.0, 60


async def look_ahead(
    name: str,
    partitions: Callable[[], Collection[Partition]],
    *,
    fullness: Callable[[], str],
    on_near: Callable[[], None],
) -> None:
    """Every `LOOK_AHEAD_S`, read the records of far messages that have come within the horizon. Run until cancelled.

    Args:
        name: The name of the store for logs.
        partitions: Returns the partitions that this process owns.
        fullness: Returns an error text if too many messages are pending; otherwise "".
        on_near: Called when such records were read into memory.
    """
    for turn in count():
        if turn % LOOKS_A_MINUTE == 0 and (full := fullness()):
            log.error("%s: %s", name, full)
        for partition in list(partitions()):
            if partition.is_ready:
                try:
                    if await partition.horizon.follow():
                        on_near()
                except Exception as error:  # noqa: BLE001 - as in `SessionRunner.run`
                    what = f"{partition.index.name}: messages that will soon be due cannot be read"
                    log_failure(log, what, reason_of(error), error, (StoreUnavailableError,))
        await asyncio.sleep(LOOK_AHEAD_S)

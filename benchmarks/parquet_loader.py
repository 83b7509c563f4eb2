"""The plain program of BD9, which gives the rows of Parquet files to `schedule_many`.

Usage: python -m benchmarks.parquet_loader <store's URL> <folder of the files>
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq

from aiodelay import Message, Scheduler


async def load(url: str, folder: Path) -> None:
    """Store a message for each row."""
    async with Scheduler(url, dispatch=False) as scheduler:
        await scheduler.schedule_many(messages(folder))


def messages(folder: Path) -> Iterator[Message]:
    """Read the rows in batches, and yield a message for each row."""
    for file in sorted(folder.glob("*.parquet")):
        for batch in pq.ParquetFile(file).iter_batches(columns=["id", "due_at", "payload", "to"]):
            columns = (column.to_pylist() for column in batch.columns)
            for message_id, due_at, payload, to in zip(*columns, strict=True):
                yield Message(payload, at=due_at, id=message_id, to=to)


if __name__ == "__main__":
    asyncio.run(load(sys.argv[1], Path(sys.argv[2])))

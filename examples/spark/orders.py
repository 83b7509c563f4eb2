"""Writes example orders as Parquet, each with the time of its reminder. The same arguments give the same orders.

Run it: `python examples/spark/orders.py orders --rows 1000`; then
`aiodelay spark backfill --from parquet:orders --map 'id=order_id,due_at=remind_at,payload=struct(*)' …`
"""

from __future__ import annotations

import argparse
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    [
        ("order_id", pa.string()),
        ("customer", pa.string()),
        ("total_cents", pa.int64()),
        ("remind_at", pa.timestamp("us", tz="UTC")),
    ]
)
ROWS_A_FILE = 100_000


def write_orders(folder: Path, rows: int, first: datetime, span: timedelta) -> None:
    """Write orders in files of 100,000. Their reminders begin at `first` and are spread evenly over `span`.

    Args:
        folder: A folder that does not exist yet.
        rows: The number of orders.
        first: The time of the first reminder, with a time zone.
        span: The time over which the reminders are spread.
    """
    folder.mkdir(parents=True)
    chance = random.Random(rows)
    for start in range(0, rows, ROWS_A_FILE):
        numbers = range(start, min(start + ROWS_A_FILE, rows))
        table = pa.table(
            {
                "order_id": [f"order-{n:07}" for n in numbers],
                "customer": [f"customer-{chance.randrange(1000):03}" for _ in numbers],
                "total_cents": [chance.randrange(100, 100_000) for _ in numbers],
                "remind_at": [first + span * n / rows for n in numbers],
            },
            SCHEMA,
        )
        pq.write_table(table, folder / f"part-{start // ROWS_A_FILE:05}.parquet")


def main() -> None:
    """Read the arguments and write the orders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--first", type=datetime.fromisoformat, help="ISO 8601 with an offset; default: in one hour")
    parser.add_argument("--span-s", type=float, default=60.0, help="seconds over which the reminders are spread")
    given = parser.parse_args()
    first = given.first or datetime.now(UTC) + timedelta(hours=1)
    if first.tzinfo is None:
        parser.error("--first needs an offset, such as 2027-01-01T09:00:00+01:00")
    write_orders(given.folder, given.rows, first, timedelta(seconds=given.span_s))
    print(f"{given.rows} orders in {given.folder}, with reminders from {first.isoformat()} on")


if __name__ == "__main__":
    main()

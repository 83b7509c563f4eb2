"""A writer process that stores half of its rows, reports this, and continues when a test tells it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import msgspec
import pyarrow as pa

from aiodelay.spark.loading import load
from tests.spark.test_write_faults import batches_of, settings


def halves() -> Iterator[pa.RecordBatch]:
    first, second = batches_of([1_000, 1_000])
    yield first
    print("half", flush=True)
    sys.stdin.readline()
    yield second


if __name__ == "__main__":
    url, namespace = sys.argv[1:]
    print(msgspec.json.encode(load(settings(url, namespace), halves())).decode())

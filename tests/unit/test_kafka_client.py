"""The size of a record in a batch."""

from __future__ import annotations

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from aiodelay.backends.kafka.client import Outgoing


@pytest.mark.parametrize("key", [None, b"", b"k" * 300])
@pytest.mark.parametrize("size", [None, 0, 1, 49, 50, 51, 60, 8_180, 8_190, 1_000_000])
@pytest.mark.parametrize("headers", [[], [("name", b"value"), ("é", b"")]])
def test_the_size_of_a_batch_of_one_record_is_known_to_the_byte(
    key: bytes | None, size: int | None, headers: list[tuple[str, bytes]]
) -> None:
    value = None if size is None else b"x" * size
    builder = DefaultRecordBatchBuilder(
        2, 0, is_transactional=1, producer_id=-1, producer_epoch=-1, base_sequence=0, batch_size=2 << 20
    )
    builder.append(0, None, key, value, headers)
    assert Outgoing("t", key, value, headers).batch_size == len(builder.build())

"""`Records`: reads record batches like aiokafka, but also headers whose names are not UTF-8 (K18).

aiokafka's parser raises an error at such a header, and raises it again at each repetition: a consumer would never read
past that record. Java's producer cannot write such a header, but other producers can. In a name that this module reads,
the bytes that are not UTF-8 are surrogates (`surrogateescape`), as in Python's file names.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from aiokafka.record.default_records import _DefaultRecordBatchPy
from aiokafka.record.memory_records import MemoryRecords

__all__ = ["Records"]

_HEAD, _LENGTH = 12, slice(8, 12)  # the start of a batch: its base offset, and the number of bytes that follow


class Records:
    """Yields batches one after the other, like aiokafka's `MemoryRecords`.

    Args:
        data: The records in the answer to a fetch.
    """

    def __init__(self, data: bytes) -> None:
        self._all, self._data, self._at = MemoryRecords(data), data, 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of aiokafka's class
        return getattr(self._all, name)

    def next_batch(self) -> _Batch:
        """Return the next batch; `has_next` says whether there is one."""
        begin = self._at
        self._at += _HEAD + int.from_bytes(self._data[begin : begin + _HEAD][_LENGTH])
        return _Batch(self._all.next_batch(), self._data, slice(begin, self._at))


class _Batch:
    def __init__(self, batch: Any, data: bytes, where: slice) -> None:  # noqa: ANN401 - aiokafka has no types
        self._batch, self._data, self._where = batch, data, where

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of aiokafka's class
        return getattr(self._batch, name)

    def __next__(self) -> Any:  # noqa: ANN401 - a record of aiokafka's
        return next(self._batch)

    def __iter__(self) -> Iterator[Any]:
        read = 0
        try:
            for record in self._batch:
                read += 1
                yield record
        except UnicodeDecodeError:
            yield from islice(_LenientBatch(self._data[self._where]), read, None)


class _LenientBatch(_DefaultRecordBatchPy):  # type: ignore[misc]  # aiokafka has no types
    def _maybe_uncompress(self) -> None:
        super()._maybe_uncompress()
        self._buffer: Any = _Lenient(self._buffer)


class _Lenient(bytearray):
    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 - as `bytearray` has it
        found = super().__getitem__(key)
        return _Lenient(found) if isinstance(key, slice) else found

    def decode(self, *_: str) -> str:
        return super().decode(errors="surrogateescape")

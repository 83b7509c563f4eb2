"""murmur2, the hash of a key by which Java's producer chooses a partition: of one key, or of many keys at once.

A producer hashes the keys of a transaction together: for each key, this takes a quarter of the time.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from struct import Struct

__all__ = ["murmur2", "murmur2_of_each", "partition_at"]

_M, _MASK, _SEED = 0x5BD1E995, 0xFFFFFFFF, 0x9747B28C
_FEW, _LONG = 8, 256
"""Fewer keys of one length than `_FEW`, and keys of more bytes than `_LONG`, are hashed one by one."""


@lru_cache(maxsize=256)
def _parts(length: int) -> Struct:
    """Return the parts of a key of this length: its 32-bit words, and the remaining bytes."""
    return Struct(f"<{length // 4}I{length % 4}B")


def murmur2(key: bytes) -> int:
    """Return the hash of a key as Java's `org.apache.kafka.common.utils.Utils.murmur2` computes it, unsigned."""
    length = len(key)
    parts, words = _parts(length).unpack(key), length // 4
    h = _SEED ^ length
    for word in parts[:words]:
        k = word * _M & _MASK
        h = (h * _M ^ (k ^ k >> 24) * _M) & _MASK
    if rest := key[words * 4 :]:
        h = ((h ^ int.from_bytes(rest, "little")) * _M) & _MASK
    h = ((h ^ (h >> 13)) * _M) & _MASK
    return h ^ (h >> 15)


def murmur2_of_each(keys: AbstractSet[bytes]) -> dict[bytes, int]:
    """Return the hash of each key, by key."""
    if len(keys) < _FEW:
        return {key: murmur2(key) for key in keys}
    by_length: dict[int, list[bytes]] = {}
    for key in keys:
        by_length.setdefault(len(key), []).append(key)
    found: dict[bytes, int] = {}
    for length, some in by_length.items():
        hashes = map(murmur2, some) if len(some) < _FEW or length > _LONG else _hashes(some, length)
        found.update(zip(some, hashes, strict=True))
    return found


def partition_at(hashed: int, partitions: int) -> int:
    """Return the partition that Java's producer chooses for a key with this hash (`murmur2`)."""
    return (hashed & 0x7FFFFFFF) % partitions


def _hashes(keys: Sequence[bytes], length: int) -> Sequence[int]:
    """Return the hashes of keys of one length. Each step of `murmur2` is done for all keys at once.

    Each large number has a lane of 64 bits for each key. A lane holds 32 bits, so its product stays in the lane.
    """
    columns = list(zip(*_parts(length).iter_unpack(b"".join(keys)), strict=True))
    ones = _lanes([1] * len(keys))
    mask = ones * _MASK
    h = ones * (_SEED ^ length)
    for column in columns[: length // 4]:
        k = _lanes(column) * _M & mask
        k = (k ^ k >> 24 & ones * (_MASK >> 24)) * _M & mask
        h = h * _M & mask ^ k
    if rest := columns[length // 4 :]:
        for i, column in enumerate(rest):
            h ^= _lanes(column) << 8 * i
        h = h * _M & mask
    h = (h ^ h >> 13 & ones * (_MASK >> 13)) * _M & mask
    h ^= h >> 15 & ones * (_MASK >> 15)
    return memoryview(h.to_bytes(8 * len(keys), sys.byteorder)).cast("Q")


def _lanes(values: Iterable[int]) -> int:
    return int.from_bytes(array("Q", values).tobytes(), sys.byteorder)

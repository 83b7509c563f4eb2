"""Encoding and decoding of keys, records and list elements in Redis."""

__all__: list[str] = []

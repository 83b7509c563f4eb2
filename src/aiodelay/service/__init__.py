"""The service: stores with their schedulers, intakes and an HTTP API in one process, for people who run it."""

from __future__ import annotations

__all__: list[str] = []

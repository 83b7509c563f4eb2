"""The folder for test files that do not have to survive a power cut."""

from __future__ import annotations

from pathlib import Path

__all__ = ["IN_MEMORY"]

IN_MEMORY: str | None = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""A folder in which `fsync` costs nothing. None: this machine has no such folder, and tests use any other."""

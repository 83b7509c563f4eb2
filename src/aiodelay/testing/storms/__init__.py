"""Storms: run a test again and again with faults, and compare the outcome with that of a run without faults."""

from .decorator import storm
from .outcome import StormError
from .seeded_loop import SeededLoop

__all__ = ["SeededLoop", "StormError", "storm"]

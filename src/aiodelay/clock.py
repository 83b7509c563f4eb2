"""The old import path of `aiodelay.ports.clock`, kept for existing programs."""

from aiodelay.ports.clock import Clock, SystemClock

__all__ = ["Clock", "SystemClock"]

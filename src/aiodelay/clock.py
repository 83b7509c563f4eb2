"""Old path of `aiodelay.ports.clock`, which goes on working."""

from aiodelay.ports.clock import Clock, SystemClock

__all__ = ["Clock", "SystemClock"]

"""The test kit: virtual time, assertions, injected faults and storms, for tests of programs that schedule messages."""

from .assertions import assert_delivered, assert_scheduled
from .clock import START, VirtualClock
from .faults import Fault, FaultyStore, InjectedBugError, Injection, Step
from .kit import StillInFlightError, on_virtual_time, sink_of, store_of
from .loop import VirtualLoop, WaitingForeverError
from .sinks import RecordingSink
from .storms import StormError, storm

__all__ = [
    "START",
    "Fault",
    "FaultyStore",
    "InjectedBugError",
    "Injection",
    "RecordingSink",
    "Step",
    "StillInFlightError",
    "StormError",
    "VirtualClock",
    "VirtualLoop",
    "WaitingForeverError",
    "assert_delivered",
    "assert_scheduled",
    "on_virtual_time",
    "sink_of",
    "store_of",
    "storm",
]

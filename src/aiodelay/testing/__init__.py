"""The test kit: virtual time, assertions and injected faults, for tests of programs that schedule messages."""

from .assertions import assert_delivered, assert_scheduled
from .clock import START, VirtualClock
from .faults import Fault, FaultyStore, InjectedBugError, Injection, Step
from .kit import StillInFlightError, on_virtual_time, sink_of, store_of
from .loop import VirtualLoop, WaitingForeverError
from .sinks import RecordingSink

__all__ = [
    "START",
    "Fault",
    "FaultyStore",
    "InjectedBugError",
    "Injection",
    "RecordingSink",
    "Step",
    "StillInFlightError",
    "VirtualClock",
    "VirtualLoop",
    "WaitingForeverError",
    "assert_delivered",
    "assert_scheduled",
    "on_virtual_time",
    "sink_of",
    "store_of",
]

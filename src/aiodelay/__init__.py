"""Deliver a message later: durable, cancellable, on time. This package exports the public names of aiodelay."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .core.version import __version__

if TYPE_CHECKING:
    from .core.durations import Duration
    from .core.recurrence import Cron, Every
    from .core.retry import Retry
    from .core.values import (
        Alarm,
        CancelOutcome,
        Conflict,
        DeadKey,
        DeadLetter,
        FireOutcome,
        Late,
        Limit,
        Message,
        PartlyScheduledError,
        Rejected,
        RescheduleOutcome,
        Scheduled,
        ScheduleOutcome,
        Snapshot,
        State,
    )
    from .errors import (
        AiodelayError,
        BlockingCallError,
        ClosedError,
        CodecError,
        ConfigurationError,
        DuplicateHandlerError,
        DuplicateIdError,
        HandlerResultError,
        HandlerSignatureError,
        HandlerTimeoutError,
        HeaderError,
        InputError,
        MessageIdError,
        MissingExtraError,
        OutcomeUnknownError,
        PayloadTooLargeError,
        PayloadTypeError,
        RecordFormatError,
        ScheduleTimeError,
        SinkUnavailableError,
        StoreBusyError,
        StoreDamagedError,
        StoreError,
        StoreFullError,
        StoreMismatchError,
        StoreTooNewError,
        StoreUnavailableError,
        TargetError,
        TargetNotAllowedError,
        UnknownSinkError,
        UnsupportedByStoreError,
        WrongLoopError,
    )
    from .handlers.context import Later, Reject
    from .handlers.dependencies import Depends
    from .handlers.registration import event
    from .scheduler import Context, Received, Scheduler
    from .telemetry.settings import Telemetry

__all__ = [
    "AiodelayError",
    "Alarm",
    "BlockingCallError",
    "CancelOutcome",
    "ClosedError",
    "CodecError",
    "ConfigurationError",
    "Conflict",
    "Context",
    "Cron",
    "DeadKey",
    "DeadLetter",
    "Depends",
    "DuplicateHandlerError",
    "DuplicateIdError",
    "Duration",
    "Every",
    "FireOutcome",
    "HandlerResultError",
    "HandlerSignatureError",
    "HandlerTimeoutError",
    "HeaderError",
    "InputError",
    "Late",
    "Later",
    "Limit",
    "Message",
    "MessageIdError",
    "MissingExtraError",
    "OutcomeUnknownError",
    "PartlyScheduledError",
    "PayloadTooLargeError",
    "PayloadTypeError",
    "Received",
    "RecordFormatError",
    "Reject",
    "Rejected",
    "RescheduleOutcome",
    "Retry",
    "ScheduleOutcome",
    "ScheduleTimeError",
    "Scheduled",
    "Scheduler",
    "SinkUnavailableError",
    "Snapshot",
    "State",
    "StoreBusyError",
    "StoreDamagedError",
    "StoreError",
    "StoreFullError",
    "StoreMismatchError",
    "StoreTooNewError",
    "StoreUnavailableError",
    "TargetError",
    "TargetNotAllowedError",
    "Telemetry",
    "UnknownSinkError",
    "UnsupportedByStoreError",
    "WrongLoopError",
    "__version__",
    "event",
]

_HOMES = {
    "AiodelayError": "errors",
    "Alarm": "core.values",
    "BlockingCallError": "errors",
    "CancelOutcome": "core.values",
    "ClosedError": "errors",
    "CodecError": "errors",
    "ConfigurationError": "errors",
    "Conflict": "core.values",
    "Context": "scheduler",
    "Cron": "core.recurrence",
    "DeadKey": "core.values",
    "DeadLetter": "core.values",
    "Depends": "handlers.dependencies",
    "DuplicateHandlerError": "errors",
    "DuplicateIdError": "errors",
    "Duration": "core.durations",
    "Every": "core.recurrence",
    "FireOutcome": "core.values",
    "HandlerResultError": "errors",
    "HandlerSignatureError": "errors",
    "HandlerTimeoutError": "errors",
    "HeaderError": "errors",
    "InputError": "errors",
    "Late": "core.values",
    "Limit": "core.values",
    "Later": "handlers.context",
    "Message": "core.values",
    "MessageIdError": "errors",
    "MissingExtraError": "errors",
    "OutcomeUnknownError": "errors",
    "PartlyScheduledError": "core.values",
    "PayloadTooLargeError": "errors",
    "PayloadTypeError": "errors",
    "Received": "scheduler",
    "RecordFormatError": "errors",
    "Reject": "handlers.context",
    "Rejected": "core.values",
    "RescheduleOutcome": "core.values",
    "Retry": "core.retry",
    "ScheduleOutcome": "core.values",
    "ScheduleTimeError": "errors",
    "Scheduled": "core.values",
    "Scheduler": "scheduler",
    "SinkUnavailableError": "errors",
    "Snapshot": "core.values",
    "State": "core.values",
    "StoreBusyError": "errors",
    "StoreDamagedError": "errors",
    "StoreError": "errors",
    "StoreFullError": "errors",
    "StoreMismatchError": "errors",
    "StoreTooNewError": "errors",
    "StoreUnavailableError": "errors",
    "TargetError": "errors",
    "TargetNotAllowedError": "errors",
    "Telemetry": "telemetry.settings",
    "UnknownSinkError": "errors",
    "UnsupportedByStoreError": "errors",
    "WrongLoopError": "errors",
    "event": "handlers.registration",
}
"""Public names, and the modules that define them. A module is imported when one of its names is first used."""

if not TYPE_CHECKING:  # type checkers must not see this function: they would accept any name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

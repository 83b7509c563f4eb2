"""Deliver a message later: durable, cancellable, on time."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ._version import __version__

if TYPE_CHECKING:
    from .alarm import Alarm
    from .context import Later, Reject
    from .dependencies import Depends
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
    from .handlers import event
    from .message import Message, PartlyScheduledError, Rejected, Scheduled
    from .model import (
        CancelOutcome,
        Conflict,
        DeadKey,
        DeadLetter,
        FireOutcome,
        Late,
        RescheduleOutcome,
        ScheduleOutcome,
        Snapshot,
        State,
    )
    from .recurrence import Cron, Every
    from .retry import Retry
    from .scheduler import Context, Received, Scheduler
    from .telemetry.settings import Telemetry
    from .timeunits import Duration

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
    "Alarm": "alarm",
    "BlockingCallError": "errors",
    "CancelOutcome": "model",
    "ClosedError": "errors",
    "CodecError": "errors",
    "ConfigurationError": "errors",
    "Conflict": "model",
    "Context": "scheduler",
    "Cron": "recurrence",
    "DeadKey": "model",
    "DeadLetter": "model",
    "Depends": "dependencies",
    "DuplicateHandlerError": "errors",
    "DuplicateIdError": "errors",
    "Duration": "timeunits",
    "Every": "recurrence",
    "FireOutcome": "model",
    "HandlerResultError": "errors",
    "HandlerSignatureError": "errors",
    "HandlerTimeoutError": "errors",
    "HeaderError": "errors",
    "InputError": "errors",
    "Late": "model",
    "Later": "context",
    "Message": "message",
    "MessageIdError": "errors",
    "MissingExtraError": "errors",
    "OutcomeUnknownError": "errors",
    "PartlyScheduledError": "message",
    "PayloadTooLargeError": "errors",
    "PayloadTypeError": "errors",
    "Received": "scheduler",
    "RecordFormatError": "errors",
    "Reject": "context",
    "Rejected": "message",
    "RescheduleOutcome": "model",
    "Retry": "retry",
    "ScheduleOutcome": "model",
    "ScheduleTimeError": "errors",
    "Scheduled": "message",
    "Scheduler": "scheduler",
    "SinkUnavailableError": "errors",
    "Snapshot": "model",
    "State": "model",
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
    "event": "handlers",
}
"""Public names, and the modules that define them: imported when a name is first asked for."""

if not TYPE_CHECKING:  # else type checkers would take any name for one of ours

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
